"""Attention's integration with torch: operators, autograd, vmap, FLOPs, sharding."""

from . import captured_grads, late
from . import operators as operators

late.captured_gradients = captured_grads.gradients
