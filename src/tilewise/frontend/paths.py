"""What some calls of `attention` need and a plain one does not, so that it imports none of it: FP8
products and functions of scores. `frontend/__init__` puts it here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArgumentError
from ..kernels.common.quantized import GivenScales
from ..mods.flat import FlatMods

if TYPE_CHECKING:
    from ..mods.block_mask import BlockMask

Tensor = torch.Tensor
DESCALES = "q_descale", "k_descale", "v_descale"
# As q they are for FP8 products, or refused by name
ONE_BYTE = frozenset(
    {
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.int8, torch.uint8),
    }
)


def check_alone(inputs: tuple[Any, Any, Any], scales: GivenScales) -> None:
    """Nothing is passed with a `Quantized` that it holds itself."""
    if not (inputs[1] is inputs[2] is None):
        raise ArgumentError(
            "k and v with a Quantized, which holds all three: pass it in place of q, and None for "
            "k and v"
        )
    for name, x in zip(DESCALES, scales):
        if x is not None:
            raise ArgumentError(
                f"{name} with a Quantized, which holds its scales: leave it out, or pass it to "
                "tilewise.quantize in scales="
            )


attend_fp8: Callable[..., tuple[Tensor, Tensor]]
modifiers_of: Callable[[Any, Any, BlockMask | None, tuple[int, int, int, int]], FlatMods]
check_block_mask: Callable[..., BlockMask | None]


def traced(name: str, /, **arguments: Any) -> Any:
    """Calls a node in what Dynamo traces, once it was told of nodes: torch 2.11 asks only once."""
    from .in_graph import nodes

    return nodes[name](**arguments)
