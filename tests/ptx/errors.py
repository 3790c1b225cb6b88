"""What an execution can find, each a name of its own."""


class PtxError(Exception):
    """The kernel does what the PTX ISA forbids or leaves undefined, or what this executor lacks."""


class UnknownInstruction(PtxError):
    """An instruction, a modifier or an operand that the executor does not know."""


class MemoryFault(PtxError):
    """An access outside of every allocation, or at an address that is not aligned."""


class BarrierFault(PtxError):
    """An mbarrier or a barrier used otherwise than the PTX ISA allows."""


class AsyncFault(PtxError):
    """Memory or registers that an asynchronous operation uses, or used without their fence."""


class Divergence(PtxError):
    """A warp's lanes are apart where an instruction needs them together."""


class Deadlock(PtxError):
    """Every warp waits and nothing is in flight, or the steps allowed are used up."""
