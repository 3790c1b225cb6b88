"""Pure functions on one tile, shared by every kernel in both dialects.

They take index vectors and tiles and return tiles or NamedTuples. They never create a tensor, never
call a matmul and never branch on the architecture: so Triton, Gluon and the CPU interpreter share
them.
"""
