"""The arena of GPUs on CPU processes: its kernels in the interpreter, over pads in files."""

import ctypes
import datetime

import torch
import torch.distributed as dist

from tilewise.distributed.transport import arena as arenas
from tilewise.distributed.transport.device_arena import DeviceArena
from tilewise.distributed.transport.device_barrier import PAD, DeviceBarrier
from tilewise.distributed.transport.memory import Files
from tilewise.kernels.common.program import Program
from tilewise.testing import use_interpreter

CPU = torch.device("cpu")
LIBC = ctypes.CDLL(None)
run = Program.run


class Unmapping(Files):
    """Like torch's symmetric memory: what was allocated before is gone with the next allocation,
    and a process that still reads it gets a signal.
    """

    def __init__(self):
        self.kept = []

    def allocate(self, barrier, nbytes, signature):
        for x in filter(torch.is_tensor, self.kept):
            assert not LIBC.mprotect(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.numel()), 0)
        self.kept = super().allocate(barrier, nbytes, signature)
        return self.kept


def interpreted(program, values):
    """`Program.run`, of the arena's small kernels alone, in the interpreter."""
    with use_interpreter():
        run(program, values)


def device_arena(group=None, seconds=None):
    """The arena of GPUs on a CPU group, whose arena it is from now on."""
    group = dist.group.WORLD if group is None else group
    host, memory = arenas.host_of(group), Unmapping()
    if seconds is not None:
        host.timeout = datetime.timedelta(seconds=seconds)
    links = arenas._links_of(group, CPU)
    barrier = DeviceBarrier(host, CPU, memory.allocate(host, PAD, "pads"), memory)
    Program.run = interpreted
    arena = arenas._arenas[group, CPU] = DeviceArena(barrier, Unmapping(), CPU, links=links)
    return arena
