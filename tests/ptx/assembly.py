"""Inline assembly by itself: its text, once for each lane."""

from collections.abc import Sequence

import numpy as np
import torch

from .machine import Cta, Machine
from .memory import GlobalMemory
from .parse import Kernel, parse_body, without_comments
from .program import Program
from .registers import LANES

KINDS = {"r": "b32", "f": "b32", "h": "b16", "l": "b64"}


def assemble(
    text: str, constraints: str, *inputs: np.ndarray, reached: Sequence[torch.Tensor] = ()
) -> list[np.ndarray]:
    """The outputs of inline assembly, unsigned or float32 for `f`.

    `$0` and so on are operands by LLVM's constraints, and an input is an array of a value for each
    lane. An input with the number of an output is that output before. `reached` are the tensors
    that it may read and write by address.
    """
    parts = constraints.split(",")
    kernel = Kernel()
    for number, part in enumerate(parts):
        if not part.isdigit():
            kernel.registers[f"%operand{number}"] = KINDS[part.lstrip("=&")]
    for number in reversed(range(len(parts))):
        text = text.replace(f"${number}", f"%operand{number}")
    parse_body(f"{without_comments(text)}; ret; }}", kernel)
    program, count = Program(kernel, {}), len(inputs[0])
    warps = -(-count // LANES)
    machine = Machine(program, (1, 1, 1), GlobalMemory(list(reached)), {}, warps=warps)
    cta = Cta(machine, (0, 0, 0))

    def lanes_of(number: int) -> np.ndarray:
        width, row = program.slots.rows[f"%operand{number}"]
        return cta.registers.arrays[width][row]

    of_inputs = [n for n, part in enumerate(parts) if not part.startswith("=")]
    for number, values in zip(of_inputs, inputs, strict=True):
        lanes = lanes_of(int(parts[number]) if parts[number].isdigit() else number)
        lanes[:] = np.resize(np.ascontiguousarray(values).view(lanes.dtype), len(lanes))
    machine.run_cta(cta)
    found = [lanes_of(n)[:count] for n, part in enumerate(parts) if part.startswith("=")]
    kinds = [x.lstrip("=&") for x in parts if x.startswith("=")]
    return [x.view(np.float32) if kind == "f" else x for x, kind in zip(found, kinds)]
