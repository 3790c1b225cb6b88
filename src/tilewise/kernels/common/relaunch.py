"""Whether compiled kernels may be launched without Triton's front end, which inspects every
argument and takes longer than a short kernel runs.
"""

from __future__ import annotations

import torch
from triton import knobs


def may_relaunch(device: int | None) -> bool:
    """Whether kernels may be launched without Triton's front end: the device is current, and no
    profiler has set launch hooks, which must then be called.
    """
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):
            return False
    return torch._C._cuda_getDevice() == device
