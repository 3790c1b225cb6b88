"""Kernels that record how they are launched, and what they are launched with."""

from types import SimpleNamespace

import torch
from torch._C._dynamo import guards
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import jit

from tilewise.kernels.common import program, workspace
from tilewise.kernels.common.operand import Operand
from tilewise.kernels.hopper.descriptors import DescriptorFields
from tilewise.problem import Saved
from tilewise.tile.types import Features


class Kernel:
    """A kernel as Triton launches it, and as it is called when it is compiled."""

    function, packed_metadata = "function", "metadata"
    src = SimpleNamespace(signature={})

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __getitem__(self, grid):
        def front(*args, **options):
            constants = [x for name, x in options.items() if name.isupper()]
            self.log.append((self.name, "front", grid[0], (*args, *constants)))
            return self

        return front

    def run(self, x, y, z, stream, function, metadata, *rest):
        self.log.append((self.name, "again", x, rest[3:]))


def fake_kernels(monkeypatch, module, *names):
    """Fakes in the place of these kernels of a module, on a device that is current. Returns their
    calls.
    """
    log = []
    for name in names:
        monkeypatch.setattr(module, name, Kernel(name, log))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the CPU's
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return log


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


def sources_of(launched):
    """The addresses of what a launch of `copy_rows_kernel` copies."""
    *_, args = launched
    return [copied[0][0] for copied in plain(args)[:3] if copied is not None]


def compiled_for(args):
    """What Triton would compile for; constants, which begin with the features, are not."""
    stop = next((n for n, x in enumerate(args) if isinstance(x, Features)), -2)
    return [jit.native_specialize_impl(CUDABackend, x, False, True, True) for x in args[:stop]]


def has_rest(problem):
    """Whether a kernel computes what lse has lost."""
    return problem.has_bias or bool(problem.mods.score)


def saved_of(call, dout, dlse=None):
    _, _, (q, k, v), extras = call
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])
    return Saved(dout, dlse, q, k, v, out, lse), extras


class Memory:
    """What a call allocates; the same for each call that `begin` was called before."""

    def __init__(self):
        self.made, self.next = [], 0

    def begin(self):
        self.next = 0

    def __call__(self, shape, strides, dtype):
        if self.next == len(self.made):
            self.made.append(guards._empty_strided_cpu(shape, strides, dtype))  # as of a GPU
        self.next += 1
        found = self.made[self.next - 1]
        assert (found.shape, found.stride(), found.dtype) == (torch.Size(shape), strides, dtype)
        return found


def fake_memory(monkeypatch):
    """What programs allocate, where kernels are fakes."""
    found = Memory()
    new = Operand.new

    def renewed(operand, device=None):
        if device is not None:
            return new(operand, device)
        x = found(tuple(operand.shape), operand.strides, operand.dtype)
        return x.zero_() if operand.is_cleared else x

    def slices_of(slices, device):
        starts = workspace.starts_of(slices)
        buffer = found((starts[-1],), (1,), torch.uint8) if slices else None
        return {x.name: workspace.tensor_at(buffer, at, x) for at, x in zip(starts, slices)}

    monkeypatch.setattr(Operand, "new", renewed)
    monkeypatch.setattr(program, "tensors_of", slices_of)
    monkeypatch.setattr(program, "allocator_of", lambda device: found)
    return found
