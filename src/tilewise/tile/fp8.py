"""Elements of 8 bits and those of a product. e4m3 has a sign, 4 bits of exponent with bias 7, 3 of
the significand, no infinity, and NaN where all 7 bits are set.

By integer moves for GPUs without the conversion (sm_80): moved to the top of an fp32, exponent and
significand are the value times 2^-120, subnormals among them, and multiplying is exact.
"""

import triton
import triton.language as tl


@triton.jit
def dequantize(x, DTYPE: tl.constexpr):
    """A tile of e4m3 or int8, exact in 16-bit floats; uint8 is e4m3 by its bits."""
    if x.dtype == tl.uint8:
        return from_e4m3(x).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def from_e4m3(bits):
    """The values of bits, in fp32."""
    bits = bits.to(tl.uint32)
    magnitude = bits & 0x7F
    value = ((magnitude << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    return tl.where(magnitude == 0x7F, float("nan"), value * 1.329227995784916e36)  # 2^120


@triton.jit
def not_constant(number):
    """A number that no compiler knows, in grids of one axis. Triton makes a length of 1 a constant,
    and what is past it equal: of equal pairs in e4m3 ptxas 12.8 and 12.9 leave one undefined.
    """
    return number + tl.program_id(1)


@triton.jit
def unit_of(q_scale, k_scale):
    """What Q K^T of 8-bit numbers is multiplied with. Not 0, as of tensors that are all 0: a hidden
    score is -inf, and times 0 it would be NaN. Scores in so small a unit are below 2^-54. NaN below
    0: the largest score would be the smallest product.
    """
    unit = q_scale * k_scale
    small = tl.maximum(unit, 8.271806125530277e-25, tl.PropagateNan.ALL)  # 2^-80
    return tl.where(unit < 0.0, float("nan"), small)


@triton.jit
def quantize(x, scale, IS_INT: tl.constexpr):
    """x / scale, rounded to nearest even and saturated: int8, where NaN is 0, or the bits of e4m3
    as uint8.
    """
    x = tl.div_rn(x, scale)
    if IS_INT:
        x = tl.where(x != x, 0.0, tl.minimum(tl.maximum(x, -127.0), 127.0))
        # To a multiple of the last place of 1.5 * 2^23, which is 1
        return (x + 12582912.0 - 12582912.0).to(tl.int8)
    else:
        return to_e4m3(x)


@triton.jit
def to_e4m3(x):
    """The bits of fp32 values."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Half of the last place, or less by one where the digit before is even; then the bias
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 to a multiple of 2^-9, the last place of 2^14
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    return tl.where(x != x, 0x7F, sign | code).to(tl.uint8)
