"""An executor of PTX on a CPU, for tests of kernels without a GPU.

`execute(kernel)[grid](*args)` compiles a kernel for sm_90 as a launch does and executes the PTX
that Triton made: instructions, not the functions of Gluon that stand for them in the emulator. So
it sees inline assembly, layouts, swizzles, the descriptors of TMA and wgmma, and addresses.
`assemble(text, constraints, *inputs)` executes inline assembly by itself.

It finds accesses outside of tensors and of shared memory, and misaligned ones; mbarriers and
barriers that are used otherwise than the ISA allows; deadlocks; what wgmma or a bulk copy reads
without a proxy fence, before it has landed, or after it was overwritten; registers of a wgmma in
flight; lanes that are apart where a warp must be together. Each is an error of errors.py.

It does not see what ptxas makes of the PTX (registers, spills, the order of instructions), how fast
anything is, races between threads that are scheduled here in a harmless order, nor the rounding of
approximations, which are exact here. Fences of threads among themselves do nothing.
"""

from . import barriers, bits, conversions, copies, floats, integers, lanes, matrices, memory, moves
from .assembly import assemble
from .errors import PtxError
from .launch import execute, executing

INSTRUCTIONS = (
    *(barriers, bits, conversions, copies, floats, integers, lanes, matrices, memory, moves),
)

__all__ = ["INSTRUCTIONS", "PtxError", "assemble", "execute", "executing"]
