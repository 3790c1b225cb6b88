"""An executor of PTX on a CPU, for kernels that no GPU has run.

`execute(kernel)[grid](*args)` compiles a kernel for sm_90 as a launch does and executes the PTX that
Triton made: instructions, not the functions of Gluon that stand for them in the emulator. So it sees
inline assembly, layouts, swizzles, the descriptors of TMA and wgmma, addresses, and what the compiler
made of them. `assemble(text, constraints, *inputs)` executes inline assembly by itself.

It finds accesses outside of tensors and of shared memory, and misaligned ones; mbarriers and barriers
that are used otherwise than the ISA allows; deadlocks; what wgmma or a bulk copy reads without a
proxy fence, before it has landed, or after it was overwritten; registers of a wgmma in flight; warps
whose lanes are apart where they must not be. Each is an error of errors.py.

It does not see what ptxas makes of the PTX (registers, spills, reordering), how fast anything is,
races between threads that take turns in another order than here, nor the rounding of approximations,
which are exact here. Fences of threads among themselves do nothing.
"""

from . import barriers, bits, conversions, copies, floats, integers, lanes, matrices, memory, moves
from .assembly import assemble
from .errors import PtxError
from .launch import execute, executing

INSTRUCTIONS = (
    *(barriers, bits, conversions, copies, floats, integers, lanes, matrices, memory, moves),
)

__all__ = ["INSTRUCTIONS", "PtxError", "assemble", "execute", "executing"]
