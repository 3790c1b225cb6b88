"""`tilewise explain`: which backend serves a call and why, its launches, its roofline. No GPU."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import click

from ..features import FEATURES, OPTIONS
from .explain_tables import (
    common_record,
    launch_column,
    plain,
    roof_rows,
    show_answers,
    show_launches,
    title_of,
    verdict,
)
from .options import DIRECTIONS, DTYPES, FP8, Exit, Finite, Known, OneInt, backend_option, together
from .picture import png_option, roofline
from .tables import console, digits, table

SCORES = "window", *OPTIONS
REQUESTS = *SCORES, "modifier", "deterministic"


def _sequences(lengths: str) -> tuple[int, ...]:
    from ..explain.lengths import sequences

    return sequences(lengths)


def table_options(command: Callable) -> Callable:
    """The options of the table: flags that ask for a tensor, and numbers."""
    for option, name in reversed(OPTIONS.items()):
        kind = {"is_flag": True} if FEATURES[name].shapes else {"type": Finite(0), "default": 0.0}
        command = click.option(f"--{option}", **kind)(command)  # pyright: ignore
    return command


call_options = together(
    click.option("--pass", "direction", type=click.Choice(DIRECTIONS), default="fwd"),
    click.option(
        "--dtype",
        type=click.Choice([*DTYPES, *FP8]),
        default="bf16",
        show_default=True,
        help="fp8 prints which backend supports e4m3, and whether its matmuls run in 8 bits.",
    ),
    click.option("--batch", type=click.IntRange(1), default=1, show_default=True),
    click.option("--seqlen", type=OneInt(), help="Queries.  [default: 4k; with --cache 1]"),
    click.option("--seqlen-k", type=OneInt(), help="Keys, if not as many as queries."),
    click.option("--heads", type=click.IntRange(1), default=16, show_default=True),
    click.option("--kv-heads", type=click.IntRange(1), help="If fewer (GQA)."),
    click.option("--headdim", type=click.IntRange(1), default=128, show_default=True),
    click.option("--headdim-v", type=click.IntRange(1), help="V's, if different."),
    click.option("--causal", is_flag=True),
    click.option(
        "--lengths",
        type=Known(_sequences),
        help="Packed sequences: zipf, equal512, ... or 160,300.",
    ),
)
feature_options = together(
    click.option(
        "--window",
        type=click.IntRange(0),
        help="Visible keys before a query's own; needs --causal.",
    ),
    table_options,
    click.option(
        "--modifier",
        default="",
        help="A mask, bias, ... as in `bench modifiers --cases`, with no other feature.",
    ),
    click.option("--deterministic", is_flag=True, help="Gradients are bitwise equal in every run."),
)


cache_options = together(
    click.option("--cache", "has_cache", is_flag=True, help="A decoding step with a KV cache."),
    click.option("--page-size", type=click.IntRange(0), help="Keys per page; 0 means no pages."),
    click.option("--split-size", type=click.IntRange(1), help="Keys per split."),
)


@click.command(short_help="Show which backend runs a call, why, and its launches; needs no GPU.")
@call_options
@feature_options
@cache_options
@backend_option
@click.option("--on", "target", help="sm80, sm89, sm90, sm100, sm120, gfx942, gfx950 or cpu.")
@click.option("--gpu", help="A card, for its SMs and roofline: h200, h100, a100, ...")
@click.option(
    "--compile/--no-compile",
    "with_compiler",
    default=True,
    help="Compiling takes seconds per kernel.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@png_option
def explain(
    backend, target, gpu, with_compiler, as_json, png, has_cache, page_size, split_size, **options
) -> None:
    """Show which backend runs a call and why, with kernels, tiles, registers, waves and roofline.

    Nothing runs on a GPU: backends answer for the GPU that --on or --gpu names, and kernels are
    compiled for it here. The default is this machine's GPU, or else an H200.

    --cache is a causal step with --seqlen queries (1) per sequence, and --seqlen-k keys (8k) or
    those in --lengths. It prints splits, the slots for their sums, and bytes.

    If no backend supports the call, the exit code is 1.
    """
    target, card = machine_of(target, gpu)
    if not has_cache and (page_size is not None or split_size is not None):
        raise click.UsageError("--page-size and --split-size are of a cache: --cache")
    if options["dtype"] in FP8 and (has_cache or png or options["direction"] != "fwd"):
        raise click.UsageError("--dtype fp8 is of forwards, without --cache and --png")
    page = sys.modules[__name__]
    with in_words():
        if has_cache:
            from ..explain.cache import explain_cache
            from . import explain_cache as page

            step = page.step_of(options, page_size, REQUESTS)
            explanation = explain_cache(step, target, card, split_size, backend, with_compiler)
        else:
            from ..explain.dense import explain as explained

            deterministic, shape = options.pop("deterministic"), shape_of(**options)
            explanation = explained(shape, target, card, backend, deterministic, with_compiler)
    if as_json:
        click.echo(json.dumps(page.as_record(explanation), indent=1))
    else:
        page.show(console(), explanation)
    if not explanation.backend:
        raise SystemExit(Exit.FAILED)
    if png:
        work: Any = explanation.work
        roofline(png, title_of(explanation), work.roof, page.points_of(explanation))


@contextlib.contextmanager
def in_words():
    """What cannot be explained, as a message."""
    try:
        yield
    except (KeyError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    except ImportError as error:
        raise click.ClickException(f"no kernels without Triton: {error}") from error
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        raise click.ClickException(f"no room for tensors of this shape: {error}") from error


def points_of(explanation) -> dict[str, float]:
    """The points of its picture."""
    moved, flops = explanation.work.moved, explanation.work.flops
    return {"each tensor once": flops / moved.once, "no cache": flops / moved.tiled}


def machine_of(target: str | None, gpu: str | None):
    """The target and the card that are asked for, or those of this machine, or an H200."""
    from ..explain.cards import CARDS, card_for, card_here
    from ..explain.dense import CPU

    if gpu is not None and gpu.lower() not in CARDS:
        raise click.UsageError(f"--gpu {gpu!r} is unknown: {', '.join(CARDS)}")
    card = CARDS[gpu.lower()] if gpu else None
    targets = list(dict.fromkeys(one.target for one in CARDS.values()))
    if target is not None and target not in (*targets, CPU):
        raise click.UsageError(f"--on {target!r} is unknown: {', '.join(targets)}, {CPU}")
    if target == CPU:
        if card is not None:
            raise click.UsageError("--on cpu and --gpu exclude each other")
        return CPU, None
    if card is not None and target not in (None, card.target):
        raise click.UsageError(f"--gpu {card.name} is {card.target}, not {target}")
    if card is None:
        card = card_for(target) if target else card_here() or CARDS["h200"]
    return card.target, card


def shape_of(
    direction, dtype, batch, seqlen, seqlen_k, heads, kv_heads, headdim, headdim_v, **options
):
    """The shape that the options ask for; UsageError where there is none such."""
    from ..explain.modifiers import NAMES
    from ..explain.shapes import Shape

    kv_heads, headdim_v, seqlen = kv_heads or heads, headdim_v or headdim, seqlen or 4096
    lengths, modifier = options["lengths"] or "", options["modifier"]
    if heads % kv_heads:
        raise click.UsageError("--heads must be a multiple of --kv-heads")
    if options["window"] is not None and not options["causal"]:
        raise click.UsageError("--window lies before a causal diagonal: --causal")
    if modifier and modifier not in NAMES:
        raise click.UsageError(f"--modifier {modifier!r} is unknown: {', '.join(NAMES)}")
    other_features = lengths or options["causal"] or any(options[name] for name in SCORES)
    if modifier and (other_features or seqlen_k not in (None, seqlen)):
        raise click.UsageError("--modifier takes no other feature and equal lengths")
    if lengths:
        seqlens = _sequences(lengths)
        batch, seqlen, seqlen_k = len(seqlens), max(seqlens), max(seqlens)
    return Shape(
        direction=direction,
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen_k or seqlen,
        nheads=heads,
        nheads_k=kv_heads,
        headdim=headdim,
        headdim_v=headdim_v,
        dtype=(DTYPES | FP8)[dtype],
        **{**options, "lengths": lengths},
    )


def show(screen, explanation) -> None:
    """Tables: backends, launches, work."""
    work, what = explanation.work, str(explanation.shape)
    if show_answers(screen, explanation, what=what, how=explanation.how) and work:
        show_launches(screen, explanation, columns=list(map(launch_column, explanation.launches)))
        screen.print(table(["work", ""], work_rows(explanation)))
        screen.print(verdict(explanation, f"{digits(work.least_ms)} ms"))


def work_rows(explanation) -> list[tuple[str, str]]:
    """FLOPs, bytes, intensity and the roof."""
    work, roof = explanation.work, explanation.work.roof
    rows = [
        ("pairs of query and key", f"{int(work.pairs):,}"),
        ("FLOPs of these pairs", f"{work.flops / 1e9:,.1f} G"),
    ]
    if work.done is not None:
        said = f"{work.done / 1e9:,.1f} G, {work.done / work.flops:.2f} times that: whole tiles"
        said += ", with what is recomputed" if explanation.shape.direction != "fwd" else ""
        rows.append(("FLOPs of its tiles", said))
    once = f"{work.moved.once / 1e6:,.1f} MB, {plain(work.intensity)} FLOPs a byte"
    rows.append(("bytes, each tensor once", once))
    if explanation.launches:
        tiled = f"{work.moved.tiled / 1e6:,.1f} MB, {plain(work.flops / work.moved.tiled)} FLOPs"
        rows.append(("bytes, were there no cache", f"{tiled} a byte"))
    return [*rows, *roof_rows(roof)]


def as_record(explanation) -> dict:
    """The explanation as JSON takes it."""
    work, common = explanation.work, common_record(explanation)
    if work is None:
        return {**common, "products": explanation.how}
    launches = [one.record for one in explanation.launches]
    sums = dict(intensity=work.intensity, side=work.side, least_ms=work.least_ms)
    fields = {**work._asdict(), "moved": work.moved._asdict(), "roof": work.roof._asdict(), **sums}
    return {**common, "launches": launches, "how": explanation.how, "work": fields}
