"""Hopper's launches without a GPU: kernels are fakes, descriptors are encoded as their fields."""

import functools

import torch

from tilewise.kernels.common import direct, program
from tilewise.kernels.hopper import launch, tile_counter


class Quick:
    """`compat.Direct`, which takes a descriptor as its parts."""

    def __init__(self, compiled, programs, launcher, packs):
        self.compiled, self.programs = compiled, programs

    def encode(self, which, x):
        return [x.base.data_ptr(), *x.shape, *x.strides]

    def arguments(self, stream, args):
        return stream, *args

    def launcher(self, stream, *args):
        self.compiled.log.append((self.compiled.name, "again", self.programs, args))


def fake_launches(monkeypatch):
    """`fake_kernels` are launched again past Triton. Returns the counter of tiles, the same for all
    launches.
    """
    tiles = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(direct, "launcher_of", lambda compiled: (None, False))
    # Of kernels without descriptors
    through = functools.partial(direct.Direct, launcher=None)
    monkeypatch.setattr(program, "past_triton", through)
    monkeypatch.setattr(launch, "Direct", Quick)
    monkeypatch.setattr(tile_counter, "counters", lambda *of, count: tiles)
    return tiles


def alone(launch):
    """The launch without the option to begin beside the one before, which changes no code and is
    in no hash of machine code.
    """
    options = {name: x for name, x in launch.options.items() if name != "launch_pdl"}
    return launch._replace(options=options)
