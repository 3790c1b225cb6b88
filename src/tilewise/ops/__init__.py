"""Attention's integration with torch: operators, autograd, vmap, FLOPs, sharding."""
