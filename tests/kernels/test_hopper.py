"""The Hopper backend: what it refuses, when heads share a tile, and its barriers by many seeds."""

import dataclasses

import pytest
import torch
from helpers.tiers import every, sample
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import tilewise
from tilewise import dispatch
from tilewise.errors import PerformanceWarning, Slower
from tilewise.kernels import hopper
from tilewise.kernels.hopper import descriptors
from tilewise.kernels.hopper.fwd import launch, runs_launch
from tilewise.ops import calls
from tilewise.problem import Extras, Scalars, describe
from tilewise.testing import use_emulator
from tilewise.testing.cases import Case, Features, Sizes
from tilewise.testing.run import run_case
from tilewise.testing.tolerance import assert_within

CPU = torch.device("cpu")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
BF16 = torch.bfloat16


def problem_of(q=(1, 8, 2, 64), k=(1, 8, 2, 64), headdim_v=64, dtype=BF16, extras=None):
    q, k = torch.empty(q, dtype=dtype), torch.empty(k, dtype=dtype)
    v = torch.empty(*k.shape[:3], headdim_v, dtype=dtype)
    return describe(q, k, v, extras or Extras(), Scalars(1.0), "bottom_right", False)


def test_described_has_all_that_a_descriptor_has():
    """The launcher of this Triton may read any of it."""
    theirs = {x.name: x.default for x in dataclasses.fields(TensorDescriptor)}
    defaults = descriptors.DescriptorFields._field_defaults
    assert theirs.keys() <= set(descriptors.DescriptorFields._fields)
    assert all(theirs[name] == default for name, default in defaults.items() if name in theirs)


@pytest.mark.parametrize("seqlen, nheads, groups", [(16384, 12, 12), (2048, 14, 2), (512, 8, 1)])
def test_groups_of_heads_are_even(seqlen, nheads, groups):
    """Keys of headdim 256: a head of 2Ki is 2 MiB, of which eight fit a group; 7 and 7, not 8 and
    6.
    """
    q = torch.empty(1, seqlen, nheads, 256, dtype=BF16)
    problem = describe(q, q, q, Extras(), Scalars(1.0, right=0), "bottom_right", False)
    queue = launch.queue_of(problem, launch.plan_for(problem, q).tile, q, q)
    assert queue.l2_group == nheads // groups


@pytest.mark.parametrize("seqlen, mixed", [(1 << 14, 4), (1 << 16, 2), (1 << 17, 1)])
def test_long_runs_of_rows_take_one_head_after_the_other(seqlen, mixed):
    """Of four query heads that share keys of headdim 128, 512 bytes a key."""
    q, k = (torch.empty(1, 64, n, 128, dtype=BF16) for n in (32, 8))
    scalars = Scalars(1.0, right=0)
    problem = describe(q, k, k, Extras(), scalars, "bottom_right", False)
    walk = runs_launch.Walk((), seqlen, 1, (), 0)
    assert runs_launch.mixed_heads(problem, walk) == mixed


def test_refuses_with_a_reason():
    assert "use_emulator" in hopper.supports(problem_of(), CPU)
    with use_emulator():
        assert hopper.supports(problem_of(), CPU) is None
        assert "float32" in hopper.supports(problem_of(dtype=torch.float32), CPU)
        assert hopper.supports(problem_of(headdim_v=100), CPU) is None
        assert "headdim_v 100" in hopper.why_copied(problem_of(headdim_v=100))
        assert hopper.why_copied(problem_of()) is None
        assert "256" in hopper.supports(problem_of(headdim_v=264), CPU)
        padded = Extras(seqused_k=torch.ones(1, dtype=torch.int32))
        assert hopper.supports(problem_of(extras=padded), CPU) is None
        unaligned = dispatch.ask("hopper", problem_of(), CPU, False)
        assert unaligned is dispatch.UNALIGNED
    assert "mps" in hopper.supports(problem_of(), torch.device("mps"))


@pytest.mark.parametrize(
    "headdim, headdim_v, sides",
    [
        (192, 128, (128, 128, 192, 128)),
        (136, 40, (128, 128, 192, 64)),
        (192, 192, (128, 64, 192, 256)),
        (128, 192, (128, 64, 128, 256)),
        (200, 128, (128, 64, 256, 128)),
    ],
)
def test_tiles_of_heads_up_to_192(headdim, headdim_v, sides):
    """Keys of 192 columns are not padded to 256, and with values of 128 a block has 128 of them."""
    sizes = 1, 256, 2, headdim
    q = torch.empty(1, 4096, 2, headdim, dtype=BF16)
    plan = launch.plan_for(problem_of(sizes, sizes, headdim_v), q)
    assert plan.tile[:4] == sides


def test_falling_to_another_backend_is_said_once():
    x = torch.randn(1, 8, 2, 64 + 4, dtype=BF16)
    with use_emulator():
        with pytest.warns(PerformanceWarning, match="multiples of 16 bytes"):
            tilewise.attention(*(x[..., 4:] for _ in range(3)))  # rows that start at 8 bytes
        with pytest.raises(NotImplementedError, match="multiples of 16 bytes"):
            tilewise.attention(*(x[..., 4:] for _ in range(3)), backend="hopper")


def test_narrow_heads_are_left_to_others_unless_it_is_named():
    q = torch.randn(1, 9, 2, 32, dtype=BF16)
    problem = problem_of((1, 9, 2, 32), (1, 9, 2, 32), 32)
    with use_emulator():
        assert isinstance(hopper.supports(problem, CPU), Slower)
        assert dispatch.choose(problem, CPU).NAME == "cpu"
        assert tilewise.attention(q, q, q, backend="hopper").isfinite().all()


@pytest.mark.parametrize(
    ("group", "seqlen_q", "pack"), [(1, 1, 1), (4, 1, 4), (3, 7, 4), (4, 4096, 1), (128, 1, 1)]
)
def test_heads_share_a_tile_where_rows_are_few(group, seqlen_q, pack):
    problem = problem_of((1, seqlen_q, 2 * group, 64), (1, 9, 2, 64))
    assert launch.pack_of(problem, seqlen_q) == pack


@pytest.mark.parametrize("group", [3, 8])
def test_shared_tiles(group):
    """A decode step: a group is rows of one tile, each head with its own slope and sink."""
    sizes = Sizes(2, 5, 150, 2 * group, 2, 64)
    features = Features(causal=True, alibi="batch", sinks=True, lse_grad=True)
    records = run_case(Case(f"shared-{group}", sizes, features), "hopper", "cpu", BF16)
    assert all(record.verdict.ok for record in records), [str(r) for r in records]


def test_launches_are_kept_apart_by_the_tensors_they_were_compiled_for():
    """Sinks of another dtype or alignment are another launch's."""
    sinks = torch.zeros(2 * 17 + 1)
    q = torch.empty(1, 9, 2, 64, dtype=BF16)
    keys = set()
    for given in (sinks[:2], sinks[1:3], sinks[:2].bfloat16(), None):
        keys.add(tuple(calls.signature((q, q, q, given))))
    assert len(keys) == 4


# Tiles with ragged ends, warpgroups without rows, blocks that only some warpgroups see
VARIANTS = {
    "three-warpgroups": Case("a", Sizes(1, 400, 400, 2, 1, 64), Features()),
    "three-warpgroups-causal": Case("b", Sizes(1, 1100, 1100, 1, 1, 64), Features(causal=True)),
    "two-warpgroups-causal": Case("c", Sizes(1, 300, 300, 2, 1, 64), Features(causal=True)),
    "window": Case("d", Sizes(1, 300, 420, 2, 2, 64), Features(causal=True, window=(100, 0))),
    "taller": Case("e", Sizes(1, 300, 130, 2, 2, 128), Features(causal=True)),
    "wide": Case("f", Sizes(1, 200, 200, 2, 2, 256), Features(causal=True)),
    "wide-keys": Case("g", Sizes(1, 150, 200, 2, 2, 192, 128), Features()),
    "wide-keys-causal": Case("i", Sizes(1, 150, 300, 2, 1, 136, 100), Features(causal=True)),
    "shared": Case("h", Sizes(2, 9, 300, 8, 2, 64), Features(causal=True)),
}
SEEDS = sample(range(20), 0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", every(2, VARIANTS))
def test_any_order_of_events(name, seed):
    """No deadlock, no wrong phase and no missing wait in any order."""
    records = run_case(VARIANTS[name], "hopper", "cpu", BF16, seed)
    failures = [str(record) for record in records if not record.verdict.ok]
    assert not failures, "\n".join(failures)


def test_no_keys_and_no_queries():
    q, k = torch.randn(1, 5, 2, 64, dtype=BF16), torch.randn(1, 0, 2, 64, dtype=BF16)
    sinks = torch.tensor([1.0, -2.0], dtype=BF16)
    with use_emulator():
        out, lse = tilewise.attention(q, k, k, return_lse=True, backend="hopper")
        assert out.eq(0).all() and lse.eq(-torch.inf).all()
        _, lse = tilewise.attention(q, k, k, sinks=sinks, return_lse=True, backend="hopper")
        assert lse.eq(sinks.float()[None, :, None]).all()
        assert tilewise.attention(k, q, q, backend="hopper").shape == k.shape


@pytest.mark.gpu
@needs_hopper
def test_same_bits_under_contention():
    """1,000 repeats of a ragged causal batch while another stream takes processors away."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, n, 4, 128, device="cuda", dtype=BF16) for n in (777, 1001, 1001))
    first = tilewise.attention(q, k, v, causal=True, return_lse=True, backend="hopper")
    noise, other = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    differ = torch.zeros((), dtype=torch.bool, device="cuda")
    for repeat in range(1000):
        if repeat % 7 == 0:
            with torch.cuda.stream(other):
                noise @ noise
        again = tilewise.attention(q, k, v, causal=True, return_lse=True, backend="hopper")
        differ |= any_differs(first, again)
    assert not differ.item()


def any_differs(first, again):
    return torch.stack([(a != b).any() for a, b in zip(first, again)]).any()


@pytest.mark.gpu
@needs_hopper
def test_cuda_graph_and_streams():
    torch.manual_seed(0)
    q = torch.randn(2, 500, 4, 64, device="cuda", dtype=BF16)
    eager = tilewise.attention(q, q, q, causal=True, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tilewise.attention(q, q, q, causal=True, backend="hopper")
    side = torch.cuda.Stream()
    for _ in range(20):
        captured.zero_()
        side.wait_stream(torch.cuda.current_stream())
        graph.replay()
        with torch.cuda.stream(side):
            beside = tilewise.attention(q, q, q, causal=True, backend="hopper")
        torch.cuda.synchronize()
        assert torch.equal(captured, eager) and torch.equal(beside, eager)


@pytest.mark.gpu
@needs_hopper
def test_more_elements_than_32_bits_count():
    q = torch.randn(1, 64, 8, 128, device="cuda", dtype=BF16)
    k = torch.empty(1, 2**21 + 77, 9, 128, device="cuda", dtype=BF16)[:, :, :8]
    k.normal_()
    assert k.stride(1) * k.shape[1] > 2**31
    out, lse = tilewise.attention(q, k, k, return_lse=True, backend="hopper")
    oracle = tilewise.attention_reference(
        *(x.double() for x in (q[:, :, 7:], k[:, :, 7:], k[:, :, 7:]))
    )
    plain = tilewise.attention(q[:, :, 7:], k[:, :, 7:], k[:, :, 7:], backend="portable")
    assert_within(out[:, :, 7:], oracle, plain)
    assert lse.isfinite().all()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_default_on_hopper(causal, headdim):
    """Without a name the call goes to this backend, and its answer is the portable one."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1023, h, headdim, device="cuda", dtype=BF16) for h in (8, 2, 2))
    found = tilewise.attention(q, k, v, causal=causal)
    forced = tilewise.attention(q, k, v, causal=causal, backend="hopper")
    other = tilewise.attention(q, k, v, causal=causal, backend="portable")
    assert torch.equal(found, forced)
    torch.testing.assert_close(found, other, atol=0.02, rtol=0.02)
