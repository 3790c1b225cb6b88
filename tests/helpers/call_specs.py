"""Calls on shards, from the arguments of `tilewise.distributed.attention`."""

from tilewise.distributed.api.arguments import index_sizes, sharded_call
from tilewise.distributed.methods import one_launch
from tilewise.frontend.scalars import Numbers
from tilewise.kernels.common.operand import operands_of
from tilewise.mods.flatten import modifiers_of
from tilewise.problem import Extras


def call_of(layout, q, k, v, causal=False, window=None, mask_mod=None, score_mod=None, **options):
    """The checked call of a rank's q, k and v."""
    numbers = {name: options.pop(name) for name in Numbers._fields if name in options}
    flags = dict(deterministic=False, backend=None, bitwise=True)
    flags |= {name: options.pop(name) for name in flags if name in options}
    return sharded_call(
        layout,
        q,
        k,
        v,
        numbers=Numbers(causal=causal, window=window, **numbers),
        extras=Extras(**options),
        modifiers=modifiers_of(mask_mod, score_mod, None, index_sizes(layout, q)),
        **flags,
    )


def launch_runs(arena, spec, q, k, v, *, pulled, **beside):
    """`out` and `lse` by one launch for `pulled` K and V, (groups, seqlen, 1, heads, headdim); in
    the emulator `beside` is what arrives meanwhile.
    """
    forward = one_launch.forward_of(arena, spec, q, k, v, heads=pulled[0].shape[3])
    tensors = q, *pulled, *spec.extras[:2], arena.words
    return forward.plan(**operands_of(forward.fields, tensors), **beside)(tensors)
