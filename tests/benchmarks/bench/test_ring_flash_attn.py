"""ring-flash-attn as a peer of `bench distributed`, on processes: its files over our
kernels, and over a fake of FlashAttention-3 in plain torch.
"""

import contextlib
import importlib.util
import itertools

import pytest
import torch
import torch.distributed as dist
from helpers.fa3 import BWD_PACKED, FWD_PACKED, as_keywords

import tilewise
from benchmarks.bench import peers, ring_flash_attn
from benchmarks.bench.peers import Absent
from benchmarks.bench.ranks import run_ranks
from benchmarks.bench.sharded import Sharded, make_inputs
from benchmarks.bench.sharded_run import Timing, run_cases
from benchmarks.bench.sharded_sides import side

RING, BY_HEAD, ON_FA3 = ring_flash_attn.NAMES
WHOLE = Sharded(2, 64, 4, 2, 16, dtype="bfloat16", direction="fwd+bwd")
DOCUMENTS = WHOLE._replace(documents=5)
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("ring_flash_attn") is None or not dist.is_gloo_available(),
    reason="ring-flash-attn is not installed, or gloo is not here",
)


def cases_of(of, *dtypes):
    return [
        of._replace(dtype=dtype, direction=direction)
        for dtype in dtypes
        for direction in ("fwd", "fwd+bwd")
    ]


def right_rows(main, cases, sides):
    """Rows of all cases and sides: a result that is wrong has none."""
    timing = Timing(sides, "cpu", rounds=1, round_ms=1)
    done = run_ranks(main, 2, "cpu", cases, timing, tell=lambda line: None)
    assert len(done) == len(cases)
    for of, outcomes in zip(cases, done, strict=True):
        assert [x.provider for x in outcomes] == ["one process", *sides]
        for outcome in outcomes:
            assert outcome.row is not None, (of, outcome.provider, outcome.refused, outcome.wrong)
            assert outcome.row.bound is None or outcome.row.max_error <= outcome.row.bound


@needs_package
def test_documents_over_our_kernels():
    """Documents that end within shards, and more of them than ranks; without a causal mask too."""
    cases = cases_of(DOCUMENTS, "bfloat16", "float32")
    cases += cases_of(DOCUMENTS._replace(causal=False), "bfloat16", "float32")
    cases += cases_of(DOCUMENTS._replace(documents=1, tokens=65), "float32")
    right_rows(run_cases, cases, (RING, BY_HEAD))


@needs_package
def test_by_head_is_a_kernel_for_each_key_head():
    done = run_ranks(heads_of_calls, 2, "cpu", DOCUMENTS._replace(direction="fwd"))
    assert done == {RING: [(4, 2)], BY_HEAD: [(2, 1), (2, 1)]}


def heads_of_calls(tell, of):
    """Query and key heads of each call of our kernel."""
    found, attention = {}, tilewise.attention

    def spy(q, k, v, **options):
        found[name].append((q.shape[1], k.shape[1]))
        return attention(q, k, v, **options)

    tilewise.attention = spy
    for name in (RING, BY_HEAD):
        found[name] = []
        one = ring_flash_attn.side(name, of, "cpu")
        one.call(*(one.layout.shard(x) for x in make_inputs(of, "cpu")[:3]))
    return found


@needs_package
def test_the_zigzag_ring_over_our_kernels():
    right_rows(run_cases, cases_of(WHOLE, "bfloat16"), (RING,))


@needs_package
def test_over_flash_attention_3():
    cases = [*cases_of(WHOLE, "bfloat16"), *cases_of(DOCUMENTS, "bfloat16")]
    cases += cases_of(DOCUMENTS._replace(causal=False), "bfloat16")
    right_rows(run_beside_a_fake, cases, (ON_FA3,))


def run_beside_a_fake(tell, cases, timing):
    """`run_cases` with a fake of FA3, which has to be what computes."""
    peers.unfit = lambda shape, device, majors: None
    called = []
    with fake_fa3(called):
        done = run_cases(tell, cases, timing)
    assert set(called) == {"fwd", "bwd"}
    return done


@contextlib.contextmanager
def fake_fa3(called, fwd=FWD_PACKED, bwd=BWD_PACKED):
    """FA3's operators, in plain torch with its layouts: the LSE of packed sequences is (nheads,
    tokens), and a backward takes P from the LSE that it is given.
    """

    def forward(q, k, v, **options):
        called.append("fwd")
        s = masked_scores(q, k, options)
        v = v.repeat_interleave(q.shape[-2] // v.shape[-2], -2).float()
        out = torch.einsum("...hqk,...khd->...qhd", s.softmax(-1), v)
        return out.to(q.dtype), s.logsumexp(-1), q.new_empty(0), q.new_empty(0)

    def backward(dout, q, k, v, out, lse, **options):
        called.append("bwd")
        assert lse.is_contiguous() and dout.stride(-1) == 1
        group = q.shape[-2] // k.shape[-2]
        p = (masked_scores(q, k, options) - lse[..., None]).exp()
        dout, q, out = (x.float() for x in (dout, q, out))
        keys, values = (x.repeat_interleave(group, -2).float() for x in (k, v))
        delta = (dout * out).sum(-1).transpose(-1, -2)[..., None]
        dp = torch.einsum("...qhd,...khd->...hqk", dout, values)
        ds = p * (dp - delta) * options["softmax_scale"]
        dk = torch.einsum("...hqk,...qhd->...khd", ds, q).unflatten(-2, (-1, group)).sum(-2)
        dv = torch.einsum("...hqk,...qhd->...khd", p, dout).unflatten(-2, (-1, group)).sum(-2)
        options["dq"].copy_(torch.einsum("...hqk,...khd->...qhd", ds, keys))
        options["dk"].copy_(dk)
        options["dv"].copy_(dv)
        return lse.clone(), lse.clone()

    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(peers.FA3_LIBRARY, "fa3.so")
        for schema, function, tensors in ((fwd, forward, 3), (bwd, backward, 6)):
            library.define(schema)
            library.impl(schema.split("(")[0], as_keywords(schema, function, tensors), "CPU")
        try:
            yield
        finally:
            ring_flash_attn._fa3.cache_clear()
            library._destroy()


def masked_scores(q, k, options):
    """(..., nheads, seqlen_q, seqlen_k); the diagonal of each sequence is at the bottom right."""
    keys = k.repeat_interleave(q.shape[-2] // k.shape[-2], -2).float()
    s = torch.einsum("...qhd,...khd->...hqk", q.float(), keys) * options["softmax_scale"]
    is_causal = options.get("is_causal", False)  # a default is not handed over
    starts = [options.get(name) for name in ring_flash_attn.STARTS]
    if starts[0] is None:
        starts = [[0, q.shape[-3]], [0, k.shape[-3]]]
    else:
        starts = [x.tolist() for x in starts]
        for at, name in zip(starts, peers.HINTS, strict=True):
            assert options[name] == max(b - a for a, b in itertools.pairwise(at))
    seen = torch.zeros(s.shape[-2:], dtype=torch.bool)
    for (a, b), (c, d) in zip(*map(itertools.pairwise, starts), strict=True):
        one = torch.ones(b - a, d - c, dtype=torch.bool)
        seen[a:b, c:d] = one.tril((d - c) - (b - a)) if is_causal else one
    return s.masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize(
    ("name", "of", "reason"),
    [
        *((name, WHOLE._replace(window=9), "windows") for name in ring_flash_attn.NAMES),
        (RING, DOCUMENTS._replace(window=9), "windows"),
        (BY_HEAD, WHOLE, "documents alone"),
        (RING, WHOLE._replace(causal=False), "causal sequences of even shards"),
        (ON_FA3, WHOLE._replace(tokens=63), "causal sequences of even shards"),
        (RING, WHOLE._replace(dtype="float32"), "in fp32"),
        ("torch-cp", DOCUMENTS, "whole causal sequences of even shards alone"),
    ],
)
def test_what_is_not_served_says_so(name, of, reason):
    with contextlib.ExitStack() as stack, pytest.raises(Absent, match=reason):
        side(name, of, "cpu", stack)


def test_what_fa3_does_not_serve_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for of in (WHOLE, DOCUMENTS):
        with pytest.raises(Absent, match="CUDA GPUs"):
            ring_flash_attn.side(ON_FA3, of, "cpu")
        monkeypatch.setenv(peers.FA3_LIBRARY, "no/fa3.so")
        with pytest.raises(Absent, match="which is not there"):
            ring_flash_attn.side(ON_FA3, of, "cuda")
        monkeypatch.delenv(peers.FA3_LIBRARY)
        with pytest.raises(Absent, match=f"No module .*, and {peers.FA3_LIBRARY} names no library"):
            ring_flash_attn.side(ON_FA3, of, "cuda")
        with pytest.raises(Absent, match="float16 and bfloat16"):
            ring_flash_attn.side(ON_FA3, of._replace(dtype="float64"), "cuda")
    dense = "fwd(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool is_causal=False)"
    unknown = "bwd(Tensor q, Tensor dout) -> Tensor"
    with fake_fa3([], f"{dense} -> (Tensor, Tensor, Tensor, Tensor)", unknown):
        ring_flash_attn.check_fa3(WHOLE._replace(direction="fwd"), "cuda")
        with pytest.raises(Absent, match="schema that is not known"):
            ring_flash_attn.check_fa3(WHOLE, "cuda")
        with pytest.raises(Absent, match="no argument 'cu_seqlens_q'"):
            ring_flash_attn.check_fa3(DOCUMENTS, "cuda")
