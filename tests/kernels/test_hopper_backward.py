"""The Hopper backward: what it serves, ordered accumulation, memory order, reproducible bits."""

import collections
import gc
import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers.tiers import every, sample, sample_rows

import tilewise
from gluon_emulator.hopper.emulate import Rebinder
from tilewise.kernels.common import program
from tilewise.kernels.common.arguments import sizes_of
from tilewise.kernels.hopper.bwd import hidden, kernels, mma, plan, queue, work_tile
from tilewise.problem import Extras, Scalars, describe
from tilewise.testing import use_emulator
from tilewise.testing.cases import Case, Features, Sizes
from tilewise.testing.run import run_case

CPU = torch.device("cpu")
BF16 = torch.bfloat16
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
SEEDS = sample(range(12), 0)

VARIANTS = {
    "groups": Case("a", Sizes(1, 300, 300, 4, 2, 64), Features()),  # blocks begin in their midst
    "groups-causal": Case("b", Sizes(1, 200, 313, 4, 2, 128), Features(causal=True)),
    "unseen-keys": Case("c", Sizes(1, 100, 500, 2, 2, 64), Features(causal="top_left")),
    "tall": Case("d", Sizes(2, 260, 130, 2, 2, 64), Features(lse_grad=True)),
    "no-registers-left": Case("e", Sizes(1, 200, 150, 2, 2, 64), Features(softcap=3.0)),
    "wide": Case("f", Sizes(1, 130, 150, 2, 1, 248), Features()),
    "own-dq": Case("m", Sizes(2, 260, 270, 2, 2, 256), Features(lse_grad=True)),
    "own-dq-causal": Case("n", Sizes(1, 140, 420, 2, 2, 256), Features(causal=True)),
    "own-dq-unseen-keys": Case("o", Sizes(1, 100, 500, 2, 2, 256), Features(causal="top_left")),
    "own-dq-unseeing-queries": Case("p", Sizes(1, 420, 140, 2, 2, 256), Features(causal=True)),
    "own-dq-groups": Case("q", Sizes(2, 140, 150, 4, 2, 256), Features(causal=True)),
    "own-dq-window": Case("r", Sizes(1, 330, 200, 2, 1, 256), Features(window=(70, 30))),
    "three-quarters": Case("g", Sizes(1, 150, 100, 2, 2, 192, 128), Features(causal=True)),
    "three-quarters-full": Case("i", Sizes(1, 140, 260, 2, 1, 192, 128), Features(lse_grad=True)),
    "three-quarters-softcap": Case("j", Sizes(1, 90, 200, 2, 1, 136, 40), Features(softcap=3.0)),
    "three-quarters-window": Case(
        "k", Sizes(1, 200, 330, 2, 2, 192, 128), Features(window=(90, 20), alibi="heads")
    ),
    "band": Case("l", Sizes(1, 330, 200, 2, 2, 100), Features(window=(70, 30), lse_grad=True)),
    "two-pieces": Case("m", Sizes(1, 200, 313, 4, 2, 96), Features(causal=True)),
    "two-pieces-window": Case("n", Sizes(1, 330, 200, 2, 2, 72, 40), Features(window=(70, 30))),
    "narrow-tall": Case("o", Sizes(1, 140, 300, 2, 2, 20, 32), Features(lse_grad=True)),
    "wide-values": Case("h", Sizes(1, 100, 90, 2, 2, 64, 256), Features(window=(30, 10))),
}


def problem_of(headdim, headdim_v=0, deterministic=False, extras=None, **scalars):
    q, v = torch.empty(1, 8, 2, headdim, dtype=BF16), torch.empty(1, 8, 2, headdim_v or headdim)
    scalars = Scalars(**{"scale": 0.1, **scalars})
    return describe(q, q, v, extras or Extras(), scalars, "bottom_right", deterministic)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", every(2, VARIANTS))
def test_any_order_of_events(name, seed):
    """No deadlock, no wrong phase and no missing wait in any order."""
    records = run_case(VARIANTS[name], "hopper", "cpu", BF16, seed)
    failures = [str(record) for record in records if not record.verdict.ok]
    assert not failures, "\n".join(failures)


@pytest.fixture
def counted(monkeypatch):
    """The launches that convert dQ: the counts that they find, and the keys of a tile."""
    found, start = [], program.Launch.start

    def started(launch, values, device):
        if launch.kernel is kernels.hopper_bwd_dq_kernel:
            assert launch.options["launch_pdl"] and launch.constants["IS_EARLY"]
            counts = values["dq_semaphore"].clone()
            found.append((counts, launch.constants["TILE"].BLOCK_N))
        return start(launch, values, device)

    monkeypatch.setattr(program.Launch, "start", started)
    return found


def has_own_dq(problem, q):
    return plan.has_own_dq(problem, q, sizes=sizes_of(q, q, Extras()))


def test_headdim_256_has_a_kernel_for_dq():
    """There is no sum in memory then, and no order of sums."""
    q = torch.empty(1, 256, 2, 256)
    assert has_own_dq(problem_of(256, deterministic=True), q)
    for features in (dict(nheads_k=1), dict(is_packed=True), dict(has_seqused_k=True)):
        assert has_own_dq(problem_of(256, left=10)._replace(**features), q)
    tile = plan.plan_of(problem_of(256, deterministic=True), True, has_dq=False).tile
    assert not tile.HAS_DQ and not tile.ORDERED
    for problem in (
        problem_of(256, 192),
        problem_of(192, 256),
        problem_of(256)._replace(has_dropout=True),
        problem_of(256, softcap=3.0),
        problem_of(256)._replace(has_alibi=True),
    ):
        assert not has_own_dq(problem, q)


@pytest.mark.parametrize(("right", "least"), [(-1, 119), (0, 330)])
def test_a_kernel_for_dq_has_enough_tiles(right, least, monkeypatch):
    """More where some are longer."""
    monkeypatch.setattr(plan, "num_sms", lambda device: 132)
    problem = problem_of(256, right=right)._replace(nheads=1, nheads_k=1)
    for tiles in (least - 1, least):
        q = SimpleNamespace(shape=(1, 128 * tiles, 1, 256), device=torch.device("cuda"))
        assert has_own_dq(problem, q) == (tiles == least)


COUNTED = list(itertools.product(range(2), ("groups", "unseen-keys", "three-quarters", "wide")))


@pytest.mark.parametrize("seed, name", sample_rows(COUNTED, *COUNTED[0:4:2], *COUNTED[5::2]))
def test_tiles_are_counted(name, seed, counted):
    """In any order of events the head of each key has its tiles when dQ is converted."""
    case = VARIANTS[name]
    run_case(case, "hopper", "cpu", BF16, seed)
    sizes = case.sizes
    assert counted
    for counts, block_n in counted:
        heads = sizes.batch * sizes.nheads
        of_keys = counts.flatten()[: heads : sizes.nheads // sizes.nheads_k]
        assert (of_keys == -(-sizes.seqlen_k // block_n)).all()


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_packed_sequences_are_counted(causal, counted):
    """At the first block of each sequence that has queries."""
    queries, keys, firsts = (70, 0, 200), (130, 40, 300), (0, 1, 2)  # a block is of one sequence
    q = torch.randn(sum(queries), 4, 64, dtype=BF16)
    k, v = (torch.randn(sum(keys), 2, 64, dtype=BF16) for _ in "kv")
    starts = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (queries, keys))
    options = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts))
    with use_emulator():
        gradients(q, k, v, max_seqlen_q=200, max_seqlen_k=300, causal=causal, **options)
    ((counts, _),) = counted
    for rows, tiles, first in zip(queries, (2, 1, 3), firsts):
        assert rows == 0 or counts[0, ::2, first, 0].tolist() == [tiles, tiles]


@pytest.mark.parametrize("left, right", [(256, 0), (100, 0), (70, 30)])
def test_a_warpgroup_passes_over_blocks_that_do_not_see_its_keys(left, right, monkeypatch):
    """Its half of a tile's keys: blocks that the tile visits for the other half alone."""
    passed, pass_block = collections.Counter(), Rebinder().function(hidden.pass_block)

    def noted(rings, ds_state, step, WG, TILE):
        passed[WG] += 1
        return pass_block(rings, ds_state, step, WG, TILE)

    monkeypatch.setattr(mma, "pass_block", noted)
    case = Case("a", Sizes(1, 256, 256, 1, 1, 128), Features(window=(left, right)))
    assert all(x.verdict.ok for x in run_case(case, "hopper", "cpu", BF16))
    apart = torch.arange(256) - torch.arange(256)[:, None]
    seen = (apart >= -left) & (apart <= right)
    halves = seen.view(4, 64, 2, 2, 64).any(4).any(1)  # blocks, tiles, halves
    expected = (halves.any(2, keepdim=True) & ~halves).sum((0, 1))
    assert [passed[0], passed[1]] == expected.tolist()


@pytest.mark.parametrize("headdim, begins", [(128, [0, 1, 0, 0]), (256, [0, 1, 0, 1, 0, 0, 0])])
@pytest.mark.parametrize("modifier", [{}, dict(bias="qk"), dict(dropout=0.2)], ids=str)
def test_long_tiles_of_a_causal_head_begin_at_different_blocks(
    headdim, begins, modifier, monkeypatch
):
    """They would otherwise add to the same block of dQ at a time."""
    found, work_of = {}, Rebinder().function(work_tile.work_of)

    def noted(n_block, *args, **keywords):
        work = work_of(n_block, *args, **keywords)
        found[int(n_block)] = int(work.begin - work.first)
        return work

    monkeypatch.setattr(plan, "SPREAD", 2)
    monkeypatch.setattr(work_tile, "work_of", noted)
    case = Case("s", Sizes(1, 400, 400, 2, 2, headdim), Features(causal=True, **modifier))
    assert all(x.verdict.ok for x in run_case(case, "hopper", "cpu", BF16))
    assert [found[n] for n in sorted(found)] == begins


def test_programs_leave_sms_to_the_conversion_of_dq(monkeypatch):
    """More where queries see few keys, and none where programs have few tiles."""
    monkeypatch.setattr(queue, "num_sms", lambda device: 132)
    monkeypatch.setattr(queue, "programs_of", lambda tiles, device: min(tiles, 132))
    keys = 256, 512, 1024, 2048, 4096, 8192
    programs = [queue.programs_beside_dq(2048, x, torch.device("cuda")) for x in keys]
    assert programs == [119, 124, 128, 130, 131, 132]
    assert queue.programs_beside_dq(1000, 256, torch.device("cuda")) == 132


@pytest.mark.parametrize(("deterministic", "mixed"), [(False, 4), (True, 1)])
def test_query_heads_that_share_keys_count_once(deterministic, mixed):
    """As a tile visits one after the other. Ordered additions count them all."""
    q, k = torch.empty(4, 4096, 16, 128, dtype=BF16), torch.empty(4, 4096, 4, 128, dtype=BF16)
    scalars = Scalars(scale=0.1, right=0)
    problem = describe(q, k, k, Extras(), scalars, "bottom_right", deterministic)
    assert queue.heads_per_l2_group(problem, q) == mixed


def gradients(q, k, v, dout=None, **options):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = tilewise.attention(*inputs, backend="hopper", **options)
    return torch.autograd.grad(out, inputs, like(out) if dout is None else dout)


def like(out):
    generator = torch.Generator(out.device).manual_seed(1)
    return torch.randn(out.shape, device=out.device, generator=generator).to(out.dtype)


ORDERED = itertools.product([False, "bottom_right", "top_left"], [64, 192, 256])


@pytest.mark.parametrize("causal, headdim", sample_rows(ORDERED, ("bottom_right", 64)))
def test_deterministic_in_any_order_of_events(causal, headdim):
    """The tiles of a head add to dQ in one order, whichever runs first; fully masked tiles do not
    add.
    """
    torch.manual_seed(0)
    q = torch.randn(1, 90, 2, headdim, dtype=BF16)
    k, v = (torch.randn(1, 200 if headdim == 256 else 400, 1, headdim, dtype=BF16) for _ in "kv")
    v = v[..., :128] if headdim == 192 else v
    found = []
    for seed in range(3):
        with use_emulator(seed):
            found.append(gradients(q, k, v, causal=causal, deterministic=True))
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again))


@pytest.mark.parametrize(
    ("problem", "sides"),
    [
        (problem_of(64), (128, 128, 64, 64)),
        (problem_of(64, softcap=3.0), (64, 128, 64, 64)),
        (problem_of(40, 72), (64, 128, 128, 128)),
        (problem_of(192, 128), (64, 128, 192, 128)),
        (problem_of(136, 40, deterministic=True), (64, 128, 192, 64)),
        (problem_of(192, 192), (64, 64, 256, 256)),
        (problem_of(192, 128)._replace(has_dropout=True), (64, 64, 256, 128)),
    ],
)
def test_tiles(problem, sides):
    assert plan.plan_of(problem, True).tile[:4] == sides


@pytest.mark.parametrize("scale", [1e-38, 1e-3])
def test_scales_too_small_to_divide_by(scale):
    q = torch.randn(1, 70, 1, 128, dtype=BF16)
    with use_emulator():
        assert all(grad.isfinite().all() for grad in gradients(q, q, q, scale=scale))


def test_no_keys_and_no_queries():
    q, k = torch.randn(1, 5, 2, 64, dtype=BF16), torch.randn(1, 0, 2, 64, dtype=BF16)
    with use_emulator():
        for grads in (gradients(q, k, k), gradients(k, q, q)):
            assert all(grad.eq(0).all() for grad in grads)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
def test_same_bits_1000_times(headdim):
    """Ordered accumulation, while another stream occupies SMs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, n, 4, headdim, device="cuda", dtype=BF16) for n in (333, 601, 601))
    v = v[..., :128] if headdim == 192 else v
    first = gradients(q, k, v, causal=True, deterministic=True)
    noise, other = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    differ = torch.zeros((), dtype=torch.bool, device="cuda")
    for repeat in range(1000):
        if repeat % 7 == 0:
            with torch.cuda.stream(other):
                noise @ noise
        again = gradients(q, k, v, causal=True, deterministic=True)
        differ |= torch.stack([(a != b).any() for a, b in zip(first, again)]).any()
    assert not differ.item()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("headdim", "nheads_k"), [(64, 2), (96, 4), (128, 4), (192, 4), (256, 4)])
def test_dq_is_converted_when_all_its_tiles_have_added(headdim, nheads_k):
    """While another stream occupies SMs, in memory that held NaN."""
    torch.manual_seed(0)
    shapes = (5, 777, 4), (5, 1001, nheads_k), (5, 1001, nheads_k)
    q, k, v = (torch.randn(*x, headdim, device="cuda", dtype=BF16) for x in shapes)
    v = v[..., :128] if headdim == 192 else v
    first = gradients(q, k, v, causal=True)[0].float()
    noise, other = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    worst = torch.zeros((), device="cuda")
    for repeat in range(150):
        if repeat % 7 == 0:
            with torch.cuda.stream(other):
                noise @ noise
        torch.full((5, 1024, 4, 256), float("nan"), device="cuda")
        error = (gradients(q, k, v, causal=True)[0].float() - first).abs().max()
        worst = torch.maximum(worst, error.nan_to_num(nan=float("inf")))
    assert worst.item() <= first.abs().max().item() * 2**-7


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("nheads_k", [8, 4, 1])
@pytest.mark.parametrize(
    "features",
    [dict(causal=False), dict(causal=True), dict(causal=True, window=(300, 0))],
    ids=["full", "causal", "window"],
)
def test_dq_by_a_kernel_of_its_own(features, nheads_k):
    """Of as many tiles as it takes, while another stream occupies SMs: the same bits each time."""
    case = Case("q", Sizes(16, 777, 1001, 8, nheads_k, 256), Features(**features))
    assert all(x.verdict.ok for x in run_case(case, "hopper", "cuda", BF16))
    shapes = (777, 8), (1001, nheads_k), (1001, nheads_k)
    q, k, v = (torch.randn(16, *x, 256, device="cuda", dtype=BF16) for x in shapes)
    assert has_own_dq(problem_of(256)._replace(nheads=8, nheads_k=nheads_k), q)
    first = gradients(q, k, v, **features)
    noise, other = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for repeat in range(50):
        if repeat % 7 == 0:
            with torch.cuda.stream(other):
                noise @ noise
        assert all(map(torch.equal, first, gradients(q, k, v, **features)))


@pytest.mark.gpu
@needs_hopper
def test_two_streams_that_alternate():
    """Two launches that hold each other's processors: neither may wait for what is not at work."""
    torch.manual_seed(0)
    q = torch.randn(8, 2000, 4, 128, device="cuda", dtype=BF16)
    first = gradients(q, q, q, deterministic=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(gradients(q, q, q, deterministic=True))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for again in found for a, b in zip(first, again))


@pytest.mark.gpu
@needs_hopper
def test_keys_and_values_have_the_same_bits_anyway():
    torch.manual_seed(0)
    q = torch.randn(2, 1500, 4, 128, device="cuda", dtype=BF16)
    first = gradients(q, q, q)
    for _ in range(20):
        again = gradients(q, q, q)
        assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])


@pytest.mark.gpu
@needs_hopper
def test_cuda_graph():
    torch.manual_seed(0)
    q, dout = torch.randn(2, 2, 500, 4, 64, device="cuda", dtype=BF16)
    options = dict(causal=True, deterministic=True)
    eager = gradients(q, q, q, dout, **options)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(q, q, q, dout, **options)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = gradients(q, q, q, dout, **options)
    for _ in range(5):
        for grad in captured:
            grad.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(eager, captured))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("headdims", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_default_on_hopper(causal, headdims):
    """The gradients of both backends agree at lengths that the case matrix does not reach."""
    torch.manual_seed(0)
    shapes = zip((4, 2, 2), (headdims[0], *headdims))
    q, k, v = (torch.randn(1, 4100, h, d, device="cuda", dtype=BF16) for h, d in shapes)
    mine = gradients(q, k, v, causal=causal)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = tilewise.attention(*inputs, causal=causal, backend="portable")
    for a, b in zip(mine, torch.autograd.grad(out, inputs, like(out))):
        assert (a.float() - b.float()).norm() < 0.01 * b.float().norm()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
def test_peak_memory(headdim, deterministic):
    """Besides the gradients: dQ in fp32, two floats a query, 8 bytes of semaphores or counts a
    128 queries; of headdim 256, where dQ has a kernel of its own, the floats alone.
    """
    q, k, v = (torch.randn(2, 2048, h, headdim, device="cuda", dtype=BF16) for h in (8, 2, 2))
    v = v[..., :128].contiguous() if headdim == 192 else v
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = tilewise.attention(*inputs, backend="hopper", deterministic=deterministic)
    dout = like(out)

    def backward():
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    for _ in range(3):  # compile, which leaves cycles that may hold the gradients of a call
        backward()
        gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    grads = backward()
    torch.cuda.synchronize()
    extra = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    rows = 2 * 2048 * 8
    accumulated = 0 if headdim == 256 else rows * headdim * 4 + rows // 128 * 8
    assert extra == sum(x.nbytes for x in grads) + rows * 2 * 4 + accumulated
