"""Number formats by their bits: bf16, e4m3, e5m2, which numpy lacks, and flushing of subnormals."""

import numpy as np

SMALLEST_NORMAL = np.float32(2.0**-126)


def flush(x: np.ndarray) -> np.ndarray:
    """`.ftz`: subnormals become zeros of their sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def bf16_from_f32(x: np.ndarray) -> np.ndarray:
    """Bits, rounded to nearest even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.where(np.isnan(x), 0x7FFF, rounded >> np.uint32(16)).astype(np.uint16)


def f32_from_bf16(bits: np.ndarray) -> np.ndarray:
    """Exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class Float8:
    """A format of 8 bits: the values of its codes, and rounding to them."""

    def __init__(self, exponent_bits: int, has_infinity: bool) -> None:
        mantissa_bits = 7 - exponent_bits
        bias = 2 ** (exponent_bits - 1) - 1
        code = np.arange(128)
        exponent, fraction = code >> mantissa_bits, (code % 2**mantissa_bits) / 2.0**mantissa_bits
        normal = np.ldexp(1.0 + fraction, exponent - bias)
        values = np.where(exponent > 0, normal, np.ldexp(fraction, 1 - bias))
        if has_infinity:
            top = exponent == 2**exponent_bits - 1
            values = np.where(top, np.where(fraction == 0, np.inf, np.nan), values)
        else:
            values[127] = np.nan
        self.values = np.concatenate([values, -values]).astype(np.float32)
        self.finite = values[np.isfinite(values)]
        middles = (self.finite[1:] + self.finite[:-1]) / 2
        # Of a middle the even code is nearest
        self.middles = [np.nextafter(m, 0.0) if i % 2 else m for i, m in enumerate(middles)]

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """fp32 of codes."""
        return self.values[codes]

    def encode_satfinite(self, x: np.ndarray) -> np.ndarray:
        """Codes, rounded to nearest even; what is too large becomes the largest finite one."""
        wide = np.abs(x.astype(np.float64))
        code = np.searchsorted(self.middles, wide).astype(np.uint8)
        code = np.where(np.isnan(x), np.uint8(0x7F), code)
        sign = np.where(np.isnan(x), 0, np.signbit(x)).astype(np.uint8)
        return code | (sign << np.uint8(7))


E4M3, E5M2 = Float8(4, False), Float8(5, True)


def halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high half of packed pairs, of 32 bits or of 16."""
    half = np.uint16 if words.dtype.itemsize == 4 else np.uint8
    pairs = np.ascontiguousarray(words).view(half).reshape(*words.shape, 2)
    return pairs[..., 0], pairs[..., 1]


def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The opposite."""
    whole = {1: np.uint16, 2: np.uint32}[low.dtype.itemsize]
    return np.stack(np.broadcast_arrays(low, high), -1).view(whole)[..., 0]
