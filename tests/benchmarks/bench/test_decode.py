"""Steps of decoding: what a case holds, that each is right before it is timed, and its figures."""

import dataclasses
import types

import pytest
import torch

from benchmarks.bench import decode as bench
from benchmarks.bench import decode_table, decoders, load, peers
from benchmarks.bench.bandwidth import bandwidth
from benchmarks.bench.caches import (
    by_head,
    copies_of,
    is_cold,
    make_cache,
    make_queries,
    paged,
    quantised,
)
from benchmarks.bench.decode import Plan, run_decode
from benchmarks.bench.decoders import Absent, Decoder, decoder
from tilewise.explain.steps import KINDS, decode
from tilewise.reference import attention_reference

HEADS = 4, 2, 16
QUICK = dict(rounds=2, round_ms=1.0, show=lambda line: None)


def steps(pages=(0, 4), queries=(1, 3), **options):
    return [
        decode(2, 40, HEADS, queries=n, page_size=size, dtype="float32", **options)
        for n in queries
        for size in pages
    ]


@pytest.fixture(autouse=True)
def quick_bandwidth(monkeypatch):
    monkeypatch.setattr(bench, "bandwidth", lambda *asked: {"copy": 10.0, "read": 20.0})


def test_bytes_and_flops_of_a_step():
    of = decode(32, 8192, (32, 8, 128))
    assert of.kv_bytes == 2 * 32 * 8192 * 8 * 128 * 2 and copies_of(of) == 2
    assert of.flops == 4 * 32 * 32 * 8192 * 128
    assert str(of) == "decode B32 S8192 H32:8 D128 bfloat16"
    assert copies_of(decode(1, 8192, (32, 8, 128))) == 8  # 33.6 MB each, 256 MiB together
    three = decode(1, 8192, (32, 8, 128), queries=3)
    assert three.flops == 4 * 32 * 128 * (8192 + 8191 + 8190)


def test_lengths_of_a_ragged_batch():
    of = decode(0, 0, HEADS, lengths="40,7,19", dtype="float32")
    assert (of.batch, of.seqlen_k, of.sequences) == (3, 40, (40, 7, 19))
    assert of.kv_bytes == 66 * 2 * 32 * 4
    assert of.sizes == "40,7,19 B3 S<=40"
    with pytest.raises(ValueError, match="8 queries"):
        decode(0, 0, HEADS, lengths="40,7,19", queries=8)


def test_a_chunk_beside_decodes():
    of = decode(3, 40, HEADS, queries=1, chunk=10, dtype="float32")
    assert of.queries == (1, 1, 10)
    assert of.flops == 2 * 4 * 32 * (40 + 40 + 10 * 40 - 45)
    assert make_queries(of, "cpu").shape == (12, 4, 16)
    assert of.kv_bytes == 3 * of._replace(seqlen_q=0).kv_bytes
    with pytest.raises(ValueError, match="41 queries"):
        decode(3, 40, HEADS, chunk=41)
    assert of._replace(chunks=2).queries == (1, 10, 10)
    with pytest.raises(ValueError, match="4 chunks"):
        decode(3, 40, HEADS, chunk=4, chunks=4)
    with pytest.raises(ValueError, match="no sequence"):
        decode(1, 40, HEADS, chunk=0)


def test_an_append_is_timed_with_its_step(monkeypatch):
    """Keys that the call writes and rotates; what writes none is wrong, and torch has no such."""
    cases = [steps(appends=True, lengths="40,7")]
    (right,) = run_decode(cases, [decoder("tilewise"), decoder("sdpa")], **QUICK)
    timed = [outcome for outcome in right if outcome.provider == "tilewise"]
    assert len(timed) == 4 and all(outcome.row is not None for outcome in timed)
    refused = {outcome.refused for outcome in right if outcome.provider == "sdpa"}
    assert refused == {"it appends and rotates nothing"}

    def forgetful(of, device):
        attend = decoders.decoder("tilewise").prepare(of._replace(appends=False), device)
        return lambda q, cache: attend(q, cache._replace(new=None))

    (wrong,) = run_decode(cases, [Decoder("forgetful", forgetful)], **QUICK)
    assert all(outcome.wrong for outcome in wrong)
    with pytest.raises(ValueError, match="a step that appends"):
        decode(2, 40, HEADS, cache="e4m3", appends=True)


def test_a_chunk_and_decodes_are_timed_apart_and_in_one_call(monkeypatch):
    """Each held to fp64, of long chunks the last queries; torch's own take no packed queries."""
    monkeypatch.setattr("benchmarks.bench.caches.CHECKED", 7)
    steps = [
        decode(3, 40, HEADS, queries=n, page_size=4, dtype="float32", chunk=chunk, split_size=64)
        for n, chunk in ((0, 20), (1, 0), (1, 20))
    ]
    (outcomes,) = run_decode([steps], [decoder("tilewise:cpu"), decoder("sdpa")], **QUICK)
    mine = [o for o in outcomes if o.provider == "tilewise:cpu"]
    assert [o.shape.chunk for o in mine if o.row] == [20, 0, 20]
    assert all("no lengths" in o.refused for o in outcomes if o.provider == "sdpa")
    figure = next(f for f in decode_table.figures_of(outcomes) if f.what.startswith("larger"))
    assert "1+20 queries" in figure.what and figure.aim == 1 / 1.15
    table = "\n".join(decode_table.lines_of(outcomes, 1))
    assert "0+20" in table and "1+0" in table


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_pages_hold_the_same_keys(page_size):
    cache = make_cache(decode(3, 40, HEADS, dtype="float32"), "cpu")
    pool = paged(cache, page_size)
    assert not torch.equal(pool.page_table.flatten(), pool.page_table.flatten().sort()[0])
    for b in range(3):
        for x, pages in zip(cache[:2], pool[:2]):
            assert torch.equal(pages[pool.page_table[b].long()].flatten(0, 1)[:40], x[b])


def test_torchs_layout_holds_the_same_keys_and_its_copy_has_its_strides():
    cache = make_cache(decode(3, 40, HEADS, dtype="float32"), "cpu")
    other = by_head(cache).copy()
    assert torch.equal(other.k, cache.k) and other.k.transpose(1, 2).is_contiguous()


def test_all_steps_of_a_case_are_right_and_take_turns(tmp_path):
    file = tmp_path / "rows.jsonl"
    said = []
    chosen = [decoder("tilewise"), decoder("sdpa"), decoder("fa3")]
    (outcomes,) = run_decode([steps()], chosen, save=file, **QUICK | {"show": said.append})
    rows = load(file)
    assert [(r.provider, r.shape["seqlen_q"], r.shape["page_size"]) for r in rows] == [
        *(("tilewise", 1, 0), ("tilewise", 1, 4), ("tilewise", 3, 0), ("tilewise", 3, 4)),
        *(("sdpa", 1, 0), ("sdpa", 3, 0)),
    ]
    assert len({row.run for row in rows}) == 1 and {row.suite for row in rows} == {"decode"}
    assert all(row.max_error <= row.bound and len(row.rounds_ms) == 2 for row in rows)
    first = rows[0]
    assert first.extra["gb_per_s"] == pytest.approx(first.extra["kv_bytes"] / first.median_ms / 1e6)
    assert first.extra["of_measured"] == pytest.approx(first.extra["gb_per_s"] / 20)
    assert first.extra["cold"] == "none" and "host_us" not in first.extra
    text = "\n".join(said)
    assert "a CPU: plain calls" in text and "read 20 GB/s" in text
    assert "not here: it is for CUDA GPUs" in text
    lines = "\n".join(decode_table.summary([outcomes]))
    assert "aim" not in lines
    for what in ("contiguous / page 4, 1 query", "1 query / 3, page 4", "6 rows timed, 0 wrong"):
        assert what in lines


@pytest.mark.parametrize("lengths", ["", "40,7,19"])
def test_a_ragged_batch_needs_a_decoder_that_takes_lengths(lengths):
    of = decode(2, 40, HEADS, lengths=lengths, dtype="float32")
    (outcomes,) = run_decode([[of]], [decoder("tilewise"), decoder("sdpa")], **QUICK)
    ours, theirs = outcomes
    assert ours.row is not None
    assert (theirs.refused or "").startswith("it takes no lengths") == bool(lengths)


def test_a_step_that_forgets_its_mask_is_wrong():
    def forgets(of, device):
        return lambda q, cache: attention_reference(q, cache.k, cache.v)

    wrong = Decoder("tilewise:forgetful", forgets, has_pages=False)
    (outcomes,) = run_decode([steps(pages=(0,))], [wrong], **QUICK)
    one, three = outcomes
    assert one.row is not None  # the last query sees all keys
    assert three.row is None and three.wrong.startswith("out: max ")


def test_a_decoder_that_raises_while_it_is_timed_is_left_out():
    calls = []

    def raises(of, device):
        def attend(q, cache):
            calls.append(of)
            if len(calls) > 2:
                raise RuntimeError("no memory")
            return attention_reference(q, cache.k, cache.v)

        return attend

    one = Decoder("one", raises, has_pages=False)
    (outcomes,) = run_decode([steps((0,), (1,))], [decoder("tilewise"), one], **QUICK)
    assert outcomes[0].row is not None and outcomes[1].refused == "RuntimeError: no memory"


def test_figures_say_what_is_aimed_at():
    of = decode(1, 8192, (32, 8, 128))
    plan = dict(date="", run="one", suite="decode", device="", torch="", triton="", cuda="")
    plan |= dict(driver="", tilewise="", commit="")
    verdict = bench.Verdict("out", 0.1, 0.2, True)

    def timed(name, ms, host, **changes):
        step = of._replace(**changes)
        row = bench.make_row(step, name, [ms] * 3, verdict, plan, 4420.0)
        row = dataclasses.replace(row, extra={**row.extra, "host_us": host})
        return bench.Outcome(step, name, row)

    outcomes = [
        timed("tilewise", 0.010, 15.0),
        timed("tilewise", 0.012, 15.0, page_size=16),
        timed("tilewise", 0.011, 15.0, seqlen_q=8),
        timed("sdpa", 0.020, 19.0),
        timed("fa3", 0.021, 21.0, page_size=16),
    ]
    found = {one.what: (one.ratio.median, one.aim) for one in decode_table.figures_of(outcomes)}
    assert found["contiguous / page 16, 1 query"] == (pytest.approx(10 / 12), 0.85)
    assert found["1 query / 8, contiguous"] == (pytest.approx(10 / 11), 1 / 1.1)
    assert found["sdpa / tilewise, 1 query, contiguous"] == (pytest.approx(2), None)
    assert found["fa3 / tilewise, 1 query, page 16"] == (pytest.approx(21 / 12), None)
    assert found["host: sdpa / tilewise, 1 query, contiguous"] == (pytest.approx(19 / 15), 1.25)
    assert "aim 0.85" in "\n".join(decode_table.summary([outcomes]))
    line = decode_table.lines_of(outcomes, 8)[2]
    assert "rotating over 8 caches" in decode_table.lines_of(outcomes, 8)[0]
    assert line.split()[:3] == ["tilewise", "1", "-"] and "0.76" in line


def test_caches_take_turns_on_a_gpu_only():
    of = decode(1, 8192, (32, 8, 128))
    assert Plan("cpu", 1, 1.0).copies(of) == 1
    assert Plan("cuda", 1, 1.0).copies(of) == 8
    assert Plan("cuda", 1, 1.0, "flush").copies(of) == 1
    slow = Plan("cpu", 1, 1.0).clock(4)
    assert slow(lambda: None, 3)[0] < 1.0


def test_small_caches_are_said_to_be_warm():
    """More calls than a graph should hold would be needed to keep them out of the L2 cache."""
    one, many = decode(1, 1, (32, 8, 128)), decode(1, 512, (32, 8, 128))
    assert copies_of(one) == copies_of(many) == 128 and is_cold(many) and not is_cold(one)
    assert [Plan("cuda", 1, 1.0).coldness(of) for of in (one, many)] == ["warm", "rotate"]
    assert Plan("cuda", 1, 1.0, "flush").coldness(one) == "flush"
    assert Plan("cpu", 1, 1.0).coldness(one) == "none"


def test_a_measured_bandwidth_is_a_rate(monkeypatch):
    monkeypatch.setattr("benchmarks.bench.bandwidth.BYTES", {"cpu": 1 << 20})
    found = bandwidth("cpu", rounds=1, round_ms=1.0)
    assert set(found) == {"copy", "read"} and all(0.01 < rate < 1e5 for rate in found.values())


class Operator:
    """An operator whose schema has these arguments, and which keeps what it is asked."""

    def __init__(self, names):
        self.asked = {}
        arguments = [types.SimpleNamespace(name=name, type=torch.BoolType.get()) for name in names]
        self._schema = types.SimpleNamespace(arguments=arguments)

    def __call__(self, q, k, v, **options):
        self.asked = options
        return q, None


def test_fa3_is_asked_with_lengths_and_pages():
    names = ["q", "k", "v", "seqused_k", "page_table", "softmax_scale", "is_causal", "num_splits"]
    operator = Operator(names)
    of = decode(2, 40, HEADS, page_size=4, dtype="float16")
    library = types.SimpleNamespace(fwd=types.SimpleNamespace(default=operator))
    attend = decoders.fa3_operator(library, of)
    cache = paged(make_cache(of, "cpu"), 4)
    q = make_queries(of, "cpu")
    assert attend(q, cache) is q
    assert operator.asked["page_table"] is cache.page_table
    assert operator.asked["seqused_k"] is cache.seqused_k
    assert operator.asked["is_causal"] is True and operator.asked["num_splits"] == 0
    old = types.SimpleNamespace(fwd=types.SimpleNamespace(default=Operator(names[:3] + names[5:])))
    with pytest.raises(Absent, match="page_table"):
        decoders.fa3_operator(old, of)


def test_fa3_without_its_library_is_its_package():
    asked = {}

    def kvcache(
        q, k_cache, v_cache, *, cache_seqlens, page_table, softmax_scale, causal, num_splits
    ):
        asked.update(cache_seqlens=cache_seqlens, num_splits=num_splits, causal=causal)
        return q

    of = decode(2, 40, HEADS, dtype="float16")
    cache, q = make_cache(of, "cpu"), make_queries(of, "cpu")
    assert decoders.fa3_function(kvcache, of)(q, cache) is q
    assert asked == dict(cache_seqlens=cache.seqused_k, num_splits=0, causal=True)


def test_fa3_says_why_it_is_not_here(monkeypatch):
    monkeypatch.setattr(peers, "unfit", lambda *asked: None)
    monkeypatch.delenv(peers.FA3_LIBRARY, raising=False)
    with pytest.raises(Absent, match=f"{peers.FA3_LIBRARY} names no library"):
        decoders.PEERS["fa3"].prepare(decode(1, 40, HEADS), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("cold", bench.COLD)
def test_a_graph_holds_all_caches(cold):
    case = [
        decode(2, 1000, (8, 2, 128), queries=n, page_size=size) for n in (1, 8) for size in (0, 16)
    ]
    chosen = [decoder(name) for name in ("tilewise", "sdpa", "flex")]
    (outcomes,) = run_decode([case], chosen, device="cuda", cold=cold, **QUICK)
    assert [o.row is not None for o in outcomes if o.provider != "flex"] == [True] * 6, outcomes
    assert all(o.row.extra["host_us"] > 0 for o in outcomes if o.row is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_8_bits_are_held_to_what_they_stand_for(kind):
    """Contiguous, and in pages, of which the last is not full; timed beside the queries' dtype."""
    steps = [
        decode(2, 41, HEADS, page_size=size, dtype="bfloat16", cache=each)
        for each in ("", kind)
        for size in (0, 4)
    ]
    chosen = [decoder("tilewise:cpu"), decoder("sdpa")]
    (outcomes,) = run_decode([steps], chosen, **QUICK)
    ours = [o for o in outcomes if o.provider == "tilewise:cpu"]
    assert all(o.row is not None for o in ours) and len(ours) == 4, outcomes
    theirs = [o for o in outcomes if o.provider == "sdpa"]
    assert [o.refused is None for o in theirs] == [True, False]
    assert "no cache of 8 bits" in theirs[1].refused
    lines = "\n".join(decode_table.summary([outcomes]))
    for pages in ("contiguous", "page 4"):
        assert f"bfloat16 cache / {kind}, 1 query, {pages}" in lines


def test_a_scale_that_is_forgotten_is_wrong():
    def forgets(of, device):
        attend = decoders._ours("cpu", of, device)
        return lambda q, cache: attend(q, cache._replace(v_descale=None))

    wrong = Decoder("tilewise:forgetful", forgets, has_eight_bits=True)
    of = decode(2, 40, HEADS, dtype="bfloat16", cache="int8")
    ((outcome,),) = run_decode([[of]], [wrong], **QUICK)
    assert outcome.row is None and outcome.wrong


def test_bytes_of_8_bits():
    of = decode(32, 8192, (32, 8, 128), cache="e4m3")
    rows = 32 * 8192 * 8
    assert of.kv_bytes == rows * 256 and copies_of(of) == 2
    assert of._replace(cache="int8:row").kv_bytes == rows * 264
    assert copies_of(decode(1, 8192, (32, 8, 128), cache="e4m3")) == 16
    with pytest.raises(ValueError, match="int4"):
        decode(1, 8, HEADS, cache="int4")


def test_every_call_of_a_case_rotates_over_as_many_as_the_smallest_needs():
    on_gpu = Plan("cuda", 1, 1.0)
    steps = [decode(1, 8192, (32, 8, 128), cache=kind) for kind in ("", "e4m3")]
    assert bench.most_copies(steps, on_gpu) == 16


def test_a_quantised_cache_is_its_own_inverse():
    cache = make_cache(decode(3, 40, HEADS, dtype="float32"), "cpu")
    for kind in KINDS:
        found = quantised(cache, kind)
        for x, code, scale in zip(cache[:2], found[:2], found[4:]):
            half = 2**-4 if kind.startswith("e4m3") else 0.51 / 127
            error = (code.float() * scale.unsqueeze(-1) - x).abs()
            bound = x.abs() if kind.startswith("e4m3") else scale.unsqueeze(-1) * 127
            assert (error <= half * bound + scale.unsqueeze(-1) * 2**-9).all()
