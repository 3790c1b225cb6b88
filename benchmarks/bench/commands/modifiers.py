"""`python -m benchmarks bench modifiers`: what masks, a bias, dropout and score functions cost."""

from __future__ import annotations

import click

from tilewise.cli.options import DTYPES, IntList, NameList

from ...options import (
    HeadList,
    conclude,
    our_options,
    pass_option,
    providers_of,
    run_options,
    show_with,
)

QUICK = dict(seqlens=(256,), tokens=(512,), heads=((2, 2, 32),))


def cases() -> tuple[str, ...]:
    """Every modifier."""
    from tilewise.explain.modifiers import NAMES

    return NAMES


def lanes() -> tuple[str, ...]:
    """What modifiers are held against."""
    from ..beside import LANES

    return LANES


@click.command()
@click.option(
    "--cases",
    type=NameList(cases),
    default="window,prefix,causal,documents,causal-documents,score,dropout,bias,learned-bias",
    show_default=True,
)
@pass_option("fwd,bwd")
@click.option("--seqlens", type=IntList(), default="4k,16k", show_default=True)
@click.option(
    "--tokens", type=IntList(), default="16k", show_default=True, help="Tokens per batch."
)
@click.option(
    "--heads",
    type=HeadList(),
    default="16x128",
    show_default=True,
    help="QUERY_HEADS[:KEY_HEADS]xHEADDIM.",
)
@click.option(
    "--quick", is_flag=True, help="512 tokens, sequence length 256, 2 heads with headdim 32."
)
@our_options
@click.option(
    "--against",
    type=NameList(lanes),
    default="flex,packed,without",
    show_default=True,
    help="References; each case uses those that it has.",
)
@click.option(
    "--sustained",
    is_flag=True,
    help="Time back-to-back calls, as in `bench --sustained`.",
)
@run_options
def modifiers(cases, passes, quick, dtype, ours, against, as_json, **options) -> None:
    """Time masks, a bias, dropout and score functions, and compare each with a reference.

    window (1024 keys), prefix (a quarter of the sequence) and causal are block masks, compared with
    compiled FlexAttention, with the same predicate and 128 x 128 blocks. documents and
    causal-documents pack 16 documents of uneven lengths into one row; they are also compared with
    packed sequences. score adds a slope per head times the distance, compared with FlexAttention.
    dropout (0.1) and bias (1, heads, S, S) are compared with the same call without them.
    learned-bias is the backward with the bias's gradient.

    FLOPs count exactly the pairs that a mask keeps. Each result is checked against fp64 at its
    shape before it is timed. The last lines print tilewise's rate divided by each reference's.
    """
    from ..beside import comparisons, run_comparisons, summary

    options |= QUICK if quick else {}
    seqlens, tokens, heads = (options.pop(name) for name in QUICK)
    if len(tokens) > 1 or any(tokens[0] % seqlen for seqlen in seqlens):
        raise click.UsageError("--tokens is one number that every one of --seqlens divides")
    asked, (chosen,) = [], providers_of(ours)
    try:
        for of in heads:
            common = dict(tokens=tokens[0], heads=of, dtype=DTYPES[dtype])
            asked += comparisons(cases, passes, seqlens, chosen, against, **common)
    except ValueError as error:
        raise click.UsageError(f"--tokens, --seqlens, --heads: {error}") from error
    done = run_comparisons(asked, show=show_with(as_json), **options)
    outcomes = [outcome for compared in done for outcome in compared.outcomes.values()]
    conclude(outcomes, summary(done), as_json, [chosen.name])
