"""`python -m benchmarks bench varlen`: packed sequences."""

from __future__ import annotations

import click

from tilewise.cli.options import DTYPES

from ...options import (
    MASKS,
    SCORES,
    HeadList,
    LengthSets,
    energy_option,
    feature_options,
    our_options,
    pass_option,
    providers,
    run_options,
    sustained_options,
)
from .dense import compare, split_off, with_features


@click.command()
@click.option(
    "--lengths",
    type=LengthSets(),
    default="equal512,equal4096,zipf,one-long,prefill-chat",
    show_default=True,
    help="Named sets, or the lengths in one: 160,300 or 1k,4k.",
)
@click.option(
    "--heads",
    type=HeadList(),
    default="16x128,32:8x128,32x64",
    show_default=True,
    help="QUERY_HEADS[:KEY_HEADS]xHEADDIM.",
)
@pass_option("fwd,bwd")
@feature_options
@our_options
@click.option(
    "--against",
    type=providers,
    default="fa3",
    show_default=True,
    help="Peers: fa2, fa3, fa4; others do not support packed sequences.",
)
@click.option(
    "--dense",
    "with_dense",
    is_flag=True,
    help="Also time dense attention, and print how much of its TFLOP/s the packed calls keep.",
)
@sustained_options
@energy_option
@run_options
def varlen(lengths, heads, passes, causal, dtype, ours, against, **options) -> None:
    """Time packed sequences, and compare with peers that support them.

    \b
    equal512      128 sequences, each 512 tokens
    equal4096     16 sequences, each 4096 tokens
    zipf          64 sequences, proportional to 1 / rank^1.1: 65,536 tokens, the longest 16,416
    one-long      one with 32,768 tokens and 128 with 256
    prefill-chat  64 sequences, uniform in 16 .. 2047

    Queries and keys have the same lengths. FLOPs are summed over sequences, and halved with a
    causal mask. Each sequence is checked against fp64, at one key head, before it is timed.

    --dense also times the first provider without packing: equal lengths as a batch, others as a
    batch with as many tokens in sequences of 4096. fa3 is located as in `bench`.
    """
    from ..shapes import packed

    shapes = [
        packed(direction, name, of, masked, dtype=DTYPES[dtype])
        for direction in passes
        for of in heads
        for masked in MASKS[causal]
        for name in lengths
    ]
    shapes = with_features(shapes, split_off(options, SCORES))
    compare(shapes, ours, against, suite="varlen", **options)
