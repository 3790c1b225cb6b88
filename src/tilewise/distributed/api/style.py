"""Context parallelism as a plan of `parallelize_module`, in the shape of torch's own styles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ...errors import ArgumentError
from ...ops.context_parallel import contexts
from ..layouts.group import checked, global_ranks
from ..layouts.layout import Layout
from .attention import check_layout
from .context import Attention


class ContextParallel(ParallelStyle):
    """A `ParallelStyle` that enters `context_parallel` around a module's forward.

    Example::

        layout = td.zigzag(seqlen, mesh["cp"])
        parallelize_module(model, mesh["cp"], {"layers.*.attention": td.ContextParallel(layout)})

    The module is an attention or a whole model. Its inputs are this rank's rows, and its weights
    stay whole. Recomputation by a checkpoint around the module is inside, too. `layout` may be a
    function that returns the layout for each forward, if lengths differ.
    """

    def __init__(
        self,
        layout: Layout | Callable[[], Layout],
        *,
        method: str | None = None,
        bitwise: bool = True,
    ) -> None:
        super().__init__()
        self.layout, self.method, self.bitwise = layout, method, bitwise

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        ranks = global_ranks(checked(device_mesh))
        if isinstance(self.layout, Layout):
            _check_ranks(self.layout, ranks)
        entered: list[Attention] = []

        def enter(module: torch.nn.Module, args: Any) -> None:
            layout = check_layout(self.layout() if callable(self.layout) else self.layout)
            _check_ranks(layout, ranks)
            entered.append(Attention(layout, self.method, bitwise=self.bitwise))
            contexts.append(entered[-1])

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            if entered and contexts[-1] is entered[-1]:  # not if `enter` raised
                contexts.pop()
                entered.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


def _check_ranks(layout: Layout, ranks: list[int]) -> None:
    layout_ranks = global_ranks(layout.group)
    if layout_ranks != ranks:
        raise ArgumentError(
            f"the mesh has ranks {ranks} and the layout's are {layout_ranks}: make the layout with "
            "the mesh that parallelize_module is given"
        )
