"""Kernels without a GPU: Triton's in its interpreter, Hopper's in an emulator."""
