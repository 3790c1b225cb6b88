"""Maxima of rows by integers give the m that floats give: rows of negative scores, in all blocks or
in some, zeros of both signs, infinity. In 16 bits and in FP8.
"""

import pytest
import torch
from helpers import fp8
from helpers.row_max import LAGS, made_rows, next_max_kernel, run_both
from helpers.tiers import sample_rows
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gluon_emulator.hopper import emulate
from tilewise import attention, attention_reference
from tilewise.kernels import hopper
from tilewise.kernels.hopper import row_max
from tilewise.kernels.hopper.fwd import fp8_halves, fp8_mma, mma, scores
from tilewise.testing import use_emulator
from tilewise.testing.inputs import poisoned
from tilewise.testing.tolerance import assert_within
from tilewise.tile.softmax import running_max

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("n", [64, 128])
def test_the_same_m(n, lag, seed):
    """Flags are of warps, and m of every row is that of floats."""
    s, m = made_rows(lag, seed, n)
    launch = emulate(next_max_kernel, asm=row_max.ASM)[(1,)]
    flags, found, expected = run_both(launch, s, m, 0.25, lag)
    assert torch.equal(found, expected)
    by_warp = (m >= -lag).view(4, 16).all(1)
    assert torch.equal(flags.view(4, 16), by_warp[:, None].int().expand(4, 16))
    assert by_warp.any() != (seed % 4 == 3)


def test_flags_decide():
    """Where all are set, some rows have another m: the rows above need floats."""
    always = dict.fromkeys(map(row_max.vote_of, LAGS), lambda m: torch.ones(64, dtype=torch.int32))
    launch = emulate(next_max_kernel, asm=row_max.ASM | always)[(1,)]
    for lag in LAGS:
        _, found, expected = run_both(launch, *made_rows(lag, 3), 0.25, lag)
        assert not torch.equal(found, expected)


# Scores of three blocks of 128 keys along the sequence, those of even keys; odd ones are DROP lower
LEVELS = {
    "negative": (-90.0, -60.0, -20.0),
    "far": (-120.0, -70.0, -20.0),
    "falling": (-20.0, -60.0, -120.0),
    "past zero": (-40.0, -3.0, 30.0),
    "from zero": (0.0, -50.0, 9.0),
    "within the lag": (-7.0, -1.0, 0.5),
    "random": (0.0, 0.0, 0.0),
}
SEQLEN = 384
DROP = 60.0
EVEN = "within the lag", "random"  # without a drop
LSE_LIMIT = 2e-3  # and as a part of it, where the tensor cores sum large scores in 14 bits
CASES = [
    (name, headdim, causal, dtype)
    for name in LEVELS
    for headdim in (64, 128, 256)
    for causal in (False, True)
    for dtype in (torch.bfloat16, torch.float16)
]
FAST = (
    ("negative", 128, False, torch.float16),
    ("far", 128, False, torch.bfloat16),
    ("past zero", 128, True, torch.bfloat16),
    ("falling", 128, True, torch.float16),
    ("from zero", 128, False, torch.bfloat16),
    ("within the lag", 128, True, torch.bfloat16),
)


def made_inputs(name, headdim, norm=1.0):
    """fp32 q, k and v, in whose product times `norm` the blocks of keys have these levels. Of the
    last 32 columns one counts: in 8 bits all 32 would be rounded as a product with the level is.
    """
    draw = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, SEQLEN, 1, headdim, generator=draw) for _ in range(3))
    q *= 0.1 / norm
    q[..., -32:] = 0.0
    q[..., -1] = 1.0
    level = torch.tensor(LEVELS[name]).repeat_interleave(SEQLEN // 3)
    level[1::2] -= 0.0 if name in EVEN else DROP
    k[..., -1] = level[:, None] / norm
    return q, k, v


@gluon.jit
def by_floats(s, m_i, scale, by_integers):
    return running_max(s, m_i, scale)


@gluon.jit
def always_suffice(m_i, LAG: gl.constexpr):
    return gl.full(m_i.shape, 1, gl.int32)


def attend(q, k, v, causal):
    with use_emulator(), torch.no_grad():
        return attention(q, k, v, backend="hopper", return_lse=True, causal=causal, scale=1.0)


@pytest.mark.parametrize("name, headdim, causal, dtype", sample_rows(CASES, *FAST))
def test_levels(name, headdim, causal, dtype, monkeypatch):
    """Against fp64, and the bits of a kernel that takes floats. Keys are read downwards without a
    mask, too, so blocks rise in one of two directions.
    """
    q, k, v = (x.to(dtype) for x in made_inputs(name, headdim))
    for keys in (k, k.flip(1)):
        found = attend(q, keys, v, causal)
        options = dict(causal=causal, scale=1.0, return_lse=True)
        exact = attention_reference(*(x.double() for x in (q, keys, v)), **options)
        plain = attention_reference(q, keys, v, upcast=False, **options)
        for what, x, y, z in zip(("out", "lse"), found, exact, plain):
            assert_within(x, y, z.to(x.dtype), what)
        with monkeypatch.context() as patch:
            patch.setattr(scores, "running_max_of", by_floats)
            for x, y in zip(found, attend(q, keys, v, causal)):
                assert torch.equal(x, y)


FP8_CASES = [
    (name, headdim, causal, mean)
    for name in LEVELS
    for headdim in (64, 128, 256)  # of 256 in one level where there is a mean of V, or in halves
    for causal in (False, True)
    for mean in (False, True)
]
FP8_FAST = (
    ("far", 256, False, True),
    ("past zero", 128, True, False),
    ("random", 64, True, False),
)


def attend_fp8(call, causal):
    with use_emulator(), poisoned():
        return fp8.run(hopper, call, causal=causal)


@pytest.mark.parametrize("name, headdim, causal, mean", sample_rows(FP8_CASES, *FP8_FAST))
def test_levels_in_fp8(name, headdim, causal, mean, monkeypatch):
    q, k, v = made_inputs(name, headdim, headdim**-0.5)
    for keys in (k, k.flip(1)):
        call = fp8.call_of(zip(q, keys, v), v_mean=mean)
        found, exact = attend_fp8(call, causal), fp8.reference(call, causal=causal)
        assert fp8.error_of(found[0], exact[0]) < 3e-2
        assert fp8.lse_error(found[1], exact[1]) < LSE_LIMIT * (1 + exact[1].abs().max())
        with monkeypatch.context() as patch:
            patch.setattr(scores, "running_max_of", by_floats)
            for x, y in zip(found, attend_fp8(call, causal)):
                assert torch.equal(x, y)


def test_levels_need_flags(monkeypatch):
    """Integers in all warps: P of blocks that rise leaves fp16, and e4m3."""
    for module in (mma, fp8_mma, fp8_halves):
        monkeypatch.setattr(module, "integers_suffice", always_suffice)
    q, k, v = (x.half() for x in made_inputs("negative", 128))
    exact = attention_reference(*(x.double() for x in (q, k.flip(1), v)), scale=1.0)
    assert not attend(q, k.flip(1), v, False)[0].isfinite().all() and exact.isfinite().all()
    for headdim in (128, 256):
        q, k, v = made_inputs("negative", headdim, headdim**-0.5)
        call = fp8.call_of(zip(q, k.flip(1), v))
        assert not fp8.error_of(attend_fp8(call, False)[0], fp8.reference(call)[0]) < 0.1
