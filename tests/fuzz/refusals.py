"""What a backend may refuse, as its documentation says it: a fuzzer that takes each refusal for an
answer would learn nothing where all is refused.
"""

from __future__ import annotations

import torch

from .cases import Case

Tensor = torch.Tensor


def may_refuse(case: Case, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the case's backend may say that it does not serve it."""
    look, backend = case.look, case.lane.backend
    widest = max(look.headdim, look.headdim_v)
    if look.learned and look.deterministic and case.lane.device != "cpu":
        return True
    if backend == "portable":
        return widest > 512 or look.dtype == "float64"
    is_copied = look.headdim % 8 != 0 or look.headdim_v % 8 != 0
    if backend == "hopper":
        return (
            look.dtype not in ("float16", "bfloat16")
            or widest > 256
            or (look.block is not None and (look.deterministic or not _fits(look.block, widest)))
            or not (is_copied or all(_is_on_16_bytes(x) for x in (q, k, v)))
        )
    return False


def _fits(block: tuple[int, int], widest: int) -> bool:
    """Blocks made up of whole tiles."""
    return block[0] == 128 and block[1] % (128 if widest <= 128 else 64) == 0


def _is_on_16_bytes(x: Tensor) -> bool:
    """Rows, heads and batches begin at multiples of 16 bytes, and none is expanded."""
    steps = [s * x.itemsize for n, s in zip(x.shape[:-1], x.stride()) if n > 1]
    return x.data_ptr() % 16 == 0 and all(s > 0 and s % 16 == 0 for s in steps)
