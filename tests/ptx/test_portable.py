"""Portable kernels as compiled for sm_90: quantising, signals, copies."""

import pytest
import torch
from helpers import fp8
from helpers.caches import contiguous, paged, sequences
from helpers.quantizing import (
    ALL,
    BF16,
    LENGTHS,
    NO_SCALES,
    NONE,
    quantized,
    tensors,
    transposed_by_kernels,
)
from helpers.tiers import sample, sample_rows

import tilewise
from ptx import execute, executing
from ptx.launch import run_together
from tilewise.kernels import portable
from tilewise.kernels.common import device_words
from tilewise.kernels.common.operand import filled
from tilewise.kernels.common.program import Launch
from tilewise.kernels.common.quantized import FP8, Lengths
from tilewise.kernels.common.row_table import Rows, Table
from tilewise.kernels.cpu import quantize as plain
from tilewise.kernels.hopper import copy_rows
from tilewise.kernels.portable import decode_launch, quantize_memory
from tilewise.kernels.portable.copy_table import publish_kernel
from tilewise.kernels.portable.signals import LANES, WORDS, Meeting, barrier_kernel, poison_kernel
from tilewise.testing import use_interpreter

pytestmark = pytest.mark.slow

INT32 = torch.int32


@pytest.fixture
def executed(monkeypatch):
    """Launches of quantising kernels, with the warps that they have on a GPU."""

    monkeypatch.setattr(Launch, "start", lambda launch, values, _: executed_on(launch, values))


def executed_on(launch, values):
    """Executes a launch of the tensors of these names."""
    args = [filled(x, values) for x in launch.args.values()]
    execute(launch.kernel, options=launch.options)[(launch.programs,)](*args, **launch.constants)


def assert_bits(found, expected):
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


CASES = [(name, arch) for name in LENGTHS for arch in ("sm90", "sm80")]


@pytest.mark.parametrize("name, arch", sample_rows(CASES, ("used", "sm90")))
def test_codes_and_scales_have_the_bits_of_torch(name, arch, executed, monkeypatch):
    """By the conversion of sm_89 and later, and by integers."""
    monkeypatch.setattr(quantize_memory, "architecture", lambda device: arch)
    rows, of = LENGTHS[name]
    q, k, v = tensors(rows)
    found = quantized(q, k, v, NONE, NO_SCALES, of)
    expected = plain.quantize(q, k, v, NONE, NO_SCALES, of)
    for mine, theirs in zip(found.scales, expected.scales):
        assert_bits(mine, theirs)
    assert_bits(found.v_t, expected.v_t)
    for side, mine, theirs in zip("qk", found[:2], expected[:2]):
        starts = getattr(of, f"cu_seqlens_{side}")
        inside = slice(None) if starts is None else slice(int(starts[0]), int(starts[-1]))
        assert_bits(mine[:, inside], theirs[:, inside])


SMOOTHED = [(2**n, dtype) for n in range(4, 9) for dtype in (BF16, torch.float16, torch.float32)]


@pytest.mark.slow
@pytest.mark.parametrize("headdim, dtype", [*SMOOTHED, (96, BF16), (65, BF16), (192, BF16)])
def test_rotation_and_means(headdim, dtype, executed):
    x, of = tensors((1, 140), headdims=(headdim, headdim), dtype=dtype), Lengths()
    found = quantized(*x, ALL, NO_SCALES, of)
    expected = plain.quantize(*x, ALL, NO_SCALES, of)
    for mine, theirs in zip((*found.scales, *found[4:6]), (*expected.scales, *expected[4:6])):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert (found.v_drift is None) == (expected.v_drift is None) == (headdim <= 128)
    if headdim > 128:
        torch.testing.assert_close(found.v_drift, expected.v_drift, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(found[:3], expected[:3]):
        mine, theirs = mine.float(), theirs.float()
        assert (mine != theirs).float().mean() <= 5e-3  # next to the middle of two codes
        assert (mine - theirs).abs().le(theirs.abs() / 8 + 2.0**-9).all()


@pytest.mark.parametrize("arch", sample(["sm90", "sm80"], "sm80"))
def test_nan_zero_and_saturation(arch, executed, monkeypatch):
    monkeypatch.setattr(quantize_memory, "architecture", lambda device: arch)
    q, k, v = tensors((2, 40))
    k[0, 3, 1, 5], v[1], q[:, 0] = torch.nan, 0.0, torch.inf
    given = torch.tensor(0.001).expand(2, 2), None, None
    found = quantized(q, k, v, NONE, given, Lengths())
    expected = plain.quantize(q, k, v, NONE, given, Lengths())
    for mine, theirs in zip((*found[:3], *found.scales), (*expected[:3], *expected.scales)):
        is_nan = theirs.isnan()
        assert torch.equal(mine.isnan(), is_nan)
        assert torch.equal(mine[~is_nan].float(), theirs[~is_nan].float())


@pytest.mark.parametrize("name", sample(LENGTHS, "gaps"))
def test_transposed_values(name, executed):
    rows, of = LENGTHS[name]
    v = tensors(rows)[2].to(FP8)
    found = transposed_by_kernels(v, of.seqused_k, of.cu_seqlens_k)
    assert_bits(found, plain.transposed_values(v, of.seqused_k, of.cu_seqlens_k))


@pytest.mark.slow
@pytest.mark.parametrize("headdim, width", [(33, 40), (64, 64), (100, 104)])
def test_copies_of_rows(headdim, width, monkeypatch):
    """Zeros up to the width, nothing past it."""
    x, y = torch.randn(2, 50, 3, headdim).half(), torch.full((2, 50, 3, width + 8), 7.0).half()
    with executing(monkeypatch, options=dict(num_warps=8)), use_interpreter():
        copy_rows.launch_of([(x, y[..., :width])]).start({}, x.device)
    assert torch.equal(y[..., :headdim], x)
    assert (y[..., headdim:width] == 0).all() and (y[..., width:] == 7).all()


FP8_CASES = {
    "causal": (([70], [140]), dict(causal=True), {}),
    "window": (([140], [140]), dict(window=(70, 10)), {}),
    "packed": (([160, 30], [160, 300]), dict(causal=True), dict(packed=True)),
    "mean of v": (([70], [140]), {}, dict(mean=3.0, v_mean=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FP8_CASES)
def test_products_in_fp8(name, monkeypatch):
    lengths, options, how = FP8_CASES[name]
    call = fp8.normal_call(*lengths, **how)
    with executing(monkeypatch), use_interpreter():
        out, lse = fp8.run(portable, call, **options)
    exact, exact_lse = fp8.reference(call, **options)
    assert fp8.error_of(out, exact) < 3e-2 and fp8.lse_error(lse, exact_lse) < 2e-3


# Signals


class Ranks:
    """The pads of some GPUs, and their launches of a barrier."""

    def __init__(self, ranks):
        self.pads = [torch.zeros(WORDS, dtype=torch.int64) for _ in range(ranks)]
        self.addresses = torch.tensor([x.data_ptr() for x in self.pads])
        self.failed = [torch.zeros(device_words.WORDS, dtype=INT32) for _ in range(ranks)]
        self.reports = [torch.zeros(1 + LANES, dtype=torch.int64) for _ in range(ranks)]

    def meeting(self, number, rank, fingerprint=7, limit=3000):
        tensors = self.addresses, self.failed[rank], self.reports[rank]
        return Meeting(*tensors, number, fingerprint, rank, ranks=len(self.pads), limit=limit)

    def launch(self, number, rank, fingerprint=7, waits=True, limit=3000, seed=None):
        kernel = execute(barrier_kernel, seed, options=dict(num_warps=1), reached=self.pads)
        meeting = self.meeting(number, rank, fingerprint, limit)
        constants = dict(WAITS=waits, TIMED=True, THREADS=LANES)
        return kernel.machine((1,), meeting, **constants)


@pytest.mark.parametrize("ranks", sample([1, 2, 8, 32], 8))
def test_ranks_meet(ranks):
    """Also where one comes late; a slot is used again by the barrier after the next."""
    it = Ranks(ranks)
    for number in range(1, 5):
        machines = [it.launch(number, rank, seed=number + rank) for rank in range(ranks)]
        run_together(machines)
        assert not any(x.any() for x in it.failed)
        slot = number % 2 * LANES
        for pad in it.pads:
            assert (pad[slot : slot + ranks] == (number << 32 | 7)).all()
            assert (pad[slot + ranks : slot + LANES] == 0).all()


def test_a_rank_that_does_not_come_and_one_that_calls_another():
    it = Ranks(3)
    run_together([it.launch(1, 0), it.launch(1, 1, fingerprint=9)])
    for rank in range(2):
        assert it.failed[rank].tolist() == [1, 0, 0, 0]
        assert it.reports[rank][:4].tolist() == [1, 1 << 32 | 7, 1 << 32 | 9, 0]
    it = Ranks(2)
    run_together([it.launch(2, 0), it.launch(2, 1, fingerprint=1, waits=False)])
    assert [x[0].item() for x in it.failed] == [1, 0]
    assert it.reports[0][:3].tolist() == [2, 2 << 32 | 7, 2 << 32 | 1]


@pytest.mark.parametrize("seed", sample(range(4), 1))
def test_ranks_meet_behind_their_copies(seed):
    """What each program has copied is there when the last one says that its rank has come."""
    it, programs = Ranks(2), 3
    table = Table([Rows(0, 64, 96, 0, 32, 128, rows=37, width=64)])
    entries = table.at(torch.device("cpu"))
    sources, targets = (torch.randint(99, (2, 2048), dtype=INT32) for _ in range(2))
    counts = dict(SOURCES=1, TARGETS=1, PROGRAMS=programs)
    for number in (1, 2):
        machines = []
        for rank in range(2):
            memory = sources[rank], targets[rank]
            reached = [*it.pads, *memory]
            kernel = execute(
                publish_kernel, seed + rank, options=dict(num_warps=4), reached=reached
            )
            addresses = [(x.data_ptr(),) for x in memory]
            tensors = entries, *addresses, table.tiles, it.meeting(number, rank)
            machines.append(kernel.machine((programs,), *tensors, **counts, TIMED=True))
        run_together(machines)
        assert not any(x.any() for x in it.failed)
    for source, target in zip(sources, targets):
        for row in range(37):
            assert torch.equal(target[8 + 32 * row :][:16], source[16 + 24 * row :][:16])


@pytest.mark.parametrize("dtype", sample([BF16, torch.float32, torch.float64], BF16))
@pytest.mark.parametrize("has_failed", [False, True])
def test_poison(dtype, has_failed):
    x, y = torch.zeros(5003, dtype=dtype), torch.zeros(70)
    report = torch.zeros(1 + LANES, dtype=torch.int64)
    words = torch.zeros(device_words.WORDS, dtype=INT32)
    words[device_words.FAILED], words[device_words.LATE] = has_failed, 5
    given = words, report, (x, y), (x.numel(), 67), 9, 2, 4, 4096
    execute(poison_kernel, options=dict(num_warps=4))[(4,)](*given)
    assert (y[67:] == 0).all()
    for z in (x, y[:67]):
        assert z.isnan().all() if has_failed else (z == 0).all()
    assert report[0].item() == (-(9 << 32 | 5) if has_failed else 0)


@pytest.mark.parametrize("page_size", sample([None, 16], 16))
@pytest.mark.parametrize("headdim", sample([64, 128], 64))
def test_queries_at_a_time_change_no_bit(headdim, page_size, monkeypatch):
    """C2: 1 to 4 queries of 4 heads are tiles of 16 rows, 5 to 8 of 32; however many pieces one
    program walks.
    """

    def start(launch, values, device):
        executed_on(launch, values)
        rows.append(launch.constants["TILE"].BLOCK_M)

    def attend(s):
        q = torch.cat(s.q)
        at = dict(seqused_k=s.lengths, cu_seqlens_q=s.starts, return_lse=True, split_size=64)
        if page_size is None:
            k, v = contiguous(s.k), contiguous(s.v)
        else:
            k, v, at["page_table"] = paged(s, page_size)
        with use_interpreter():
            return tilewise.attention(q, k, v, causal=True, backend="portable", **at)

    rows = []
    monkeypatch.setattr(Launch, "start", start)
    s = sequences([8], [150], (4, 1), (headdim, headdim), BF16)
    out, lse = attend(s)
    assert max(rows) == 32
    for a, b, lead in ((0, 1, 1), (7, 8, 2), (2, 6, 3)):
        rows.clear()
        monkeypatch.setattr(decode_launch, "lead_of", lambda *_, n=lead: n)
        n = 150 - 8 + b
        found = attend(type(s)([s.q[0][a:b]], [s.k[0][:n]], [s.v[0][:n]]))
        assert max(rows) == 16
        assert torch.equal(found[0], out[a:b]) and torch.equal(found[1], lse[:, a:b])


def test_what_lies_beside_a_sequence_changes_no_bit(monkeypatch):
    """C1: one launch or two, whose compiler lays tiles of this shape out differently."""

    def start(launch, values, device):
        executed_on(launch, values)
        launches.append(launch.kernel)

    def attend(s):
        k, v, table = paged(s, 1)
        scales = dict(k_descale=torch.tensor([0.5]), v_descale=torch.tensor([2.0]))
        table = table[:, : max(s.lengths)]
        at = dict(seqused_k=s.lengths, cu_seqlens_q=s.starts, page_table=table, split_size=192)
        with use_interpreter():
            return tilewise.attention(
                *(torch.cat(s.q), k.to(FP8), v.to(FP8)), **at, **scales, scale=0.7,
                causal=True, mask_mod=some, return_lse=True, backend="portable",
            )  # fmt: skip

    def some(batch, head, q_idx, k_idx):
        return pairs[q_idx % 3, k_idx]

    launches = []
    pairs = torch.rand(3, 915, generator=torch.Generator().manual_seed(0)) < 0.6
    monkeypatch.setattr(Launch, "start", start)
    s = sequences([1, 2], [915, 129], (4, 1), (16, 64), BF16)
    out, lse = attend(s)
    assert len(launches) == 2
    pairs = pairs[:, : 128 + 16].contiguous()  # read by more bytes at a time
    alone = attend(type(s)(*(x[1:] for x in (s.q, s.k, s.v))))
    assert len(launches) == 3
    assert torch.equal(alone[0], out[1:]) and torch.equal(alone[1], lse[:, 1:])
