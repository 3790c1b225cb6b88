"""V^T that the FP8 forward for Hopper makes itself, beside its matmuls: in the emulator."""

from types import SimpleNamespace

import pytest
import torch
from helpers import fp8
from helpers.tiers import every, sample

from tilewise.kernels import hopper
from tilewise.kernels.hopper import tile_counter
from tilewise.kernels.hopper.fwd import fp8_launch, transpose
from tilewise.problem import Scalars
from tilewise.testing import use_emulator
from tilewise.testing.inputs import poisoned

BF16 = torch.bfloat16
CASES = {
    "64": (([140, 140], [300, 300], fp8.Heads(4, 2, 64, 64)), {}, {}),
    "128 causal": (([300], [300], fp8.Heads(2, 2, 128, 128)), dict(causal=True), {}),
    "padded": (([40, 40], [130, 130], fp8.Heads(2, 1, 64, 80)), {}, {}),
    "one block": (([1], [16], fp8.Heads(1, 1, 64, 64)), {}, {}),
    "unused keys": (
        *(([200, 200], [129, 0], fp8.Heads(2, 1, 128, 128)), dict(causal=True)),
        dict(spare=70),
    ),
    "window": (([290], [290], fp8.Heads(2, 2, 64, 64)), dict(window=(100, 20)), {}),
    "softcap": (([140], [300], fp8.Heads(2, 2, 64, 64)), dict(softcap=3.0), {}),
    "few queries": (([3, 3], [280, 280], fp8.Heads(8, 2, 64, 64)), dict(causal=True), {}),
    "heads in groups": (([260], [260], fp8.Heads(5, 5, 64, 64)), dict(causal=True), {}),
}


def forwards(call, **options):
    """Of V, and of V^T."""
    assert fp8_launch.fits_values(fp8.problem_of(call, Scalars(1.0, 0.0, -1, -1)), call.v, BF16)
    with use_emulator():
        beside = fp8.forward_of(hopper, call, out_dtype=BF16, transposes=True, **options)
        return beside, fp8.forward_of(hopper, call, out_dtype=BF16, **options)


def of_values(call):
    return call.quantized._replace(v_t=call.v)


@pytest.mark.parametrize("name", every(3, CASES))
@pytest.mark.parametrize("seed", sample(range(9), 0))
def test_bits_are_those_of_a_pass_before(name, seed):
    lengths, options, how = CASES[name]
    call = fp8.normal_call(*lengths, seed=seed, **how)
    beside, behind = forwards(call, **options)
    with use_emulator(seed), poisoned():
        found = beside(of_values(call), call.extras)
        expected = behind(call.quantized, call.extras)
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])


def test_words_are_0_again_also_where_the_counter_of_tiles_is_among_them(monkeypatch):
    """As in a captured graph, whose launches share counters; the second launch would hang."""
    words = torch.zeros(128, dtype=torch.int32)
    monkeypatch.setattr(tile_counter, "counters", lambda *of, count: words)
    call = fp8.normal_call([300], [300], fp8.Heads(3, 3, 64, 64))
    attend, expected = forwards(call, causal=True)
    with use_emulator(1):
        first, again = (attend(of_values(call), call.extras)[0] for _ in range(2))
        assert not words.any()
        assert first.equal(again) and first.equal(expected(call.quantized, call.extras)[0])


def test_waits_for_the_block_that_it_reads(monkeypatch):
    """Where a load warp does not wait, it reads what is not there yet."""
    monkeypatch.setitem(fp8_launch.ASM, transpose.AWAIT, lambda words, level, known, levels: levels)
    call = fp8.normal_call([140], [300], fp8.Heads(2, 2, 64, 64))
    beside, behind = forwards(call)
    differs = []
    for seed in range(4):
        with use_emulator(seed), poisoned():
            found = beside(of_values(call), call.extras)[0]
            differs.append(not found.equal(behind(call.quantized, call.extras)[0]))
    assert any(differs)


REFUSED = {
    "packed": (dict(packed=True), 64),
    "256 columns": ({}, 256),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_to_a_pass_before(name):
    how, headdim = REFUSED[name]
    call = fp8.normal_call([40], [60], fp8.Heads(2, 2, 64, headdim), **how)
    assert not fp8_launch.fits_values(fp8.problem_of(call, Scalars(1.0, 0.0, -1, -1)), call.v, BF16)


def test_values_that_tma_cannot_read_are_left_to_a_pass_before():
    call = fp8.normal_call([40], [60], fp8.Heads(2, 2, 64, 64))
    problem = fp8.problem_of(call, Scalars(1.0, 0.0, -1, -1))
    bits = torch.zeros(1, 60, 2, 72, dtype=torch.uint8).view(fp8.FP8)
    assert fp8_launch.fits_values(problem, call.v, BF16)
    assert not fp8_launch.fits_values(problem, bits[..., :64], BF16)  # rows at multiples of 8 bytes
    one_head = call.v[:, :, :1].expand_as(call.v)
    assert not fp8_launch.fits_values(problem, one_head, BF16)
    by_column = call.v.transpose(1, 3).contiguous().transpose(1, 3)
    assert not fp8_launch.fits_values(problem, by_column, BF16)


@pytest.mark.parametrize(
    "batch, seqlen_q, nheads, nheads_k, expected",
    [
        (32, 512, 16, 16, True),
        (1, 16384, 16, 16, True),
        (8, 128, 16, 16, False),  # one tile reads each block
        (1, 512, 16, 16, False),  # 64 tiles for 132 SMs
        (8, 128, 32, 4, True),  # 8 heads that share keys
    ],
)
def test_where_the_kernel_transposes(batch, seqlen_q, nheads, nheads_k, expected, monkeypatch):
    monkeypatch.setattr(fp8_launch, "num_sms", lambda device: 132)
    call = fp8.normal_call([40], [60], fp8.Heads(nheads, nheads_k, 64, 64))
    problem = fp8.problem_of(call, Scalars(1.0, 0.0, -1, -1))
    q = SimpleNamespace(is_cuda=True, shape=(batch, seqlen_q, nheads, 64), device="cuda")
    assert fp8_launch.takes_values(problem, q, call.v, BF16) == expected
    assert hopper.takes_values(problem, call.quantized.q, call.v, BF16)  # in the emulator


@pytest.mark.parametrize("queries, width", [(32, 2), (512, 1)])
def test_as_many_heads_are_interleaved_as_tiles_are(queries, width):
    """Of tiles of one head, and of those that its query heads share."""
    call = fp8.normal_call([queries], [700], fp8.Heads(8, 2, 64, 64))
    problem = fp8.problem_of(call, Scalars(1.0, 0.0, -1, 0))
    plan = fp8_launch.plan_for(problem, call.quantized.q, call.extras, BF16, True)
    assert (plan.tile.PACK > 1) == (width == 2)
    l2_group = 2 if width == 2 else 4
    assert fp8_launch.transposing_of(call.quantized.v_t, plan, l2_group).width == width


def test_outputs_of_32_bits_leave_no_room_for_blocks_of_128_columns():
    for headdim, fits in ((64, True), (128, False)):
        call = fp8.normal_call([40], [60], fp8.Heads(2, 2, headdim, headdim))
        problem = fp8.problem_of(call, Scalars(1.0, 0.0, -1, -1))
        assert fp8_launch.fits_values(problem, call.v, torch.float32) == fits
