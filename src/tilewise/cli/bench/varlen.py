"""`tilewise bench varlen`: packed sequences."""

from __future__ import annotations

import click

from ..options import DTYPES, HeadList, LengthSets, pass_option
from .dense import compare, split_off, with_features
from .options import (
    MASKS,
    SCORES,
    energy_option,
    feature_options,
    our_options,
    providers,
    run_options,
    sustained_options,
)


@click.command()
@click.option(
    "--lengths",
    type=LengthSets(),
    default="equal512,equal4096,zipf,one-long,prefill-chat",
    show_default=True,
    help="Sets by name, or the lengths of one: 160,300 or 1k,4k.",
)
@click.option(
    "--heads",
    type=HeadList(),
    default="16x128,32:8x128,32x64",
    show_default=True,
    help="Query heads, : key heads where these are fewer, x headdim.",
)
@pass_option("fwd,bwd")
@feature_options
@our_options
@click.option(
    "--against",
    type=providers,
    default="fa3",
    show_default=True,
    help="Of fa2, fa3, fa4; others take no packed sequences.",
)
@click.option(
    "--dense",
    "with_dense",
    is_flag=True,
    help="Also our dense attention, interleaved with the packed: how much of its TFLOP/s is kept.",
)
@sustained_options
@energy_option
@run_options
def varlen(lengths, heads, passes, causal, dtype, ours, against, **options) -> None:
    """Time packed sequences beside the peers that take them.

    Sets of lengths: equal512 is 128 sequences of 512 tokens, equal4096 16 of 4096; zipf is 64,
    proportional to 1 / rank^1.1, 65,536 tokens, the longest 16,416; one-long is one of 32,768 and
    128 of 256; prefill-chat is 64, uniform in 16 .. 2047. Queries and keys have the same lengths.
    FLOPs are those of each sequence, half of them under a causal mask. Each sequence is held to
    fp64, at one key head, before anything is timed.

    --dense also times the first provider without packing: lengths that are equal as a batch, others
    as a batch of sequences of 4096 with as many tokens. fa3 is found as `tilewise bench` finds it.
    """
    from ...bench.shapes import packed

    shapes = [
        packed(direction, name, of, masked, dtype=DTYPES[dtype])
        for direction in passes
        for of in heads
        for masked in MASKS[causal]
        for name in lengths
    ]
    shapes = with_features(shapes, split_off(options, SCORES))
    compare(shapes, ours, against, suite="varlen", **options)
