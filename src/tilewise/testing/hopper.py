"""Gluon kernels for Hopper, run on CPU tensors: `gluon_emulator.hopper`, with its errors."""

from gluon_emulator.hopper import Deadlock, HopperError, emulate

__all__ = ["Deadlock", "HopperError", "emulate"]
