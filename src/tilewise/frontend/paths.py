"""What some calls of `attention` need and a plain one does not, so that it imports none of it: FP8
products and functions of scores. `frontend/__init__` puts it here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import OURS, Words
from ..kernels.common.quantized import Quantized
from ..mods.flat import FlatMods
from ..problem import Extras
from .scalars import Window

if TYPE_CHECKING:
    from ..mods.block_mask import BlockMask

Tensor = torch.Tensor
# As q they are for FP8 products, or refused by name
ONE_BYTE = frozenset(
    {
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.int8, torch.uint8),
    }
)


class Fp8Arguments(NamedTuple):
    """The arguments of a call with FP8 products, but for q, k and v."""

    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    extras: Extras  # without a bias and what functions captured
    causal: bool | str
    scale: float | None
    window: Window
    softcap: float | None
    max_seqlen_q: Any = None
    layout: str = "bshd"
    out_dtype: torch.dtype | None = None
    backward: str | None = None
    backend: str | None = None
    words: Words = OURS


def has_fp8(q: Any) -> bool:
    """Whether a call is one with FP8 products, by its q."""
    return type(q) is Quantized or getattr(q, "dtype", None) in ONE_BYTE


attend_fp8: Callable[[Any, Any, Any, Fp8Arguments, bool], tuple[Tensor, Tensor]]
modifiers_of: Callable[[Any, Any, BlockMask | None, tuple[int, int, int, int]], FlatMods]
check_block_mask: Callable[[Any, tuple[int, int, int, int], bool, bool], BlockMask | None]
