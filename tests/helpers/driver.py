"""A CUDA driver that launches nothing, and what Triton keeps of a kernel that it would launch."""

import ctypes
import re
from types import SimpleNamespace

BYTES = {"64": 8, "32": 4, "16": 2, "8": 1}


class Driver:
    """Knows the sizes of a kernel's parameters, and notes what is launched."""

    def __init__(self, sizes):
        self.sizes, self.launched, self.result, self.inside = sizes, [], 0, None

    def functions(self):
        return SimpleNamespace(cuLaunchKernelEx=self.launch, cuFuncGetParamInfo=self.parameter)

    def parameter(self, function, n, offset, size):
        if n >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[n]
        return 0

    def launch(self, config, function, pointers, extra):
        if self.inside is not None:
            self.inside()
        if self.result:
            return self.result
        places = (ctypes.c_void_p * len(self.sizes)).from_address(pointers)
        values = [ctypes.string_at(*x) for x in zip(places, self.sizes)]
        self.launched.append((ctypes.string_at(config, 56), function, values))
        return 0


def sizes_in(ptx):
    """Bytes of the parameters that a kernel's PTX declares."""
    declared = re.findall(r"\.param ([^,)]*)", ptx[ptx.index(".entry") :].split("{")[0])
    kinds = [re.search(r"\.[usfb](\d+)\b", x)[1] for x in declared]
    counts = [re.search(r"\[(\d+)\]", x) for x in declared]
    return [BYTES[kind] * int(count[1] if count else 1) for kind, count in zip(kinds, counts)]


def run_of(**other):
    """What Triton keeps of a launch."""
    sizes = dict(global_scratch_size=0, profile_scratch_size=0)
    return SimpleNamespace(**dict(launch_cooperative_grid=False, launch_pdl=False) | sizes | other)


def launchable(kernel, **run):
    """A kernel that was compiled for a GPU that is not there, as `packed` takes it."""
    metadata = kernel.metadata.num_warps, 1, kernel.metadata.shared
    return SimpleNamespace(src=kernel.src, run=run_of(**run), function=1, packed_metadata=metadata)
