"""Kernels that record how they are launched, and what they are launched with."""

import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import jit

from tilewise.kernels.hopper.descriptors import DescriptorFields
from tilewise.problem import Saved


class Kernel:
    """A kernel as Triton launches it, and as it is called when it is compiled."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __getitem__(self, grid):
        def front(*args, FEATURES, TILE, **options):
            self.log.append((self.name, "front", grid[0], (*args, FEATURES, TILE)))
            return self

        return front

    def run(self, x, y, z, stream, function, metadata, *rest):
        self.log.append((self.name, "again", x, rest[3:]))


def plain(args):
    """Arguments as the driver gets them."""
    found = []
    for x in args:
        if isinstance(x, (TensorDescriptor, DescriptorFields)):
            found += [x.base.data_ptr(), *x.shape, *x.strides]
        elif isinstance(x, torch.Tensor):
            found.append(x.data_ptr())
        else:
            found.append(plain(x) if isinstance(x, tuple) else x)
    return tuple(found)


def compiled_for(args):
    """What Triton would compile for."""
    return [jit.native_specialize_impl(CUDABackend, x, False, True, True) for x in args[:-2]]


def has_rest(problem):
    """Whether a kernel computes what lse has lost."""
    return problem.has_bias or bool(problem.mods.score)


def saved_of(call, dout, dlse=None):
    _, _, (q, k, v), extras = call
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])
    return Saved(dout, dlse, q, k, v, out, lse), extras
