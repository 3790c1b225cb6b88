"""The command `tilewise bench`, `bench varlen`, and the way to others behind it.

Our attention beside its peers, in turns, each held to fp64 before it is timed.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable

import click

from .options import DTYPES, Exit, IntList, NameList, default_device, need_gpu
from .packed_options import DIRECTIONS, HeadList, LengthSets, PassList

MASKS = {"no": (False,), "yes": (True,), "both": (False, True)}
SCORES = ("window", "softcap", "alibi", "sinks")
RUN = ("rounds", "round_ms", "save", "as_json", "sustained", "energy")


def together(*options: Callable) -> Callable:
    """Options that several commands have, as one decorator."""

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


causal_option = click.option(
    "--causal", type=click.Choice(list(MASKS)), default="both", show_default=True
)
score_options = together(
    click.option(
        "--window",
        type=click.IntRange(0),
        help="Keys that a query sees before its own; needs --causal yes.",
    ),
    click.option(
        "--softcap", type=click.FloatRange(0), default=0.0, help="0, the default, is none."
    ),
    click.option("--alibi", is_flag=True, help="ALiBi, slope 2^(-8 (i + 1) / heads) for head i."),
    click.option("--sinks", is_flag=True, help="A sink a head."),
)
our_options = together(
    click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True),
    click.option(
        "--provider",
        "ours",
        default="tilewise",
        show_default=True,
        help="Or tilewise:portable, tilewise:deterministic.",
    ),
)
run_options = together(
    click.option("--rounds", type=click.IntRange(1), default=5, show_default=True),
    click.option(
        "--round-ms", default=30.0, show_default=True, help="Time of a provider in a round."
    ),
    click.option("--device", help="cuda or cpu; the GPU if there is one."),
    click.option(
        "--save", type=click.Path(dir_okay=False), help="Append the rows to this JSONL file."
    ),
    click.option(
        "--json", "as_json", is_flag=True, help="Rows as JSON lines; the table to stderr."
    ),
)
sustained_options = together(
    click.option(
        "--sustained",
        is_flag=True,
        help="Also calls back to back, in spans of 10 ms, 8 rounds or more, after 2 s of load.",
    ),
    click.option(
        "--energy",
        is_flag=True,
        help="--sustained, and joules a call: two blocks of 2 s a provider, by the GPU's counter.",
    ),
)


# Commands with options of their own, `bench <name>`, and the modules that hold them.
BEHIND = {
    "varlen": ".bench",
    "modifiers": ".bench_modifiers",
    "decode": ".bench_decode",
}


class Bench(click.Command):
    """`bench` as it stands, and the commands behind it."""

    def make_context(self, info_name, args, parent=None, **extra) -> click.Context:
        if other := self._behind(args[0] if args else ""):
            return other.make_context(f"{info_name} {other.name}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def _behind(self, name: str) -> click.Command | None:
        if name not in BEHIND:
            return None
        return getattr(importlib.import_module(BEHIND[name], __package__), name)

    def invoke(self, ctx):
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@click.command(cls=Bench)
@click.argument("directions", nargs=-1, type=click.Choice(DIRECTIONS))
@click.option(
    "--suite",
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
@causal_option
@score_options
@click.option("--group", default=1, show_default=True, help="Query heads a key head (GQA).")
@click.option(
    "--tokens", type=IntList(), default="16k", show_default=True, help="Tokens in the batch."
)
@click.option(
    "--hidden", type=IntList(), default="2048", show_default=True, help="heads x headdim."
)
@our_options
@click.option(
    "--against",
    type=NameList(),
    default="flash,cudnn,flex,standard",
    show_default=True,
    help="Of flash, cudnn, efficient, math (torch's SDPA, the backend pinned; sdpa-flash is flash),"
    " fa2, fa3, fa4, flex, standard.",
)
@sustained_options
@run_options
def bench(directions, suite, device, ours, against, **options) -> None:
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

    Packed sequences of any lengths have a command of their own: tilewise bench varlen --help. So
    have masks, a bias, dropout and score functions, tilewise bench modifiers --help, and steps of
    decoding beside a cache, tilewise bench decode --help.
    """
    device = device or default_device()
    need_gpu(device)
    from ..bench.shapes import SUITES

    if suite is not None and suite not in SUITES:
        raise click.UsageError(f"suite {suite!r} is unknown: {', '.join(SUITES)}")
    chosen = providers_of(ours, against)
    features, run = split_off(options, SCORES), split_off(options, RUN)
    shapes = SUITES[suite] if suite else shapes_of(directions or ("fwd",), **options)
    if suite and directions:
        shapes = [shape for shape in shapes if shape.direction in directions]
    compare(with_features(shapes, features), chosen, device, suite=suite or "adhoc", **run)


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
@click.option("--pass", "passes", type=PassList(), default="fwd,bwd", show_default=True)
@causal_option
@score_options
@our_options
@click.option(
    "--against",
    type=NameList(),
    default="fa3",
    show_default=True,
    help="Of fa2, fa3, fa4; others take no packed sequences.",
)
@click.option(
    "--dense",
    "with_dense",
    is_flag=True,
    help="Also our dense attention, in turn with the packed: how much of its TFLOP/s is kept.",
)
@sustained_options
@run_options
def varlen(lengths, heads, passes, causal, dtype, ours, against, with_dense, device, **options):
    """Time packed sequences beside the peers that take them.

    Sets of lengths: equal512 is 128 sequences of 512 tokens, equal4096 16 of 4096; zipf is 64,
    proportional to 1 / rank^1.1, 65,536 tokens, the longest 16,416; one-long is one of 32,768 and
    128 of 256; prefill-chat is 64, uniform in 16 .. 2047. Queries and keys have the same lengths.
    FLOPs are those of each sequence, half of them under a causal mask. Each sequence is held to
    fp64, at one key head, before anything is timed.

    --dense also times the first provider without packing: lengths that are equal as a batch, others
    as a batch of sequences of 4096 with as many tokens. fa3 is found as `tilewise bench` finds it.
    """
    device = device or default_device()
    need_gpu(device)
    from ..bench.shapes import packed

    chosen = providers_of(ours, against)
    shapes = [
        packed(direction, name, of, masked, dtype=DTYPES[dtype])
        for direction in passes
        for of in heads
        for masked in MASKS[causal]
        for name in lengths
    ]
    shapes = with_features(shapes, split_off(options, SCORES))
    compare(shapes, chosen, device, suite="varlen", with_dense=with_dense, **options)


def split_off(options: dict, names: tuple[str, ...]) -> dict:
    """These options, taken out of the others."""
    return {name: options.pop(name) for name in names}


def providers_of(ours: str, against: tuple[str, ...]) -> list:
    """Who is timed, ours first."""
    from ..bench.providers import provider

    try:
        return [provider(name) for name in (ours, *against)]
    except KeyError as error:
        raise click.UsageError(str(error.args[0])) from error


def with_features(shapes: list, features: dict) -> list:
    """The shapes, with the score features that the options ask for."""
    if features["window"] is not None and not all(shape.causal for shape in shapes):
        raise click.UsageError(
            "--window lies before a causal diagonal, and some shapes here have none: --causal yes,"
            " without --suite"
        )
    return [shape._replace(**features) for shape in shapes]


def compare(shapes, chosen, device, *, as_json, **options):
    """Runs the shapes and says how the first provider stands; exit code 1 where it is wrong."""
    from ..bench.energy import NoEnergy
    from ..bench.run import run_suite, warn
    from ..bench.standings import dense_rates, standings, summary

    show = warn if as_json else click.echo
    try:
        outcomes = run_suite(shapes, chosen, device=device, show=show, **options)
    except NoEnergy as error:
        raise click.UsageError(f"--energy: {error}") from error
    if as_json:
        for outcome in outcomes:
            if outcome.row is not None:
                click.echo(json.dumps(dataclasses.asdict(outcome.row)))
    show("\n" + "\n".join([*standings(outcomes), *dense_rates(outcomes), summary(outcomes)]))
    if any(outcome.wrong for outcome in outcomes if outcome.provider == chosen[0].name):
        raise SystemExit(Exit.FAILED)


def shapes_of(directions, seqlen, headdim, causal, group, tokens, hidden, dtype):
    """The shapes that the options ask for."""
    from ..bench.shapes import grid

    common = dict(dtype=DTYPES[dtype], tokens=tokens[0], hidden=hidden[0], group=group)
    return grid(directions, seqlen, headdim, MASKS[causal], **common)
