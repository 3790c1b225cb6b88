"""Calls on shards, from the arguments of `tilewise.distributed.attention`."""

from tilewise.distributed.methods import one_launch
from tilewise.distributed.methods.call_spec import CallSpec
from tilewise.kernels.common.operand import operands_of
from tilewise.problem import Extras


def spec_of(layout, alibi_slopes=None, sinks=None, dropout_rng=None, **options):
    """The call before it is checked."""
    extras = Extras(alibi_slopes, sinks, dropout_rng=dropout_rng)
    return CallSpec(layout, extras=extras, **options)


def launch_runs(arena, spec, q, k, v, *, pulled, **beside):
    """`out` and `lse` by one launch for `pulled` K and V, (groups, seqlen, 1, heads, headdim); in
    the emulator `beside` is what arrives meanwhile.
    """
    forward = one_launch.forward_of(arena, spec, q, k, v, heads=pulled[0].shape[3])
    tensors = q, *pulled, *spec.extras[:2], arena.words
    return forward.plan(**operands_of(forward.fields, tensors), **beside)(tensors)
