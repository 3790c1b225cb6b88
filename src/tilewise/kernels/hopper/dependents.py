"""Programmatic dependent launch: a kernel that begins while the one before it still runs.

Both compute rows of one call and neither reads what the other writes, so none waits for the other
before its end. The second one waits there: what follows it in the stream follows both.
"""

import itertools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

START = gl.constexpr("griddepcontrol.launch_dependents; // $0")
WAIT = gl.constexpr("griddepcontrol.wait; // $0")
SM = gl.constexpr("mov.u32 $0, %smid;")


@gluon.jit
def start_dependents():
    """Lets the next kernel begin, where SMs are free, as soon as all programs have said so."""
    gl.inline_asm_elementwise(START, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_launch_before():
    """Waits until the kernel before this one has ended."""
    gl.inline_asm_elementwise(WAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def number_of_sm():
    """The number of the SM that a program is on; 2 i and 2 i + 1 are neighbours."""
    return gl.inline_asm_elementwise(SM, "=r", [], dtype=gl.int32, is_pure=True, pack=1)


def _nothing():  # the emulator runs one launch after another
    return torch.tensor(0)


_emulated_sms = itertools.cycle(range(4))  # programs ask once each, in any order
ASM = {
    START.value: _nothing,
    WAIT.value: _nothing,
    SM.value: lambda: torch.tensor(next(_emulated_sms), dtype=torch.int32),
}
