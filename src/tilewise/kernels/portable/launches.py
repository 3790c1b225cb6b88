"""Launches of small kernels, of a fixed number of programs, past Triton's front end."""

from __future__ import annotations

from typing import Any

import torch

from ...emulation import interpret, interpreter_is_on
from ..common.building import first_launch, on_device
from ..common.direct import past_triton
from ..common.relaunch import may_relaunch

Tensor = torch.Tensor


class Launches:
    """The launches on one device. On the CPU the interpreter runs them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.launchers: dict[Any, Any] = {}

    def __call__(
        self,
        kernel: Any,
        programs: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[int, ...],
        constants: dict[str, Any],
        key: Any,
    ) -> None:
        """Launches a kernel of tensors, numbers and constants, in this order. `key` is what it is
        compiled for, but the kernel and its constants' names.
        """
        if self.device.type == "cpu" and interpreter_is_on():
            # Without its guard: addresses of other processes' memory are no arguments
            interpret(kernel, check=False)[(programs,)](*tensors, *numbers, **constants)
            return
        index, key = self.device.index, (id(kernel), key)  # its hash is that of its source
        launcher = self.launchers.get(key)
        if launcher is None or not may_relaunch(index):
            with on_device(self.device):
                options = dict(constants, num_warps=1 if programs == 1 else 4)
                compiled = first_launch(kernel, programs, *tensors, *numbers, **options)
            self.launchers[key] = past_triton(compiled, programs)
            return
        stream = torch._C._cuda_getCurrentRawStream(index)
        launcher(stream, *[x.data_ptr() for x in tensors], *numbers, *constants.values())
