"""What the portable kernels promise beside right numbers: any tile shape, any stride, no stray
write.
"""

import itertools
import math

import pytest
import torch
from helpers.plans import Memory, run
from helpers.tiers import sample, sample_rows

from tilewise import attention
from tilewise.kernels import portable
from tilewise.kernels.common.arguments import fits_descriptor
from tilewise.kernels.portable import launch, plan
from tilewise.kernels.portable.plan import Plan
from tilewise.problem import Extras, Grads, Saved, Scalars, describe
from tilewise.sparse import create_block_mask
from tilewise.testing import use_interpreter
from tilewise.testing.cases import CASES, Case, Features, PackedCase, Sizes
from tilewise.testing.inputs import make_inputs
from tilewise.testing.run import run_case
from tilewise.tuning.select import override
from tilewise.tuning.tables import Config

DTYPES = [torch.float32, torch.bfloat16]


def everywhere(*config):
    """One configuration for all kernels that have tiles of queries and keys."""
    return override(**dict.fromkeys(("fwd", "bwd_dkdv", "bwd_dq"), Config(*config)))


def results(inputs, **how):
    """out, lse and the gradients of q, k and v, with a gradient coming in through both results."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    with use_interpreter():
        out, lse = attention(*leaves, **how, backend="portable", return_lse=True)
        dlse = torch.linspace(-1, 1, lse.numel()).view_as(lse)
        return out, lse, *torch.autograd.grad((out, lse), leaves, (inputs.dout, dlse))


def assert_equal(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture
def tiles(monkeypatch):
    """The tile of every launch, by kernel, as it happens."""
    seen = {}
    real = Plan.configured

    def planned(plan):
        seen[plan.name] = plan.tile(plan.config())
        return real(plan)

    monkeypatch.setattr(Plan, "configured", planned)
    return seen


SHAPES = [(16, 16), (16, 128), (32, 64), (128, 32), (64, 128)]
EVERYTHING = next(case.features for case in CASES if case.name == "everything")
BANDS = [
    Case(
        "everything",
        Sizes(1, 70, 90, 2, 1, 24, 16),
        EVERYTHING._replace(seqused_k=(77,), alibi="heads"),
    ),
    Case("window-tall", Sizes(1, 90, 70, 2, 1, 24, 16), Features(window=(10, 7))),
]


TILED = list(itertools.product(BANDS, SHAPES))


@pytest.mark.parametrize(
    "case, shape",
    sample_rows(TILED, *TILED[: len(SHAPES)], TILED[-2]),
    ids=lambda x: x.name if isinstance(x, Case) else str(x),
)
def test_every_tile_shape_is_right(shape, case, tiles):
    with everywhere(*shape, 4, 1):
        records = run_case(case, backend="portable")
    assert [tiles[kernel][:2] for kernel in ("fwd", "bwd_dkdv", "bwd_dq")] == [shape] * 3
    failures = [str(record) for record in records if not record.verdict.ok]
    assert not failures, "\n".join(failures)


IN_CHUNKS = {
    "everything": Case(
        "everything",
        Sizes(2, 40, 50, 2, 1, 300, 70),
        EVERYTHING._replace(
            seqused_k=(47, 0), bias="hqk", dropout=0.1, score="table", learned=True
        ),
    ),
    "blocks": Case(
        "blocks", Sizes(1, 40, 70, 2, 1, 512, 512), Features(mask="causal", blocks=(16, 32))
    ),
    "packed": PackedCase("packed", (9, 20), (20, 30), Features(True), Sizes(headdim=300), 3),
}


@pytest.mark.parametrize("name", sample(IN_CHUNKS, "blocks", "packed"))
def test_heads_in_chunks(name, tiles, monkeypatch):
    """As GPUs with little shared memory read wide heads of fp32 in the backward."""
    monkeypatch.setattr(plan, "architecture", lambda device: "sm89")
    records = run_case(IN_CHUNKS[name], backend="portable")
    assert [tiles[kernel].CHUNK for kernel in ("bwd_dkdv", "bwd_dq", "fwd")] == [128, 128, 0]
    assert name != "everything" or tiles["bwd_captured"].CHUNK == 128
    failures = [str(record) for record in records if not record.verdict.ok]
    assert not failures, "\n".join(failures)


def test_a_tile_of_16_keys_draws_what_others_draw(monkeypatch):
    """Where wide heads leave room for no more."""
    inputs = make_inputs(Sizes(1, 40, 70, 2, 2, 300), Features(), torch.float32)
    how = dict(dropout_p=0.3, dropout_rng=torch.tensor([1, 2]))
    with everywhere(16, 32, 4, 1):
        expected = results(inputs, **how)
    with everywhere(16, 16, 4, 1):
        for mine, theirs in zip(results(inputs, **how), expected):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("headdims", sample([(64, 64), (40, 72)], (40, 72)), ids=str)
def test_descriptors_change_no_bit(dtype, headdims, tiles):
    sizes = Sizes(2, 40, 70, 2, 1, *headdims)
    features = Features(causal=True, window=(60, 0), seqused_k=(57, 0))
    inputs = make_inputs(sizes, features, dtype)
    how = dict(causal=True, window=(60, 0), seqused_k=inputs.extras.seqused_k)
    with everywhere(32, 32, 4, 1, False):
        by_pointers = results(inputs, **how)
        assert not any(tile.DESCRIPTORS for tile in tiles.values())
    with everywhere(32, 32, 4, 1, True):
        by_descriptors = results(inputs, **how)
        read = [tiles[kernel].DESCRIPTORS for kernel in ("fwd", "bwd_dkdv", "bwd_dq")]
        assert read == [True] * 3
    assert_equal(by_descriptors, by_pointers)


def test_a_descriptor_of_no_keys_reads_none(tiles):
    """A descriptor has a row at least, which a block mask may list for a sequence without keys."""
    inputs = make_inputs(Sizes(2, 40, 40, headdim=16), Features(), torch.bfloat16)
    inputs.k[0], inputs.v[0] = math.nan, math.nan
    mask = create_block_mask(lambda b, h, q, k: k >= 0, 1, 1, 40, 40, block=(32, 32))
    used = torch.tensor([0, 40], dtype=torch.int32)
    with everywhere(32, 32, 4, 1, True):
        out, lse, dq, dk, dv = results(inputs, block_mask=mask, seqused_k=used)
    assert all(tiles[kernel].DESCRIPTORS for kernel in ("fwd", "bwd_dkdv", "bwd_dq"))
    assert lse[0].eq(-math.inf).all()
    for x in (out, dq, dk, dv):
        assert x[0].eq(0).all() and x[1].isfinite().all() and x[1].any()


@pytest.mark.parametrize("memory", ["sliced", "expanded"])
def test_descriptors_give_way_to_pointers(memory, tiles):
    """Where memory is not aligned they are not used; a batch of stride 0 is no obstacle."""
    features = Features(memory=memory)
    inputs = make_inputs(Sizes(2, 40, 50, headdim=16), features, torch.bfloat16)
    with everywhere(32, 32, 4, 1, True):
        found = results(inputs)
    assert tiles["fwd"].DESCRIPTORS == (memory == "expanded")
    with everywhere(32, 32, 4, 1, False):
        assert_equal(found, results(inputs))


def test_fits_descriptor():
    aligned = torch.empty(2, 8, 4, 16, dtype=torch.bfloat16)
    assert fits_descriptor(aligned)
    assert fits_descriptor(aligned.transpose(0, 1))
    assert fits_descriptor(aligned[:, :, 1:, 8:])
    assert fits_descriptor(aligned[:1].expand(5, -1, -1, -1))
    assert not fits_descriptor(aligned[..., 1:])  # the address
    assert not fits_descriptor(aligned[..., :12].contiguous())  # rows of 24 bytes
    assert not fits_descriptor(aligned[:, :1].expand(-1, 8, -1, -1))  # one row many times
    for dim in range(3):  # each stride counts, in bytes
        strides = list(aligned.stride())
        strides[dim] += 4
        odd = torch.empty(2048, dtype=torch.bfloat16).as_strided(aligned.shape, strides)
        assert not fits_descriptor(odd)
        assert fits_descriptor(torch.empty(2048).as_strided(aligned.shape, strides))


class Call:
    """One causal call with every tensor, results included, in memory of the test's choice."""

    def __init__(self, sizes, place, dtype=torch.bfloat16):
        batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v = sizes
        queries, keys = (batch, seqlen_q, nheads), (batch, seqlen_k, nheads_k)
        inputs = make_inputs(sizes, Features(causal=True), dtype)
        shapes = {"q": (*queries, headdim), "k": (*keys, headdim), "v": (*keys, headdim_v)}
        shapes |= {"out": (*queries, headdim_v), "dout": (*queries, headdim_v)}
        shapes |= {f"d{name}": shapes[name] for name in "qkv"}
        self.tensors = {name: place(i, shape) for i, (name, shape) in enumerate(shapes.items())}
        for name in ("q", "k", "v", "dout"):
            self.tensors[name].copy_(getattr(inputs, name))

    def run(self):
        """Launches what `forward` and `backward` launch, and returns all results."""
        t = self.tensors
        q, k, v, out, dout = (t[name] for name in ("q", "k", "v", "out", "dout"))
        grads = Grads(t["dq"], t["dk"], t["dv"], None)
        extras, scalars = Extras(), Scalars(0.25, right=0)
        problem = describe(q, k, v, extras, scalars, "bottom_right", False)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
        saved, work = Saved(dout, None, q, k, v, out, lse), Memory()
        with use_interpreter():
            read = dict(q=q, k=k, v=v, out=out, lse=lse)
            run(launch.plan_forward(problem, scalars, extras, **read).configured())
            delta = launch.plan_delta(problem, saved, extras, work)
            run(delta.configured())
            stats = lse, delta.args["delta"], None
            for plan in launch.plan_backward(problem, scalars, saved, stats, grads, extras):
                run(plan.configured())
        return out, lse, *grads[:3]


HUGE = 2**31 + 64
# which stride is large, how large, and of what call
SPARSE = {
    "batch": ("batch", HUGE, Sizes(2, 20, 30, 2, 1, 16, 16)),
    "head": ("head", HUGE, Sizes(1, 20, 30, 2, 2, 16, 16)),
    "row": ("row", HUGE, Sizes(1, 2, 2, 2, 1, 16, 16)),
    # each row is near, the last of a tile is not
    "rows": ("row", 2**25, Sizes(1, 70, 75, 2, 1, 16, 16)),
}


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
def test_beyond_2_to_the_31_elements(kind, descriptors):
    """All eight tensors share one huge allocation, of which they touch a few pages."""
    which, large, sizes = SPARSE[kind]
    try:
        memory = torch.empty(80 * 2**25, dtype=torch.bfloat16)
    except RuntimeError as refusal:
        pytest.skip(f"the system reserves no 5 GB of address space: {refusal}")

    def sparse(i, shape):
        _, seqlen, nheads, headdim = shape
        strides = {
            "batch": (large, nheads * headdim, headdim),
            "row": (nheads * headdim, large, headdim),
            "head": (seqlen * headdim, headdim, large),
        }[which]
        return memory.as_strided(shape, (*strides, 1), i * 4096)

    def dense(i, shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    with everywhere(128, 128, 4, 1, descriptors):
        assert_equal(Call(sizes, sparse).run(), Call(sizes, dense).run())


@pytest.mark.parametrize("headdims", sample([(33, 24), (64, 64)], (33, 24)), ids=str)
def test_results_are_written_whole_and_nothing_else_is(headdims):
    margin, fence = 3, 7.0
    framed = {}

    def place(i, shape):
        memory = torch.full([n + 2 * margin for n in shape], fence)
        inner = memory[tuple(slice(margin, -margin) for _ in shape)]
        framed[i] = memory, inner.fill_(math.nan)
        return inner

    results = Call(Sizes(2, 70, 90, 4, 2, *headdims), place, torch.float32).run()
    assert all(result.isfinite().all() for result in results)
    for memory, inner in framed.values():
        inner.fill_(fence)
        assert memory.eq(fence).all()


@pytest.mark.parametrize("causal", [False, True])
def test_padding_has_no_gradient_and_no_say(causal):
    """K and V hold NaN past seqused_k."""
    used = (77, 0, 64)
    features = Features(causal=causal, seqused_k=used)
    inputs = make_inputs(Sizes(3, 40, 90, 2, 1, 24, 24), features, torch.float32)
    padded = results(inputs, causal=causal, seqused_k=inputs.extras.seqused_k)
    assert all(x.isfinite().all() for x in (padded[0], *padded[2:]))
    for dx in padded[3:]:
        assert all(dx[i, n:].eq(0).all() for i, n in enumerate(used))
    short = inputs._replace(
        q=inputs.q[:1], k=inputs.k[:1, :77], v=inputs.v[:1, :77], dout=inputs.dout[:1]
    )
    out, lse, *_ = results(short, causal=causal)
    assert torch.equal(padded[0][:1], out) and torch.equal(padded[1][:1], lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(40, 70), (70, 40)], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
def test_nan_reaches_only_rows_that_see_it(causal, lengths, softcap):
    seqlen_q, seqlen_k = lengths
    q = torch.randn(1, seqlen_q, 2, 16)
    k, v = torch.randn(2, 1, seqlen_k, 2, 16).unbind(0)

    def run():
        with use_interpreter():
            return attention(q, k, v, causal=causal, softcap=softcap, backend="portable")

    clean = run()
    k[0, 7, 0] = math.nan
    q[0, 33, 1] = math.nan
    out = run()
    last = torch.arange(seqlen_q) + seqlen_k - seqlen_q  # the last key of each row
    sees_key = last >= 7 if causal else torch.ones_like(last, dtype=torch.bool)
    sees_any = last >= 0 if causal else torch.ones_like(last, dtype=torch.bool)
    hit = torch.arange(seqlen_q) == 33
    assert torch.equal(out[0, :, 0].isnan().any(-1), sees_key)
    assert torch.equal(out[0, :, 1].isnan().any(-1), hit & sees_any)
    rest = out.isfinite()
    assert torch.equal(out[rest], clean[rest])


def test_same_bits_every_time():
    inputs = make_inputs(Sizes(1, 70, 90, 4, 2, 32, 32), Features(), torch.bfloat16)
    first = results(inputs, causal=True)
    assert_equal(results(inputs, causal=True), first)


def test_refusals_say_why():
    q = torch.empty(1, 4, 2, 16)
    problem = describe(q, q, q, Extras(), Scalars(1.0), "bottom_right", False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    assert "use_interpreter" in portable.supports(problem, cpu)
    assert portable.supports(problem, gpu) is None
    with use_interpreter():
        assert portable.supports(problem, cpu) is None
        assert "513" in portable.supports(problem._replace(headdim_v=513), cpu)
        assert "float64" in portable.supports(problem._replace(dtype=torch.float64), cpu)
    assert "mps" in portable.supports(problem, torch.device("mps"))


def test_an_unknown_configuration_of_one_kernel_leaves_the_others(tiles):
    case = Case("small", Sizes(1, 40, 40), Features())
    with override(bwd_dq=Config(16, 32, 4, 1)):
        run_case(case, backend="portable")
    assert tiles["bwd_dq"][:2] == (16, 32)
    assert tiles["fwd"][:2] == tiles["bwd_dkdv"][:2] == (64, 64)
