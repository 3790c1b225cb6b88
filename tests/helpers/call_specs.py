"""Calls on shards, from the arguments of `tilewise.distributed.attention`."""

from tilewise.distributed.methods.call_spec import CallSpec
from tilewise.problem import Extras


def spec_of(layout, alibi_slopes=None, sinks=None, dropout_rng=None, **options):
    """The call before it is checked."""
    extras = Extras(alibi_slopes, sinks, dropout_rng=dropout_rng)
    return CallSpec(layout, extras=extras, **options)
