"""Calls of quantising kernels, in the interpreter, and what they are held to."""

import torch

from tilewise.kernels.common.quantized import Lengths
from tilewise.kernels.cpu import quantize as plain
from tilewise.kernels.cpu.quantize import Steps
from tilewise.kernels.portable import quantize as kernels
from tilewise.testing import use_interpreter

BF16, INT32 = torch.bfloat16, torch.int32
ALL, NONE = Steps(True, True, True), Steps(False, False, False)
NO_SCALES = (None, None, None)


def ints(*values):
    return torch.tensor(values, dtype=INT32)


LENGTHS = {
    "batch": ((2, 150), Lengths()),
    "used": ((2, 150), Lengths(seqused_k=ints(131, 0))),
    "short": ((3, 5), Lengths(seqused_k=ints(5, 3, 1))),
    "packed": ((1, 300), Lengths(*[ints(0, 7, 7, 200, 300)] * 2)),
    "gaps": ((1, 300), Lengths(*[ints(0, 130, 290)] * 2, ints(127, 90), ints(120, 129))),
}


def tensors(rows, heads=(4, 2), headdims=(64, 48), dtype=BF16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads[0], headdims[0]), (heads[1], headdims[0]), (heads[1], headdims[1])
    q, k, v = (torch.randn(*rows, *shape, generator=generator) for shape in shapes)
    k[..., 3] += 5.0
    return q.to(dtype), k.to(dtype), (v + 1.0).to(dtype)


def quantized(q, k, v, steps, scales, of, rotary=None):
    return kernels.prepare_quantize(steps)(q, k, v, scales, of, rotary)


def transposed_by_kernels(v, seqused_k, cu_seqlens_k):
    return kernels.prepare_transposed()(v, seqused_k, cu_seqlens_k)


def by_kernels(*args):
    with use_interpreter():
        return quantized(*args)


def assert_codes(found, expected):
    """Equal, but for values next to the middle of two codes, which sums round one way or other."""
    found, expected = found.float(), expected.float()
    assert (found != expected).sum() <= 5e-3 * found.numel()
    near = expected.abs() / 8 + 2.0**-9
    assert (found - expected).abs().le(near).all()


def assert_same(found, expected, of):
    for mine, theirs in zip((*found.scales, *found[4:6]), (*expected.scales, *expected[4:6])):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert (found.v_drift is None) == (expected.v_drift is None)
    if expected.v_drift is not None:  # sums that go up and down again
        torch.testing.assert_close(found.v_drift, expected.v_drift, rtol=1e-4, atol=1e-4)
    for side, mine, theirs in zip(("q", "k"), found[:2], expected[:2]):
        starts, used = (getattr(of, f"{name}_{side}") for name in ("cu_seqlens", "seqused"))
        rows = plain.rows_of(mine, starts, used)
        if rows.sequence is not None:  # rows of no sequence are 0 here
            inside = torch.zeros(mine.shape[1], dtype=torch.bool)
            inside[starts[0] : starts[-1]] = True
            assert (mine.float()[:, ~inside] == 0).all()
            mine, theirs = mine[:, inside], theirs[:, inside]
        assert mine.shape == theirs.shape
        assert_codes(mine, theirs)
    assert found.v_t.shape == expected.v_t.shape and found.v_t.is_contiguous()
    assert_codes(found.v_t, expected.v_t)
