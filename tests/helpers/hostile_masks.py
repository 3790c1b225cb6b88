"""Masks and score functions of integers that 32 bits do not hold, or that divide by 0."""

import random
from functools import partial

import torch

from tilewise.mods import mask, maximum, minimum, score, where

LEAST = -(2**63)


def hashes(n: int, seed: int = 0) -> torch.Tensor:
    """int64 near 2^62 and -2^62, of which many differ in their high or in their low half alone."""
    rng = random.Random(seed)
    near = [sign * 2**62 + far for sign in (-1, 1) for far in (-(2**32), -1, 0, 1, 2**32)]
    edges = [LEAST, LEAST + 1, 2**63 - 1, 2**31, -(2**31), -1, 0, 1, 2**53 + 1]
    return torch.tensor([rng.choice(near + edges) for _ in range(n)])


IDS = hashes(64)
WORDS = torch.tensor([-(2**31), 2**31 - 1, -1, 0, 1, 7, -7, 2**30] * 8, dtype=torch.int32)
SHIFTS = torch.tensor([-(2**31), -65, -1, 0, 1, 31, 32, 33, 62, 63, 64, 2**31 - 1] * 6).int()[:64]
BYTES = (torch.arange(64) * 37 % 256).to(torch.uint8)
HOSTILE = {
    "products": mask(lambda b, h, q, k: (q + 60_000) * (k + 50_000) % 7 < 3),
    "products of products": mask(lambda b, h, q, k: (q + 2**20) * (k + 2**20) * (q - k) % 9 < 4),
    "past 2^63": mask(lambda b, h, q, k: (q + 2**40) * (k + 2**40) * 3 < 0),
    "sums": mask(lambda b, h, q, k: q + k + (2**31 - 40) > 2**31),
    "differences": mask(lambda b, h, q, k: WORDS[q] - WORDS[k] > 0),
    "negated": mask(lambda b, h, q, k: -WORDS[q] > abs(WORDS[k])),
    "abs": mask(lambda b, h, q, k: abs(WORDS[q]) + 1 > 2**31),
    "by a constant": mask(lambda b, h, q, k: (WORDS[q] // -1 > 5) ^ (WORDS[k] % -1 == 0)),
    "// 0": mask(lambda b, h, q, k: (q - 9) // (k % 3) > 2),
    "% 0": mask(lambda b, h, q, k: (q - 9) % (k % 3) > 1),
    "// anything": mask(lambda b, h, q, k: (q - 9) // (k - 20) < 0),
    "% anything": mask(lambda b, h, q, k: (q - 9) % (k - 20) < 0),
    "0 // 0": mask(lambda b, h, q, k: (q - q) // (k - k) == 0),
    "a constant // anything": mask(lambda b, h, q, k: -7 // (k - 20) + q % 2 == 0),
    "a constant % anything": mask(lambda b, h, q, k: -7 % (k - 20) + q % 2 == -6),
    "words //": mask(lambda b, h, q, k: WORDS[q] // WORDS[k] > 0),
    "words %": mask(lambda b, h, q, k: WORDS[q] % WORDS[k] > 0),
    "<< 40": mask(lambda b, h, q, k: (q - 8) << 40 < k),
    "<< 63": mask(lambda b, h, q, k: (q << 63 < 0) ^ (k > 9)),
    "<< anything": mask(lambda b, h, q, k: (q - 8) << (k - 4) < 99),
    "<< words": mask(lambda b, h, q, k: (q - 8) << SHIFTS[k] < 99),
    "<< of a constant": mask(lambda b, h, q, k: 3 << (k * 3 - 9) > q),
    ">> anything": mask(lambda b, h, q, k: (q - 8) >> (k - 4) == -1),
    ">> words": mask(lambda b, h, q, k: (q - 8) >> SHIFTS[k] == -1),
    ">> 63": mask(lambda b, h, q, k: (q - k) >> 63 == -1),
    "bits": mask(lambda b, h, q, k: (WORDS[q] | 2**40) ^ (WORDS[k] & -(2**35)) > 2**40),
    "not": mask(lambda b, h, q, k: ~(q * 2**33) < -k),
    "chosen": mask(lambda b, h, q, k: where(q > k, 2**40, WORDS[k]) > 9),
    "smaller": mask(lambda b, h, q, k: minimum(q * 2**40, maximum(k, 2**33)) > 2**33),
    "int64 ==": mask(lambda b, h, q, k: IDS[q] == IDS[k]),
    "int64 <": mask(lambda b, h, q, k: IDS[q] < IDS[k]),
    "int64 sums": mask(lambda b, h, q, k: IDS[q] + IDS[k] > 5),
    "int64 products": mask(lambda b, h, q, k: IDS[q] * IDS[k] > 0),
    "int64 //": mask(lambda b, h, q, k: IDS[q] // IDS[k] > 0),
    "int64 %": mask(lambda b, h, q, k: IDS[q] % IDS[k] > 0),
    "int64 // -1": mask(lambda b, h, q, k: (IDS[q] // -1 > 0) ^ (IDS[k] % -1 == 0)),
    "int64 // a byte": mask(lambda b, h, q, k: IDS[q] // BYTES[k] > 0),
    "int64 <<": mask(lambda b, h, q, k: IDS[q] << SHIFTS[k] > 0),
    "int64 >>": mask(lambda b, h, q, k: IDS[q] >> SHIFTS[k] > 0),
    "int64 abs": mask(lambda b, h, q, k: abs(IDS[q]) > -IDS[k]),
    "int64 as an index": mask(lambda b, h, q, k: BYTES[IDS[q] % 64] == BYTES[IDS[k] % 64]),
    "a pair of int64": mask(
        partial(lambda x, b, h, q, k: x[q, k] == 2**62 + 1, hashes(2048).view(32, 64))
    ),
    "int64 as floats": score(lambda s, b, h, q, k: s + where(IDS[q] * 1e-18 > k, 1.0, 0.0)),
    "bytes": mask(lambda b, h, q, k: BYTES[q] - BYTES[k] > 100),
    "int8": mask(partial(lambda x, b, h, q, k: x[q] * 2**25 > x[k], BYTES.to(torch.int8))),
    "int16": mask(partial(lambda x, b, h, q, k: x[q] * x[k] > 9, WORDS.to(torch.int16))),
    "uint16": mask(partial(lambda x, b, h, q, k: x[q] * x[k] > 9, WORDS.to(torch.uint16))),
    "uint32": mask(partial(lambda x, b, h, q, k: x[q] > x[k] + 5, WORDS.to(torch.uint32))),
    "ints as floats": mask(lambda b, h, q, k: q + 2**24 + k < 2.0**24 + 9),
    "equal as floats": mask(lambda b, h, q, k: q + 2**24 == (k + 2**24) * 1.0),
    "small floats": score(lambda s, b, h, q, k: where(s * 1e-38 < 1e-39 * k, s, 1.0)),
}
