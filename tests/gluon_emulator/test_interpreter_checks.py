"""The interpreter refuses what a GPU would answer with garbage."""

import pytest
import torch
import triton
import triton.language as tl

from tilewise.testing import interpret


@triton.jit
def touch_kernel(x, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = offs < n
    if KIND == "load":
        tl.load(x + offs, mask=keep)
    elif KIND == "store":
        tl.store(x + offs, 1.0, mask=keep)
    elif KIND == "atomic":
        tl.atomic_add(x + offs, 1.0, mask=keep)
    elif KIND == "negative load":
        tl.load(x - 1 - offs, mask=keep)
    elif KIND == "unmasked load":
        tl.load(x + offs)


@pytest.mark.parametrize("kind", ["load", "store", "atomic"])
def test_an_address_past_the_end_is_named(kind):
    x = torch.zeros(12)
    interpret(touch_kernel)[(2,)](x, 12, KIND=kind, BLOCK=8)
    with pytest.raises(IndexError, match=rf"{kind} in program \(1, 0, 0\): 1 of 5 .* end .* of x"):
        interpret(touch_kernel)[(2,)](x, 13, KIND=kind, BLOCK=8)


def test_addresses_before_the_start_and_unmasked_ones():
    x = torch.zeros(12)
    with pytest.raises(IndexError, match="load .*: 3 of 3 .* before the storage of x"):
        interpret(touch_kernel)[(1,)](x, 3, KIND="negative load", BLOCK=8)
    with pytest.raises(IndexError, match="load .*: 4 of 8"):
        interpret(touch_kernel)[(2,)](x, 0, KIND="unmasked load", BLOCK=8)


@triton.jit
def compare_and_swap_kernel(x, at):
    tl.atomic_cas(x + at, 0, 7)


def test_compare_and_swap_is_checked():
    x = torch.zeros(4, dtype=torch.int32)
    interpret(compare_and_swap_kernel)[(1,)](x, 3)
    assert x.tolist() == [0, 0, 0, 7]
    with pytest.raises(IndexError, match="atomic"):
        interpret(compare_and_swap_kernel)[(1,)](x, 4)


def test_an_element_that_begins_inside_but_ends_outside_is_caught():
    bytes_ = torch.zeros(10, dtype=torch.uint8)
    x = torch.empty(0).set_(bytes_.untyped_storage(), 0, (2,))
    interpret(touch_kernel)[(1,)](x, 2, KIND="load", BLOCK=4)
    with pytest.raises(IndexError, match="1 of 3"):
        interpret(touch_kernel)[(1,)](x, 3, KIND="load", BLOCK=4)


@triton.jit
def descriptor_kernel(desc, out, N: tl.constexpr):
    offs = tl.arange(0, N)
    tile = desc.load([0, N])
    tl.store(out + offs[:, None] * N + offs[None, :], tile)


def test_host_descriptors_pad_with_zeros():
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = torch.randn(4, 12)
    out = torch.empty(8, 8)
    interpret(descriptor_kernel)[(1,)](TensorDescriptor.from_tensor(x, [8, 8]), out, N=8)
    expected = torch.zeros(8, 8)
    expected[:4, :4] = x[:, 8:]
    assert torch.equal(out, expected)


@triton.jit
def overflow_kernel(out, n, stride, WIDE: tl.constexpr):
    for i in range(n, n + 1):
        index = i.to(tl.int64) if WIDE else i
        tl.store(out, index * stride)


def test_int32_overflow_raises_and_int64_does_not():
    out = torch.zeros(1, dtype=torch.int64)
    interpret(overflow_kernel)[(1,)](out, 2**20, 2**12, WIDE=True)
    assert out.item() == 2**32
    with pytest.raises(OverflowError, match="mul of int32 values"):
        interpret(overflow_kernel)[(1,)](out, 2**20, 2**12, WIDE=False)


def test_unchecked_integers_wrap():
    out = torch.zeros(1, dtype=torch.int64)
    interpret(overflow_kernel, check=False)[(1,)](out, 2**20 + 1, 2**12, WIDE=False)
    assert out.item() == 2**12


@triton.jit
def condition_kernel(x, HOW: tl.constexpr):
    offs = tl.arange(0, 4)
    if HOW == "and":
        keep = (offs > 0) and (offs < 3)
    elif HOW == "chain":
        keep = 0 < offs < 3
    else:
        keep = (offs > 0) & (offs < 3)
    tl.store(x + offs, 1.0, mask=keep)


def test_a_block_is_no_condition():
    x = torch.zeros(4)
    interpret(condition_kernel)[(1,)](x, HOW="&")
    assert x.tolist() == [0, 1, 1, 0]
    with pytest.raises(TypeError, match="write `&`"):
        interpret(condition_kernel)[(1,)](x, HOW="and")
    with pytest.raises(TypeError, match="write `&`"):
        interpret(condition_kernel)[(1,)](x, HOW="chain")
