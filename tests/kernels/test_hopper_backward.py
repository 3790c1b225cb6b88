"""The Hopper backward: what it serves, ordered accumulation, memory order, reproducible bits."""

import collections
import gc
import itertools

import pytest
import torch
from helpers.hopper_gradients import BF16, gradients, like, problem_of
from helpers.tiers import every, sample, sample_rows

import tilewise
from gluon_emulator.hopper.emulate import Rebinder
from tilewise.kernels.hopper.bwd import hidden, mma, plan, queue, work_tile
from tilewise.problem import Extras, Scalars, describe
from tilewise.testing import use_emulator
from tilewise.testing.cases import Case, Features, Sizes
from tilewise.testing.run import run_case

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


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", every(2, VARIANTS))
def test_any_order_of_events(name, seed):
    """No deadlock, no wrong phase and no missing wait in any order."""
    records = run_case(VARIANTS[name], "hopper", "cpu", BF16, seed)
    failures = [str(record) for record in records if not record.verdict.ok]
    assert not failures, "\n".join(failures)


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


@pytest.mark.parametrize(("deterministic", "mixed"), [(False, 4), (True, 1)])
def test_query_heads_that_share_keys_count_once(deterministic, mixed):
    """As a tile visits one after the other. Ordered additions count them all."""
    q, k = torch.empty(4, 4096, 16, 128, dtype=BF16), torch.empty(4, 4096, 4, 128, dtype=BF16)
    scalars = Scalars(scale=0.1, right=0)
    problem = describe(q, k, k, Extras(), scalars, "bottom_right", deterministic)
    assert queue.heads_per_l2_group(problem, q) == mixed


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
