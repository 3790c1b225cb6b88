"""Gluon kernels for Hopper, run on CPU tensors: barriers, TMA, wgmma and partitions, in Python."""

from .emulate import emulate
from .machine import Deadlock, HopperError

__all__ = ["Deadlock", "HopperError", "emulate"]
