"""`python -m benchmarks blocks`: speed, registers, shared memory, occupancy by tile."""

from __future__ import annotations

import json

import click

from tilewise.cli.bench.options import print_rows, round_options, row_options
from tilewise.cli.options import DTYPES, Exit, IntList, OneInt
from tilewise.cli.picture import png_option
from tilewise.cli.tables import console, digits, table

NEEDS = ("registers", "spilled", "smem KiB", "programs", "occupancy")
SPEED = ("ms", "TFLOP/s")


class TileList(click.ParamType):
    """`128x64,64x64`: queries by keys, powers of two from 16 on."""

    name = "tiles"

    def convert(self, value, param, ctx) -> tuple[tuple[int, int], ...]:
        if isinstance(value, tuple):
            return value
        try:
            sides = (map(int, part.split("x")) for part in value.split(","))
            found = tuple((rows, columns) for rows, columns in sides)
        except ValueError:
            found = ()
        fits = all(n >= 16 and not n & (n - 1) for tile in found for n in tile)
        if not found or not fits:
            self.fail(f"{value!r} is not a list such as 128x64,64x64, powers of two from 16 on")
        return found


@click.command()
@click.option(
    "--tiles",
    type=TileList(),
    default="32x64,64x32,64x64,64x128,128x32,128x64,128x128,256x64",
    show_default=True,
)
@click.option("--warps", type=IntList(), default="4,8", show_default=True)
@click.option("--stages", type=IntList(), default="2,3", show_default=True)
@click.option("--kernel", type=click.Choice(["fwd", "bwd_dkdv", "bwd_dq"]), default="fwd")
@click.option("--pass", "direction", type=click.Choice(["fwd", "bwd"]), help="bwd: bwd_dkdv.")
@click.option("--seqlen", type=OneInt(), default="4k", show_default=True)
@click.option("--headdim", type=click.IntRange(1, 512), default=128, show_default=True)
@click.option("--causal", is_flag=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)[:3]), default="bf16", show_default=True)
@click.option("--on", "target", help="Compile for sm80, sm89, sm90, ...; the GPU here, or sm90.")
@round_options
@row_options
@png_option
def blocks(
    tiles, warps, stages, kernel, direction, target, device, rounds, round_ms, **options
) -> None:
    """A portable kernel in every tile: registers, spills, shared memory, occupancy, and its speed.

    What a kernel needs is the compiler's word, for which no GPU is needed; then there is no speed.
    programs are those that fit on one SM, occupancy their share of its warps. On a GPU each tile is
    held to fp64 and timed in turn with the others, 16 Ki tokens and hidden size 2048. spilled is
    bytes a thread. The line with * is what the tables choose.
    """
    from tilewise.bench.shapes import square

    from ..blocks import KERNELS

    kernel = "bwd_dkdv" if direction == "bwd" and kernel == "fwd" else kernel
    sizes = options.pop("seqlen"), options.pop("headdim"), options.pop("causal")
    shape = square(KERNELS[kernel], *sizes, dtype=DTYPES[options.pop("dtype")])
    try:
        target, where = target_of(target, device)
        asked, timing = (tiles, warps, stages), (where, rounds, round_ms)
        done = run(shape, kernel, asked, target, timing, **options)
    except ImportError as error:
        raise click.ClickException(f"no kernels without Triton: {error}") from error
    if any(x.outcome and x.outcome.wrong for x in done):
        raise SystemExit(Exit.FAILED)


def target_of(target: str | None, device: str | None) -> tuple[str, str]:
    """What is compiled for, and the device to time on where that is the GPU here, else ""."""
    import torch

    from tilewise.testing import TARGETS
    from tilewise.tuning.select import architecture

    here, where = None, device or "cuda"
    if where != "cpu" and torch.cuda.is_available():
        here = architecture(torch.device(where))
    target = target or here or "sm90"
    if target not in TARGETS:
        raise click.UsageError(f"--on is one of {', '.join(TARGETS)}, not {target}")
    return target, where if target == here else ""


def run(shape, kernel, asked, target, timing, *, save, as_json, png) -> list:
    """Compiles all, times them where they run, and shows them."""
    from ..blocks import compile_all, configs, time_all

    screen = console(as_json)
    tell = lambda line: screen.print(line, style="dim")  # noqa: E731
    done = compile_all(shape, kernel, configs(*asked), target, show=tell)
    where, rounds, round_ms = timing
    if where:
        run = dict(device=where, rounds=rounds, round_ms=round_ms, save=save)
        done = time_all(shape, kernel, done, **run)
        print_rows((x.outcome.row for x in done if x.outcome is not None), as_json)
    elif as_json:
        for x in done:
            click.echo(json.dumps(as_record(x)))
    show(screen, done, f"kernel {kernel}, {shape}, {target}")
    if save and not where:
        screen.print("nothing was saved: rows are timed, and that takes the GPU")
    if png:
        draw(png, done, f"kernel {kernel}, {shape}, {target}")
    return done


def show(screen, done: list, title: str) -> None:
    """The fastest first; without times as asked."""
    is_timed = any(x.outcome for x in done)
    if is_timed:
        done = sorted(
            done, key=lambda x: x.outcome.row.median_ms if x.outcome.row else float("inf")
        )
    columns = ["tile", *NEEDS, *(SPEED if is_timed else ()), "limit"]
    rows = [cells(x, is_timed) for x in done]
    screen.print(f"\n{title}")
    screen.print(table(columns, rows, numbers=columns[:-1]))


def cells(x, is_timed: bool) -> tuple:
    """A candidate's line."""
    built, fits = x.built, x.built.occupancy if x.built else None
    needs = ["-"] * 3
    if built is not None:
        needs = [built.registers, built.spills, f"{built.shared_memory / 1024:.0f}"]
    needs += [fits.programs, f"{100 * fits.share:.0f} %"] if fits else ["-", "-"]
    why, speed = x.failed or (fits.limit if fits else ""), ()
    if is_timed:
        row = x.outcome.row
        speed = (digits(row.median_ms), digits(row.tflops)) if row else ("-", "-")
        why = x.outcome.wrong or x.outcome.refused or why
    return x.name + (" *" if x.is_default else ""), *needs, *speed, why


def as_record(x) -> dict:
    """A candidate that was not timed, as JSON takes it."""
    built = x.built._asdict() if x.built else None
    if built and x.built.occupancy:
        built["occupancy"] = x.built.occupancy._asdict()
    fields = dict(name=x.name, config=list(x.config), is_default=x.is_default)
    return {**fields, "failed": x.failed, "built": built}


def draw(path: str, done: list, title: str) -> None:
    """Speed of each tile if there is one, else its registers and shared memory."""
    from tilewise.cli.picture import Axes, bars

    nothing = float("nan")
    names = [x.name for x in done]
    if any(x.outcome for x in done):
        speeds = [x.outcome.row.tflops if x.outcome.row else nothing for x in done]
        bars(path, Axes(title, "", "TFLOP/s"), names, {"TFLOP/s": speeds})
        return
    registers = [x.built.registers if x.built else nothing for x in done]
    memory = [x.built.shared_memory / 1024 if x.built else nothing for x in done]
    spills = [x.built.spills if x.built else nothing for x in done]
    series = {
        "registers a thread": registers,
        "shared memory, KiB": memory,
        "spilled bytes a thread": spills,
    }
    bars(path, Axes(title, "", ""), names, series)
