"""`tilewise explain`: who serves a call and why, with which launches, at which roof. No GPU."""

from __future__ import annotations

import json

import click

from .bench import together
from .options import DTYPES, OneInt
from .packed_options import DIRECTIONS
from .picture import png_option, roofline
from .tables import NO, OK, console, digits, table

SCORES = ("window", "softcap", "alibi", "sinks")
call_options = together(
    click.option("--pass", "direction", type=click.Choice(DIRECTIONS), default="fwd"),
    click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True),
    click.option("--batch", type=click.IntRange(1), default=1, show_default=True),
    click.option("--seqlen", type=OneInt(), default="4k", show_default=True),
    click.option("--seqlen-k", type=OneInt(), help="Keys, where they are not as many."),
    click.option("--heads", type=click.IntRange(1), default=16, show_default=True),
    click.option("--kv-heads", type=click.IntRange(1), help="Where they are fewer (GQA)."),
    click.option("--headdim", type=click.IntRange(1), default=128, show_default=True),
    click.option("--headdim-v", type=click.IntRange(1), help="Where it is another."),
    click.option("--causal", is_flag=True),
    click.option("--lengths", help="Packed sequences: zipf, equal512, ... or 160,300."),
)
feature_options = together(
    click.option("--window", type=click.IntRange(0), help="Keys before its own; with --causal."),
    click.option("--softcap", type=click.FloatRange(0), default=0.0),
    click.option("--alibi", is_flag=True),
    click.option("--sinks", is_flag=True),
    click.option("--modifier", default="", help="A mask, bias, ...: `bench modifiers --cases`."),
    click.option("--deterministic", is_flag=True, help="Gradients of the same bits in every run."),
)


@click.command()
@call_options
@feature_options
@click.option("--backend", help="Force one.")
@click.option("--on", "target", help="sm80, sm89, sm90, sm100, sm120, gfx942, gfx950 or cpu.")
@click.option("--gpu", help="A card by name, for its SMs and its roof: h200, h100, a100, ...")
@click.option("--compile/--no-compile", "with_compiler", default=True, help="Seconds a kernel.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
@png_option
def explain(backend, target, gpu, with_compiler, as_json, png, **options) -> None:
    """Who serves a call and why; kernel, tile, registers, waves, FLOPs, bytes, roofline.

    Nothing runs on a GPU: backends answer as they would on the one that --on or --gpu names, and
    kernels are compiled for it here. Left out, it is the GPU of this machine, or an H200.
    """
    from ..bench.explain import CPU
    from ..bench.explain import explain as explained

    target, card = machine_of(target, gpu)
    deterministic = options.pop("deterministic")
    shape = shape_of(**options)
    try:
        found = explained(shape, target, card, backend, deterministic, with_compiler)
    except (KeyError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    except ImportError as error:
        raise click.ClickException(f"no kernels without Triton: {error}") from error
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        raise click.ClickException(f"no room for tensors of this shape: {error}") from error
    if as_json:
        click.echo(json.dumps(as_record(found), indent=1))
    else:
        show(console(), found)
    if png and found.backend:
        title = f"{shape} on {found.card.name if target != CPU else 'this CPU'}"
        moved, flops = found.work.moved, found.work.flops
        points = {"each tensor once": flops / moved.once, "no cache": flops / moved.tiled}
        roofline(png, title, found.work.roof, points)


def machine_of(target: str | None, gpu: str | None):
    """The target and the card that are asked for, or those of this machine, or an H200."""
    from ..bench.cards import CARDS, card_for, card_here
    from ..bench.explain import CPU

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
    from ..bench.lengths import sequences
    from ..bench.modifiers import NAMES
    from ..bench.shapes import Shape

    kv_heads, headdim_v = kv_heads or heads, headdim_v or headdim
    lengths, modifier = options["lengths"] or "", options["modifier"]
    if heads % kv_heads:
        raise click.UsageError("--heads is a multiple of --kv-heads")
    if options["window"] is not None and not options["causal"]:
        raise click.UsageError("--window lies before a causal diagonal: --causal")
    if modifier and modifier not in NAMES:
        raise click.UsageError(f"--modifier {modifier!r} is unknown: {', '.join(NAMES)}")
    others = lengths or options["causal"] or any(options[name] for name in SCORES)
    if modifier and (others or seqlen_k not in (None, seqlen)):
        raise click.UsageError("--modifier goes with no other feature and with equal lengths")
    if lengths:
        try:
            each = sequences(lengths)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        batch, seqlen, seqlen_k = len(each), max(each), max(each)
    sizes = direction, batch, seqlen, seqlen_k or seqlen, heads, kv_heads, headdim, headdim_v
    return Shape(*sizes, options.pop("causal"), DTYPES[dtype], **{**options, "lengths": lengths})


def show(screen, found) -> None:
    """Tables: who serves, in which launches, how much work."""
    where = f"{found.card.name} ({found.target})" if found.card else "this CPU"
    screen.print(f"{found.shape} on {where}")
    marks = {"serves": OK}
    rows = [
        (x.backend, marks.get(x.kind, NO), said(x, found.backend, found.forced))
        for x in found.answers
    ]
    screen.print(table(["backend", "", ""], rows))
    if found.how:
        screen.print(found.how)
    if not found.backend:
        screen.print("nothing serves this call.")
        return
    if found.launches:
        rows = zip(LAUNCH, *map(launch_column, found.launches))
        kernels = [one.launch.kernel for one in found.launches]
        screen.print(table(["launch", *kernels], rows))
        for failed in {x.failed for x in found.launches if x.failed}:
            screen.print(f"the compiler's part is missing: {failed}")
    screen.print(table(["work", ""], work_rows(found)))
    screen.print(verdict(found))


def said(answer, chosen: str, is_forced: bool) -> str:
    """An answer in words; the chosen one is named."""
    if answer.backend == chosen:
        why = "forced" if is_forced else "the first that serves"
        return f"chosen: {why}{f' ({answer.reason})' if answer.reason else ''}"
    return answer.reason or "would serve, and comes later"


def launch_column(one) -> list[str]:
    """What LAUNCH asks of a launch."""
    launch, built = one.launch, one.built
    needs = ["-"] * 5
    if built is not None:
        fits = "-"
        if built.occupancy is not None:
            share = f"{100 * built.occupancy.share:.0f} % of its warps"
            fits = f"{built.occupancy.programs}, {share}; no more {built.occupancy.limit}"
        spills = f"{built.spills} bytes a thread" if built.spills else "none"
        needs = [built.warps, built.registers, spills, f"{built.shared_memory:,} bytes", fits]
    spread = f"{one.waves.waves:.2f} of {one.waves.at_once}"
    busy = f"{100 * one.waves.tail:.0f} % of the SMs, over all waves"
    tile = f"{launch.block_m} queries x {launch.block_n} keys"
    programs = "one an SM, tile after tile" if launch.is_persistent else "one a tile"
    return [tile, launch.stages, *needs, f"{launch.tiles:,}", programs, spread, busy]


LAUNCH = (
    *("tile", "slots for tiles in flight", "warps", "registers a thread", "spilled"),
    *("shared memory", "programs on an SM", "tiles", "programs", "waves", "busy"),
)


def work_rows(found) -> list[tuple[str, str]]:
    """FLOPs, bytes, intensity and the roof."""
    work, roof = found.work, found.work.roof
    rows = [
        ("pairs of query and key", f"{int(work.pairs):,}"),
        ("FLOPs of these pairs", f"{work.flops / 1e9:,.1f} G"),
    ]
    if work.done is not None:
        said = f"{work.done / 1e9:,.1f} G, {work.done / work.flops:.2f} times that: whole tiles"
        said += ", with what is recomputed" if found.shape.direction != "fwd" else ""
        rows.append(("FLOPs of its tiles", said))
    once = f"{work.moved.once / 1e6:,.1f} MB, {plain(work.intensity)} FLOPs a byte"
    rows.append(("bytes, each tensor once", once))
    if found.launches:
        tiled = f"{work.moved.tiled / 1e6:,.1f} MB, {plain(work.flops / work.moved.tiled)} FLOPs"
        rows.append(("bytes, were there no cache", f"{tiled} a byte"))
    height = f"{plain(roof.tflops)} TFLOP/s, {digits(roof.bandwidth)} TB/s"
    return [*rows, ("roof", height), ("", roof.source)]


def verdict(found) -> str:
    """One sentence."""
    work = found.work
    limit = "arithmetic" if work.side == "compute" else "memory"
    sign = "at least" if work.side == "compute" else "under"
    return (
        f"{found.backend} serves it. Limit: {limit}, with {plain(work.intensity)} FLOPs a byte, "
        f"{sign} the {plain(work.roof.ridge)} of the ridge; {digits(work.least_ms)} ms at the roof."
    )


def plain(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else digits(value)


def as_record(found) -> dict:
    """The explanation as JSON takes it."""
    work = found.work
    launches = []
    for one in found.launches:
        built = one.built._asdict() if one.built else None
        if built and one.built.occupancy:
            built["occupancy"] = one.built.occupancy._asdict()
        plain = {k: v for k, v in one.launch._asdict().items() if k != "build"}
        launches.append({**plain, "built": built, "failed": one.failed, **one.waves._asdict()})
    sums = dict(intensity=work.intensity, side=work.side, least_ms=work.least_ms)
    fields = {**work._asdict(), "moved": work.moved._asdict(), "roof": work.roof._asdict(), **sums}
    return {
        "shape": found.shape._asdict(),
        "target": found.target,
        "card": found.card.name if found.card else None,
        "backend": found.backend,
        "answers": [answer._asdict() for answer in found.answers],
        "launches": launches,
        "how": found.how,
        "work": fields,
    }
