"""Packed sequences and unused keys in the Hopper forward: every length, and what lies beside it."""

import math
from typing import NamedTuple

import pytest
import torch
from helpers.tiers import every, sample

import tilewise
from tilewise.kernels.hopper import descriptors, tile_counter
from tilewise.kernels.hopper.fwd import launch
from tilewise.ops import calls
from tilewise.problem import Extras, Scalars, describe
from tilewise.testing import use_emulator
from tilewise.testing.cases import Case, Features, PackedCase, Sizes
from tilewise.testing.inputs import make_inputs, poisoned
from tilewise.testing.packed import pack, share
from tilewise.testing.tolerance import judge

BF16 = torch.bfloat16
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")


class Packed(NamedTuple):
    """Arguments of a packed call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict

    def run(self, attend, *tensors, **how):
        q, k, v = tensors or self[:3]
        with torch.no_grad():
            return attend(q, k, v, return_lse=True, **self.options, **how)


def inputs(case: PackedCase, device="cpu", dtype=BF16) -> Packed:
    parts = [make_inputs(*part[1:], dtype, device, part.seed) for part in case.parts]
    joined, lengths = pack(case, share(parts))
    asked = case.features._asdict()
    options = {name: asked[name] for name in ("causal", "window", "softcap", "scale")}
    options |= {"alibi_slopes": joined.extras.alibi_slopes, "sinks": joined.extras.sinks}
    return Packed(joined.q, joined.k, joined.v, options | lengths)


def emulated(call: Packed, seed=0):
    with use_emulator(seed), poisoned():
        return call.run(tilewise.attention, backend="hopper")


def check(call: Packed, found) -> None:
    """Against the oracle: each sequence alone, in fp64."""
    exact = [x.double() for x in call[:3]]
    given = dict(call.options)
    if given.get("sinks") is not None:
        given["sinks"] = given["sinks"].double()
    oracle = Packed(*exact, given).run(tilewise.attention_reference)
    plain = call.run(tilewise.attention_reference, upcast=False)
    for name, *tensors in zip(("out", "lse"), found, oracle, plain):
        verdict = judge(*tensors)
        assert verdict.ok, f"{name}: {verdict}"


ONE = Sizes(nheads=1, nheads_k=1, headdim=64)
TWO = ONE._replace(nheads=2)
CAUSAL = Features(causal=True)
CASES = (
    # Lengths: none, one, a tile and one more, more keys than queries and fewer.
    PackedCase("ragged", (5, 0, 70, 33), (7, 4, 60, 50), Features(), TWO),
    PackedCase("ragged-causal", (5, 0, 70, 1), (7, 4, 60, 50), CAUSAL, TWO),
    PackedCase("ones", (1,) * 5, (1, 3, 1, 0, 2), CAUSAL, ONE),
    PackedCase("tiles", (64, 65, 63, 128), (128, 129, 127, 1), Features(), ONE),
    PackedCase("tiles-causal", (64, 65, 63, 128), (128, 129, 127, 1), CAUSAL, ONE),
    PackedCase("no-keys", (9, 20, 3), (0, 30, 0), Features(), TWO),
    PackedCase("no-keys-causal", (9, 20, 3), (0, 30, 0), CAUSAL, TWO),
    PackedCase("top-left", (40, 9, 70), (20, 70, 140), Features(causal="top_left"), TWO),
    # Three warpgroups: a tile that ends within the first, and keys that only some of them see.
    PackedCase("three-warpgroups", (10, 200, 130), (260, 130, 70), Features(), ONE),
    PackedCase("one-long-causal", (2100, 130), (520, 130), CAUSAL, ONE),
    # Two groups of 32 sequences, the second with the only long one.
    PackedCase("many", (1,) * 20 + (0,) * 20 + (100,), (3,) * 40 + (90,), Features(), ONE),
    PackedCase("many-causal", (2,) * 34 + (70,), (3,) * 34 + (90,), CAUSAL, ONE),
    # Heads that share keys; those of short sequences share tiles.
    PackedCase("shared-tiles", (5, 0, 9, 40), (70, 3, 9, 130), CAUSAL, ONE._replace(nheads=4)),
    PackedCase("shared-by-3", (5, 9, 17), (70, 9, 1), Features(), Sizes(1, 1, 1, 6, 2, 64)),
    PackedCase("gqa", (150, 300), (150, 20), CAUSAL, Sizes(1, 1, 1, 4, 2, 64)),
    # Scores and windows.
    PackedCase("window", (150, 70), (200, 70), Features(True, (40, 0)), ONE),
    PackedCase("window-both", (50, 170), (200, 70), Features(False, (20, 9)), ONE),
    PackedCase("softcap", (50, 70), (20, 170), Features(softcap=2.0), ONE),
    PackedCase("alibi", (50, 70), (120, 60), Features(alibi="batch"), TWO),
    PackedCase("sinks", (50, 0, 70), (20, 4, 0), Features(sinks=True), TWO),
    # Padding rows full of NaN.
    PackedCase("used", (50, 0, 70), (20, 30, 160), Features(), TWO, spare=9),
    PackedCase("used-causal", (50, 0, 70), (20, 30, 160), CAUSAL, TWO, spare=70),
    PackedCase("used-shared", (5, 1, 9), (70, 0, 9), CAUSAL, ONE._replace(nheads=4), spare=3),
    # Rows behind all sequences, with NaN in them: with the last sequence in a tile, and without.
    PackedCase("tail", (5, 70), (7, 90), Features(), TWO, tail=9),
    PackedCase("tail-causal", (50, 0), (60, 9), CAUSAL, ONE, tail=200),
    PackedCase("tail-sinks", (50, 9), (60, 0), Features(sinks=True), TWO, spare=3, tail=150),
    PackedCase("tail-d100", (50, 9), (60, 9), CAUSAL, Sizes(1, 1, 1, 2, 1, 100), tail=90),
    PackedCase(
        "everything",
        (20, 64, 9, 130),
        (25, 64, 12, 100),
        Features(True, (50, 0), 3.0, alibi="batch", sinks=True),
        Sizes(nheads=4, nheads_k=2, headdim=64),
        spare=5,
    ),
    # Head dims.
    PackedCase("d128", (50, 130), (140, 200), Features(), Sizes(1, 1, 1, 1, 1, 128)),
    PackedCase("d256", (50, 130), (70, 130), CAUSAL, Sizes(1, 1, 1, 1, 1, 256)),
    PackedCase("d192-v128", (30, 70), (70, 60), Features(), Sizes(1, 1, 1, 2, 2, 192, 128)),
    PackedCase("d40-v72", (30, 70), (70, 60), CAUSAL, Sizes(1, 1, 1, 2, 2, 40, 72)),
)
SEEDS = sample(range(20), 0)


@pytest.mark.emulator
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", every(2, CASES), ids=lambda case: case.name)
def test_case(case, seed):
    call = inputs(case)
    check(call, emulated(call, seed))


@pytest.mark.emulator
@pytest.mark.parametrize("memory", ["dense", "transposed", "sequence_first"])
@pytest.mark.parametrize("causal", [False, True])
def test_unused_keys_of_a_batch(memory, causal):
    """Rows past seqused_k are full of NaN, and those of the next batch follow."""
    sizes = Sizes(3, 100, 203, 2, 1, 64)
    features = Features(causal=causal, seqused_k=(130, 0, 203), memory=memory)
    case = Case("used-keys", sizes, features)
    given = make_inputs(sizes, features, BF16, seed=case.seed)
    options = {"causal": causal, "seqused_k": given.extras.seqused_k}
    call = Packed(given.q, given.k, given.v, options)
    check(call, emulated(call))


def one_counter(monkeypatch):
    """A counter that outlives its launch, as on a GPU."""
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(tile_counter, "counters", lambda *of, count: counter)
    return counter


@pytest.mark.emulator
@pytest.mark.parametrize("seed", sample(range(3), 1))
def test_launches_share_a_counter(monkeypatch, seed):
    """Each finds it at 0 and leaves it so, whatever number of tiles there are for 4 programs."""
    counter = one_counter(monkeypatch)
    for lengths in ((0, 0, 9), (5,), (70, 0, 200), (100,) * 6, (1,) * 4, (0, 1, 300)):
        case = PackedCase("shared-counter", lengths, lengths, Features(causal=seed == 1), ONE)
        call = inputs(case)
        check(call, emulated(call, seed))
        assert counter.item() == 0


@pytest.mark.emulator
def test_a_launch_without_tiles(monkeypatch):
    """Rows that belong to no sequence are not written."""
    counter = one_counter(monkeypatch)
    q, starts = torch.randn(70, 1, 64, dtype=BF16), torch.zeros(3, dtype=torch.int32)
    problem_of = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
    monkeypatch.setattr(tilewise.frontend.values, "knows_values", lambda x: False)
    with use_emulator(), torch.no_grad():
        tilewise.attention(q, q, q, backend="hopper", **problem_of)
    assert counter.item() == 0


@pytest.mark.emulator
def test_nothing_at_all():
    q, k = torch.randn(7, 2, 64, dtype=BF16), torch.randn(0, 2, 64, dtype=BF16)
    sinks = torch.tensor([1.0, -2.0], dtype=BF16)
    queries = torch.tensor([0, 5, 7], dtype=torch.int32)
    none, used = torch.zeros(3, dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
    options = dict(cu_seqlens_q=queries, cu_seqlens_k=none, seqused_q=used)
    call = Packed(q, k, k, options | {"sinks": sinks})
    out, lse = emulated(call)
    assert out.eq(0).all() and lse[:, 3:5].eq(-math.inf).all()
    assert lse[:, [0, 2, 5, 6]].eq(sinks.float()[:, None]).all()
    with use_emulator(), torch.no_grad():
        for starts in (none, none[:1]):
            options = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, backend="hopper")
            assert tilewise.attention(k, k, k, **options).shape == k.shape


BESIDE = {
    "full": PackedCase("beside", (70, 30, 65), (100, 130, 60), Features(), TWO),
    "causal": PackedCase("beside-causal", (70, 30, 65), (100, 130, 60), CAUSAL, TWO),
    "shared": PackedCase("beside-shared", (9, 5, 7), (100, 30, 9), Features(), Sizes(1, 1, 1, 4)),
}


def assert_nothing_leaks(call: Packed, attend) -> None:
    """NaN and infinity in one sequence change no bit of the others."""
    clean = attend(call)
    rows, keys = (call.options[f"cu_seqlens_{side}"].tolist() for side in "qk")
    for value in (math.nan, math.inf):
        for i in range(len(rows) - 1):
            q, k, v = (x.clone() for x in call[:3])
            q[rows[i] : rows[i + 1]] = k[keys[i] : keys[i + 1]] = v[keys[i] : keys[i + 1]] = value
            out, lse = attend(Packed(q, k, v, call.options))
            others = torch.ones(rows[-1], dtype=torch.bool, device=q.device)
            others[rows[i] : rows[i + 1]] = False
            assert torch.equal(out[others], clean[0][others])
            assert torch.equal(lse[:, others], clean[1][:, others])
            assert out[~others].isnan().any()


@pytest.mark.emulator
@pytest.mark.parametrize("name", sample(BESIDE, "causal"))
def test_nothing_leaks_between_sequences(name):
    assert_nothing_leaks(inputs(BESIDE[name]), emulated)


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_of_a_ragged_descriptor(rows):
    """Every row of every sequence lies where it should, and the next one is none."""
    x = torch.empty(2, rows, 3, 64, dtype=BF16)
    ragged = descriptors.ragged_by_head(x, [1, 1, 1, 64, 64], None)
    billion, around = descriptors.BILLION, 2**64 // x.itemsize
    for first in range(rows + 1):
        for length in range(rows - first + 1):
            stop, at = first + length, billion - length
            assert at + length == ragged.shape[3]
            for i in range(length):
                at_row = (billion, stop, 0, at + i, 0)
                place = sum(a * b for a, b in zip(at_row, ragged.strides)) % around
                assert place == i * x.stride(1) + first * x.stride(1)


def test_a_plan_is_for_the_mean_length_or_a_long_bound():
    """However many rows they have together; and a descriptor has no dimension for PACK."""
    q, k = torch.empty(1, 8192, 4, 64, dtype=BF16), torch.empty(1, 8192, 1, 64, dtype=BF16)
    tiles = []
    for batch, is_long in ((1, False), (512, False), (512, True)):
        starts = torch.zeros(batch + 1, dtype=torch.int32)
        extras = Extras(cu_seqlens_q=starts, cu_seqlens_k=starts)
        problem = describe(q, k, k, extras, Scalars(1.0, right=0), "bottom_right", False)
        problem = problem._replace(is_long=is_long)
        tiles.append(launch.plan_for(problem, q, extras).tile)
    assert [tile.PACK for tile in tiles] == [1, 1, 1]
    assert [tile.WARPGROUPS for tile in tiles] == [3, 2, 3]


def test_launches_are_kept_apart_by_where_lengths_lie():
    """A slice of cu_seqlens is no multiple of 16 bytes, and one sequence is a constant."""
    starts = torch.zeros(13, dtype=torch.int32)
    q = torch.empty(1, 64, 1, 64, dtype=BF16)
    parts = starts[:6], starts[1:7], starts[5:11], starts[:2]
    keys = [tuple(calls.signature((q, q, q, given, given))) for given in parts]
    assert keys[1] == keys[2] and len(set(keys)) == 3


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_gpu(case):
    call = inputs(case, "cuda")
    with poisoned():
        found = call.run(tilewise.attention, backend="hopper")
    check(call, found)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", BESIDE)
def test_nothing_leaks_on_a_gpu(name):
    call = inputs(BESIDE[name], "cuda")
    assert_nothing_leaks(call, lambda call: call.run(tilewise.attention, backend="hopper"))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("causal", [False, True])
def test_one_graph_serves_any_lengths(causal):
    """Totals and the number of sequences are the graph's, lengths are not."""
    torch.manual_seed(0)
    total, batch = 3000, 40
    q, k, v = (torch.randn(total, n, 128, device="cuda", dtype=BF16) for n in (4, 2, 2))
    starts = torch.zeros(batch + 1, device="cuda", dtype=torch.int32)

    def fill(seed):
        cuts = torch.randint(0, total + 1, (batch - 1,), generator=torch.manual_seed(seed))
        starts[1:-1] = cuts.sort().values.int()
        starts[-1] = total

    def attend(backend="hopper"):
        options = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, causal=causal, backend=backend)
        return tilewise.attention(q, k, v, return_lse=True, **options)

    fill(0)
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for seed in range(20):
        fill(seed)
        graph.replay()
        eager, other = attend(), attend("portable")
        for mine, again, theirs in zip(captured, eager, other):
            assert torch.equal(mine, again)
            torch.testing.assert_close(mine, theirs, atol=0.02, rtol=0.02)
