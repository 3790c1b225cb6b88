"""`python -m benchmarks bench`: dense shapes, forward and backward."""

from __future__ import annotations

import click

from tilewise.cli.options import DIRECTIONS, DTYPES, FP8, IntList, Known

from ...options import (
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
    from ..shapes import SUITES

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
    help="A list, such as 512,1k,2k.",
)
@click.option(
    "--headdim", type=IntList(), default="64,128", show_default=True, help="A list, up to 512."
)
@click.option("--headdim-v", type=click.IntRange(1, 512), help="V's, if different.")
@feature_options
@click.option(
    "--group",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Query heads per key head (GQA).",
)
@click.option(
    "--tokens", type=IntList(), default="16k", show_default=True, help="Tokens per batch."
)
@click.option(
    "--hidden", type=IntList(), default="2048", show_default=True, help="Query heads x headdim."
)
@our_options_or_fp8
@click.option(
    "--against",
    type=providers,
    default="flash,cudnn,flex,standard",
    show_default=True,
    help="Peers: flash, cudnn, efficient, math (torch's SDPA with that backend; sdpa-flash is"
    " flash), fa2, fa3, fa4, flex, standard.",
)
@sustained_options
@energy_option
@run_options
def dense(directions, suite, ours, against, **options) -> None:
    """Time attention and its peers, and compare each peer with the first provider.

    fa2 is the package flash_attn, and fa4 is FlashAttention-4, the package flash_attn.cute. fa3 is
    FlashAttention-3: the library TILEWISE_FA3=/path/to/fa3.so (put the CUDA runtime that it was
    built with on LD_LIBRARY_PATH), or else the package flash_attn_interface. --window, --softcap,
    --alibi and --sinks apply to every shape. Peers that cannot run, for example because they lack
    one of these, are listed with the reason. The last lines print time(peer) / time(first), as
    geometric mean and worst shape, for each peer and for the best of fa3, cudnn and fa4.

    By default the L2 cache is flushed before each call, and the GPU pauses between calls. Training
    has no pauses, so the power limit decides: --sustained also times back-to-back calls. Use its
    ratios for training.

    --dtype fp8 adds rows. tilewise gets e4m3 q, k and v and transposes V in the call.
    tilewise:quantize gets bfloat16 and quantises in the call. tilewise:calibrated does so in one
    pass, with given scales and without means. tilewise:quantized gets quantised inputs.
    tilewise:bf16 computes in bfloat16. fa3 is then the package fa3-fwd. Results must stay within
    the error bounds on the documentation's FP8 page.

    Other commands time packed sequences (bench varlen --help), masks, a bias, dropout and score
    functions (bench modifiers --help), decoding with a KV cache (bench decode --help), and several
    processes (bench distributed --help).
    """
    if options["dtype"] in FP8:
        if suite is not None or set(directions) - {"fwd"}:
            raise click.UsageError(
                "--dtype fp8 is for forwards, without --suite: there is no other"
            )
        from .. import fp8

        against = (*fp8.NAMES, *against)
    features, sizes = split_off(options, SCORES), split_off(options, SIZES)
    shapes = suite_of(suite) if suite else shapes_of(directions or ("fwd",), **sizes)
    if suite and directions:
        shapes = [shape for shape in shapes if shape.direction in directions]
    compare(with_features(shapes, features), ours, against, suite=suite or "adhoc", **options)


SIZES = ("seqlen", "headdim", "headdim_v", "causal", "group", "tokens", "hidden", "dtype")


def shapes_of(directions, seqlen, headdim, headdim_v, causal, dtype, **sizes):
    """The shapes that the options ask for."""
    from ..shapes import grid

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
    from ..energy import NoEnergy
    from ..run import run_suite
    from ..standings import dense_rates, standings, summary

    check_span(options["span_ms"], options["sustained"] or options["energy"])
    chosen = providers_of(ours, against)
    try:
        outcomes = run_suite(shapes, chosen, show=show_with(as_json), **options)
    except NoEnergy as error:
        raise click.UsageError(f"--energy: {error}") from error
    lines = [*standings(outcomes), *dense_rates(outcomes), summary(outcomes)]
    conclude(outcomes, lines, as_json, [chosen[0].name])
