"""The arena of GPUs on CPU processes: its kernels in the interpreter, over pads in files."""

import datetime

import torch
import torch.distributed as dist

from tilewise.distributed.device_arena import DeviceArena
from tilewise.distributed.device_barrier import PAD, DeviceBarrier
from tilewise.distributed.failure import Barrier
from tilewise.distributed.memory import Files
from tilewise.testing import use_interpreter

CPU = torch.device("cpu")


def device_arena(group=None, seconds=None):
    """The arena of GPUs on a CPU group."""
    group = dist.group.WORLD if group is None else group
    host, memory = Barrier(group), Files()
    if seconds is not None:
        host.timeout = datetime.timedelta(seconds=seconds)
    barrier = DeviceBarrier(host, CPU, memory.allocate(host, PAD, "pads"))
    launch = barrier.signals._launch

    def interpreted(*args):  # these kernels alone
        with use_interpreter():
            launch(*args)

    barrier.signals._launch = interpreted
    return DeviceArena(barrier, memory, CPU)
