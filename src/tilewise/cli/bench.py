"""The command `tilewise bench`.

Our attention beside its peers, in turns, each held to fp64 before it is timed.
"""

from __future__ import annotations

import dataclasses
import json

import click

from .options import DTYPES, Exit, IntList, NameList, default_device, need_gpu


@click.command()
@click.argument("directions", nargs=-1, type=click.Choice(["fwd", "bwd", "fwd+bwd"]))
@click.option(
    "--suite", help="A named list of shapes instead of the options below: dense, cpu, smoke."
)
@click.option(
    "--seqlen",
    type=IntList(),
    default="1k,4k,16k",
    show_default=True,
    help="Any list: 512,1k,2k,4k,8k,16k.",
)
@click.option(
    "--headdim", type=IntList(), default="64,128", show_default=True, help="Any up to 256."
)
@click.option(
    "--causal", type=click.Choice(["no", "yes", "both"]), default="both", show_default=True
)
@click.option(
    "--window",
    type=click.IntRange(0),
    help="Keys that a query sees before its own; needs --causal yes.",
)
@click.option("--softcap", type=click.FloatRange(0), default=0.0, help="0, the default, is none.")
@click.option("--alibi", is_flag=True, help="ALiBi, slope 2^(-8 (i + 1) / heads) for head i.")
@click.option("--sinks", is_flag=True, help="A sink a head.")
@click.option("--group", default=1, show_default=True, help="Query heads a key head (GQA).")
@click.option(
    "--tokens", type=IntList(), default="16k", show_default=True, help="Tokens in the batch."
)
@click.option(
    "--hidden", type=IntList(), default="2048", show_default=True, help="heads x headdim."
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True)
@click.option(
    "--provider",
    "ours",
    default="tilewise",
    show_default=True,
    help="Or tilewise:portable, tilewise:deterministic.",
)
@click.option(
    "--against",
    type=NameList(),
    default="flash,cudnn,flex,standard",
    show_default=True,
    help="Of flash, cudnn, efficient, math (torch's SDPA, the backend pinned; sdpa-flash is flash),"
    " fa3, fa4, flex, standard.",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--round-ms", default=30.0, show_default=True, help="Time of a provider in a round.")
@click.option("--device", help="cuda or cpu; the GPU if there is one.")
@click.option("--save", type=click.Path(dir_okay=False), help="Append the rows to this JSONL file.")
@click.option("--json", "as_json", is_flag=True, help="Rows as JSON lines; the table to stderr.")
def bench(
    directions, suite, device, ours, against, rounds, round_ms, save, as_json, **of_shapes
) -> None:
    """Time attention beside its peers; the first provider is the one the others are divided by.

    fa3 is FlashAttention-3: its library alone, where TILEWISE_FA3=/path/to/fa3.so names it (with
    the CUDA runtime it was built with on LD_LIBRARY_PATH), else its package flash_attn_interface.
    fa4 is FlashAttention-4: the package flash_attn.cute. --window, --softcap, --alibi and --sinks
    hold for every shape of the run. A peer that cannot run, be it for want of one of these, is
    listed with the reason. The last lines are time(peer) / time(first): geometric mean and worst
    shape, for each peer and for the best of fa3, cudnn and fa4 at each shape.
    """
    device = device or default_device()
    need_gpu(device)
    from ..bench.providers import provider
    from ..bench.run import run_suite, summary, warn
    from ..bench.shapes import SUITES
    from ..bench.standings import standings

    if suite is not None and suite not in SUITES:
        raise click.UsageError(f"suite {suite!r} is unknown: {', '.join(SUITES)}")
    try:
        chosen = [provider(name) for name in (ours, *against)]
    except KeyError as error:
        raise click.UsageError(str(error.args[0])) from error
    features = {name: of_shapes.pop(name) for name in ("window", "softcap", "alibi", "sinks")}
    shapes = SUITES[suite] if suite else shapes_of(directions or ("fwd",), **of_shapes)
    if suite and directions:
        shapes = [shape for shape in shapes if shape.direction in directions]
    if features["window"] is not None and not all(shape.causal for shape in shapes):
        raise click.UsageError(
            "--window lies before a causal diagonal, and some shapes here have none: --causal yes,"
            " without --suite"
        )
    shapes = [shape._replace(**features) for shape in shapes]
    show = warn if as_json else click.echo
    outcomes = run_suite(
        shapes,
        chosen,
        suite=suite or "adhoc",
        device=device,
        rounds=rounds,
        round_ms=round_ms,
        save=save,
        show=show,
    )
    if as_json:
        for outcome in outcomes:
            if outcome.row is not None:
                click.echo(json.dumps(dataclasses.asdict(outcome.row)))
    show("\n" + "\n".join([*standings(outcomes), summary(outcomes)]))
    if any(outcome.wrong for outcome in outcomes if outcome.provider == chosen[0].name):
        raise SystemExit(Exit.FAILED)


def shapes_of(directions, seqlen, headdim, causal, group, tokens, hidden, dtype):
    """The shapes that the options ask for."""
    from ..bench.shapes import grid

    masks = {"no": (False,), "yes": (True,), "both": (False, True)}[causal]
    common = dict(dtype=DTYPES[dtype], tokens=tokens[0], hidden=hidden[0], group=group)
    return grid(directions, seqlen, headdim, masks, **common)
