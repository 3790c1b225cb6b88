"""Kernels without a GPU: Gluon's for Hopper in an emulator, Triton's in its interpreter."""
