"""`tilewise bench`: dense shapes, forward and backward."""

from __future__ import annotations

import click

from ..options import DIRECTIONS, DTYPES, FP8, IntList, Known
from .options import (
    MASKS,
    SCORES,
    check_span,
    conclude,
    energy_option,
    feature_options,
    our_options_or_fp8,
    providers,
    providers_of,
    run_options,
    show_with,
    sustained_options,
)


def suite_of(name: str) -> list:
    """The shapes of a named list."""
    from ...bench.shapes import SUITES

    if name not in SUITES:
        raise KeyError(f"suite {name!r} is unknown: {', '.join(SUITES)}")
    return SUITES[name]


@click.command(hidden=True)
@click.argument("directions", nargs=-1, type=click.Choice(DIRECTIONS))
@click.option(
    "--suite",
    type=Known(suite_of),
    help="A named list of shapes instead of the options below: dense, gpt2-medium, cpu, smoke.",
)
@click.option(
    "--seqlen",
    type=IntList(),
    default="1k,4k,16k",
    show_default=True,
    help="Any list: 512,1k,2k,4k,8k,16k.",
)
@click.option(
    "--headdim", type=IntList(), default="64,128", show_default=True, help="Any up to 512."
)
@click.option("--headdim-v", type=click.IntRange(1, 512), help="That of V, if it is another.")
@feature_options
@click.option(
    "--group",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Query heads per key head (GQA).",
)
@click.option(
    "--tokens", type=IntList(), default="16k", show_default=True, help="Tokens in the batch."
)
@click.option(
    "--hidden", type=IntList(), default="2048", show_default=True, help="heads x headdim."
)
@our_options_or_fp8
@click.option(
    "--against",
    type=providers,
    default="flash,cudnn,flex,standard",
    show_default=True,
    help="Of flash, cudnn, efficient, math (torch's SDPA, the backend pinned; sdpa-flash is flash),"
    " fa2, fa3, fa4, flex, standard.",
)
@sustained_options
@energy_option
@run_options
def dense(directions, suite, ours, against, **options) -> None:
    """Time attention beside its peers; the first provider is the one the others are divided by.

    fa3 is FlashAttention-3: its library alone, where TILEWISE_FA3=/path/to/fa3.so names it (with
    the CUDA runtime it was built with on LD_LIBRARY_PATH), else its package flash_attn_interface.
    fa2 is the package flash_attn, fa4 is FlashAttention-4, the package flash_attn.cute. --window,
    --softcap, --alibi and --sinks hold for every shape of the run. A peer that cannot run, be it
    for want of one of these, is listed with the reason. The last lines are time(peer) /
    time(first): geometric mean and worst shape, for each peer and for the best of fa3, cudnn and
    fa4 at each shape.

    Calls are timed flushed: the L2 cache is flushed before each, and the GPU has pauses. Training
    has none, and there the power limit decides: --sustained times that as well, and its ratios are
    the ones that count.

    With --dtype fp8 there are further rows of ours: tilewise takes q, k and v of e4m3 and makes V^T
    in the call, tilewise:quantize takes bfloat16, before its rounding to e4m3, and quantises in the
    call, tilewise:calibrated does so with scales that are given and no means, in one pass,
    tilewise:quantized has quantised before, and tilewise:bf16 computes in bfloat16. fa3 is the
    package fa3-fwd then. Results are held to the bound on the norm of their error that the page on
    FP8 states.

    Packed sequences of any lengths have a command of their own: tilewise bench varlen --help. So
    have masks, a bias, dropout and score functions, tilewise bench modifiers --help, and steps of
    decoding with a KV cache, tilewise bench decode --help.
    """
    if options["dtype"] in FP8:
        if suite is not None or set(directions) - {"fwd"}:
            raise click.UsageError(
                "--dtype fp8 is for forwards, without --suite: there is no other"
            )
        from ...bench import fp8

        against = (*fp8.NAMES, *against)
    features, sizes = split_off(options, SCORES), split_off(options, SIZES)
    shapes = suite_of(suite) if suite else shapes_of(directions or ("fwd",), **sizes)
    if suite and directions:
        shapes = [shape for shape in shapes if shape.direction in directions]
    compare(with_features(shapes, features), ours, against, suite=suite or "adhoc", **options)


SIZES = ("seqlen", "headdim", "headdim_v", "causal", "group", "tokens", "hidden", "dtype")


def shapes_of(directions, seqlen, headdim, headdim_v, causal, dtype, **sizes):
    """The shapes that the options ask for."""
    from ...bench.shapes import grid

    tokens, hidden, group = sizes["tokens"][0], sizes["hidden"][0], sizes["group"]
    for size in headdim:
        if (nheads := max(hidden // size, group)) % group:
            raise click.UsageError(f"--group {group} does not divide {nheads} heads of {size}")
    common = dict(tokens=tokens, hidden=hidden, group=group, headdim_v=headdim_v)
    common |= dict(dtype=(DTYPES | FP8)[dtype])
    return grid(directions, seqlen, headdim, MASKS[causal], **common)


def split_off(options: dict, names: tuple[str, ...]) -> dict:
    """These options, taken out of the others."""
    return {name: options.pop(name) for name in names}


def with_features(shapes: list, features: dict) -> list:
    """The shapes, with the score features that the options ask for."""
    if features["window"] is not None and not all(shape.causal for shape in shapes):
        raise click.UsageError(
            "--window lies before a causal diagonal, and some shapes here have none: --causal yes,"
            " without --suite"
        )
    return [shape._replace(**features) for shape in shapes]


def compare(shapes, ours: str, against, *, as_json: bool, **options) -> None:
    """Runs the shapes and says how the first provider stands; exit code 1 where it is wrong."""
    from ...bench.energy import NoEnergy
    from ...bench.run import run_suite
    from ...bench.standings import dense_rates, standings, summary

    check_span(options["span_ms"], options["sustained"] or options["energy"])
    chosen = providers_of(ours, against)
    try:
        outcomes = run_suite(shapes, chosen, show=show_with(as_json), **options)
    except NoEnergy as error:
        raise click.UsageError(f"--energy: {error}") from error
    lines = [*standings(outcomes), *dense_rates(outcomes), summary(outcomes)]
    conclude(outcomes, lines, as_json, [chosen[0].name])
