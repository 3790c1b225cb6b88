"""How dQ comes about in the Hopper backward: from counted tiles, or by a kernel of its own."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers.hopper_gradients import BF16, gradients, problem_of
from helpers.tiers import sample_rows

from tilewise.kernels.common import program
from tilewise.kernels.common.arguments import sizes_of
from tilewise.kernels.hopper.bwd import kernels, plan, queue
from tilewise.problem import Extras
from tilewise.testing import use_emulator
from tilewise.testing.cases import Case, Features, Sizes
from tilewise.testing.run import run_case

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")


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


CASES = {
    "groups": Case("a", Sizes(1, 300, 300, 4, 2, 64), Features()),  # blocks begin in their midst
    "unseen-keys": Case("b", Sizes(1, 100, 500, 2, 2, 64), Features(causal="top_left")),
    "three-quarters": Case("c", Sizes(1, 150, 100, 2, 2, 192, 128), Features(causal=True)),
    "wide": Case("d", Sizes(1, 130, 150, 2, 1, 248), Features()),
}
COUNTED = list(itertools.product(range(2), CASES))


@pytest.mark.parametrize("seed, name", sample_rows(COUNTED, *COUNTED[0:4:2], *COUNTED[5::2]))
def test_tiles_are_counted(name, seed, counted):
    """In any order of events the head of each key has its tiles when dQ is converted."""
    case = CASES[name]
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


def test_programs_leave_sms_to_the_conversion_of_dq(monkeypatch):
    """More where queries see few keys, and none where programs have few tiles."""
    monkeypatch.setattr(queue, "num_sms", lambda device: 132)
    monkeypatch.setattr(queue, "programs_of", lambda tiles, device: min(tiles, 132))
    keys = 256, 512, 1024, 2048, 4096, 8192
    programs = [queue.programs_beside_dq(2048, x, torch.device("cuda")) for x in keys]
    assert programs == [119, 124, 128, 130, 131, 132]
    assert queue.programs_beside_dq(1000, 256, torch.device("cuda")) == 132


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
