"""The command `tilewise bench modifiers`: what masks, a bias, dropout and score functions cost."""

from __future__ import annotations

import dataclasses
import json

import click

from .bench import our_options, run_options
from .options import DTYPES, Exit, IntList, NameList, default_device, need_gpu
from .packed_options import HeadList, PassList

QUICK = dict(seqlens=(256,), tokens=(512,), heads=((2, 2, 32),))


class Names(click.ParamType):
    """Names of a list that is known when it is asked for."""

    name = "names"

    def __init__(self, of: str) -> None:
        self.of = of  # "modifiers" or "lanes"

    def convert(self, value, param, ctx) -> tuple[str, ...]:
        from ..bench.beside import LANES
        from ..bench.modifiers import NAMES

        known = NAMES if self.of == "modifiers" else LANES
        parts = NameList().convert(value, param, ctx)
        if unknown := [part for part in parts if part not in known]:
            self.fail(f"{unknown[0]!r} is none of {', '.join(known)}", param, ctx)
        return parts


@click.command()
@click.option(
    "--cases",
    type=Names("modifiers"),
    default="window,prefix,causal,documents,causal-documents,score,dropout,bias,learned-bias",
    show_default=True,
)
@click.option("--pass", "passes", type=PassList(), default="fwd,bwd", show_default=True)
@click.option("--seqlens", type=IntList(), default="4k,16k", show_default=True)
@click.option(
    "--tokens", type=IntList(), default="16k", show_default=True, help="Tokens in the batch."
)
@click.option(
    "--heads",
    type=HeadList(),
    default="16x128",
    show_default=True,
    help="Query heads, : key heads where these are fewer, x headdim.",
)
@click.option("--quick", is_flag=True, help="512 tokens in sequences of 256, 2 heads of 32.")
@our_options
@click.option(
    "--against",
    type=Names("lanes"),
    default="flex,packed,without",
    show_default=True,
    help="What of this a case is held against, of that which it has.",
)
@click.option(
    "--sustained", is_flag=True, help="Rates back to back, as `tilewise bench --sustained`."
)
@run_options
def modifiers(cases, passes, quick, device, dtype, ours, against, as_json, **options) -> None:
    """Time masks, a bias, dropout and score functions beside what they are held against.

    window (1024 keys), prefix (a quarter of the sequence) and causal are block masks beside
    compiled FlexAttention's of the same predicate and blocks of 128; documents and
    causal-documents, 16 of uneven lengths in one row of all the tokens, also beside our packed
    sequences. score is a slope a head times the distance to the key, beside FlexAttention. dropout
    (0.1) and bias (1, heads, S, S) stand beside the same call without; learned-bias is the backward
    with the bias's gradient.

    FLOPs are those of the pairs that a mask keeps, counted exactly. Each result is held to fp64 at
    its shape before it is timed. The last lines are our rate over that of each other.
    """
    device = device or default_device()
    need_gpu(device)
    from ..bench.beside import comparisons, run_comparisons, summary
    from ..bench.providers import provider
    from ..bench.run import warn

    options |= QUICK if quick else {}
    seqlens, tokens, heads = (options.pop(name) for name in QUICK)
    if len(tokens) > 1 or any(tokens[0] % seqlen for seqlen in seqlens):
        raise click.UsageError("--tokens is one number that every one of --seqlens divides")
    asked = []
    try:
        chosen = provider(ours)
        for of in heads:
            common = dict(tokens=tokens[0], heads=of, dtype=DTYPES[dtype])
            asked += comparisons(cases, passes, seqlens, chosen, against, **common)
    except (KeyError, ValueError) as error:
        raise click.UsageError(str(error.args[0])) from error
    show = warn if as_json else click.echo
    done = run_comparisons(asked, device=device, show=show, **options)
    outcomes = [outcome for compared in done for outcome in compared.outcomes.values()]
    if as_json:
        for outcome in outcomes:
            if outcome.row is not None:
                click.echo(json.dumps(dataclasses.asdict(outcome.row)))
    show("\n" + "\n".join(summary(done)))
    if any(outcome.wrong for outcome in outcomes if outcome.provider == chosen.name):
        raise SystemExit(Exit.FAILED)
