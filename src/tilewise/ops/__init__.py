"""Attention as torch sees it: operators, autograd, vmap, FLOPs, sharding."""
