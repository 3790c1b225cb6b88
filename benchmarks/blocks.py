"""`python -m benchmarks blocks`: a portable kernel in every tile, its speed beside what it needs.

Larger tiles read K and V less often and need more registers and shared memory, until few programs
fit on an SM, or registers spill. What a kernel needs the compiler tells, without a GPU; speed takes
one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from tilewise.cli.options import DTYPES, IntList, Listed, OneInt
from tilewise.cli.picture import Axes
from tilewise.cli.tables import console, digits, table
from tilewise.explain.call import call_of
from tilewise.explain.launches import Built, build_launch, built_of, portable_launches
from tilewise.explain.shapes import Shape
from tilewise.tuning.select import architecture, override
from tilewise.tuning.tables import Config

from .bench.providers import provider
from .bench.row import Row, append, stamp
from .bench.run import Outcome, Ready, Stage, time_ready
from .bench.shapes import square
from .options import fail_if, output_options, print_rows, progress, round_options
from .pictures import bars

KERNELS = {"fwd": "fwd", "bwd_dkdv": "bwd", "bwd_dq": "bwd"}  # and the pass each is timed in
PORTABLE = "tilewise:portable"
SCORES_A_THREAD = 64  # of a tile, where more always spill


class Candidate(NamedTuple):
    """A configuration; what the compiler made of it or why nothing; and its time."""

    name: str
    config: Config
    built: Built | None
    failed: str
    is_default: bool  # what the tables say
    outcome: Outcome | None = None

    @property
    def row(self) -> Row | None:
        """Where it was timed."""
        return self.outcome.row if self.outcome else None


def configs(
    tiles: Iterable[tuple[int, int]],
    warps: Iterable[int],
    stages: Iterable[int],
    descriptors: Iterable[bool] = (False,),
) -> Iterator[Config]:
    """Every combination whose tile of scores fits the registers of its warps."""
    for (m, n), count, depth, described in itertools.product(tiles, warps, stages, descriptors):
        if m * n <= SCORES_A_THREAD * 32 * count:
            yield Config(m, n, count, depth, described)


def name_of(config: Config) -> str:
    """`128x64 w4 s3`."""
    how = " tma" if config.descriptors else ""
    return f"{config.BLOCK_M}x{config.BLOCK_N} w{config.num_warps} s{config.num_stages}{how}"


def launch_of(shape: Shape, kernel: str, target: str, config: Config | None = None) -> Any:
    """The kernel's launch, by default in the tables' tile; of a short call, as lengths do not
    change what is compiled.
    """
    short = shape._replace(batch=1, seqlen_q=1024, seqlen_k=1024)
    with override(**({} if config is None else {kernel: config})):
        launches = portable_launches(call_of(short), target, KERNELS[kernel])
    return next(x for x in launches if x.kernel.__name__ == f"attn_{kernel}_kernel")


def config_of(launch: Any) -> Config:
    """The configuration of a launch."""
    tile, how = launch.constants["TILE"], launch.options
    pipeline = how["num_warps"], how["num_stages"]
    return Config(tile.BLOCK_M, tile.BLOCK_N, *pipeline, tile.DESCRIPTORS)


def compile_all(
    shape: Shape,
    kernel: str,
    asked: Iterable[Config],
    target: str,
    show: Callable[[str], None] = print,
) -> list[Candidate]:
    """Each configuration compiled for a target, the one that tables choose among them."""
    usual = config_of(launch_of(shape, kernel, target))
    found = []
    for config in dict.fromkeys([usual, *asked]):
        built, failed = _build(launch_of(shape, kernel, target, config), target)
        name = name_of(config)
        needs = f"{built.registers} registers, {built.spills} spilled" if built else failed
        show(f"{name}: {needs}")
        found.append(Candidate(name, config, built, failed, config == usual))
    return found


def _build(launch: Any, target: str) -> tuple[Built | None, str]:
    from tilewise.testing import SMEM_LIMIT

    try:
        built = built_of(build_launch(launch, target), target)
    except Exception as error:  # what does not compile is a result
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if built.shared_memory > SMEM_LIMIT[target]:
        return built, f"{built.shared_memory:,} bytes of shared memory, over {SMEM_LIMIT[target]:,}"
    return built, ""


def time_all(
    shape: Shape,
    kernel: str,
    candidates: list[Candidate],
    *,
    device: str,
    rounds: int = 5,
    round_ms: float = 20.0,
    save: str | Path | None = None,
) -> list[Candidate]:
    """The same with times: each is checked, then rounds are interleaved. Of a backward kernel the
    whole backward is timed, its other kernels as the tables say.
    """
    shape = shape._replace(direction=KERNELS[kernel])
    stage, common = Stage(shape, device), stamp("blocks", device)
    tried: dict[str, Ready | Outcome] = {}
    for one in candidates:
        if one.failed:
            tried[one.name] = Outcome(shape, one.name, None, refused=one.failed)
            continue
        forced = {kernel: one.config}
        with override(**forced):
            ready = stage.ready(provider(PORTABLE)._replace(name=f"{PORTABLE}:{one.name}"))
        if isinstance(ready, Ready):
            ready = ready._replace(call=_under(forced, ready.call))
        tried[one.name] = ready
    entries = {one.name: (shape, provider(PORTABLE)) for one in candidates}
    outcomes = time_ready(entries, tried, common, device, rounds, round_ms)
    done = [_finished(one, kernel, x) for one, x in zip(candidates, outcomes)]
    if save is not None:
        append(save, [one.row for one in done if one.row is not None])
    return done


def _under(forced: dict, call: Callable[[], object]) -> Callable[[], object]:
    def forced_call():
        with override(**forced):
            return call()

    return forced_call


def _finished(one: Candidate, kernel: str, outcome: Outcome) -> Candidate:
    """With its outcome, whose row says what was launched."""
    if (row := outcome.row) is not None:
        built = one.built.record if one.built else {}
        extra = {"kernel": kernel, "config": list(one.config), "built": built}
        extra["is_default"] = one.is_default
        outcome = outcome._replace(row=dataclasses.replace(row, extra={**row.extra, **extra}))
    return one._replace(outcome=outcome)


NEEDS = ("registers", "spilled", "smem KiB", "programs", "occupancy")
SPEED = ("ms", "TFLOP/s")


class TileList(Listed):
    """`128x64,64x64`: queries by keys, powers of two from 16 on."""

    name = "tiles"
    such = "such as 128x64,64x64, powers of two from 16 on"

    def read(self, text: str) -> tuple[int, int]:
        rows, columns = map(int, text.split("x"))
        if any(n < 16 or n & (n - 1) for n in (rows, columns)):
            raise ValueError(text)
        return rows, columns


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
@output_options
def blocks(
    tiles, warps, stages, kernel, direction, target, device, rounds, round_ms, **options
) -> None:
    """A portable kernel in every tile: registers, spills, shared memory, occupancy, and its speed.

    What a kernel needs is the compiler's word, for which no GPU is needed; then there is no speed.
    programs are those that fit on one SM, occupancy their share of its warps. On a GPU each tile is
    held to fp64 and timed in interleaved rounds, 16 Ki tokens and hidden size 2048. spilled is
    bytes a thread. The line with * is what the tables choose.
    """
    kernel = "bwd_dkdv" if direction == "bwd" and kernel == "fwd" else kernel
    sizes = options.pop("seqlen"), options.pop("headdim"), options.pop("causal")
    shape = square(KERNELS[kernel], *sizes, dtype=DTYPES[options.pop("dtype")])
    try:
        target, where = target_of(target, device)
        asked, timing = (tiles, warps, stages), (where, rounds, round_ms)
        done = run(shape, kernel, asked, target, timing, **options)
    except ImportError as error:
        raise click.ClickException(f"no kernels without Triton: {error}") from error
    fail_if(any(x.outcome and x.outcome.wrong for x in done))


def target_of(target: str | None, device: str) -> tuple[str, str]:
    """What is compiled for, and the device to time on where that is the GPU here, else ""."""
    from tilewise.testing import TARGETS

    here = None if device == "cpu" else architecture(torch.device(device))
    target = target or here or "sm90"
    if target not in TARGETS:
        raise click.UsageError(f"--on is one of {', '.join(TARGETS)}, not {target}")
    return target, device if target == here else ""


def run(shape, kernel, asked, target, timing, *, save, as_json, png) -> list:
    """Compiles all, times them where they run, and shows them."""
    screen = console(as_json)
    done = compile_all(shape, kernel, configs(*asked), target, show=progress(screen))
    where, rounds, round_ms = timing
    if where:
        more = dict(device=where, rounds=rounds, round_ms=round_ms, save=save)
        done = time_all(shape, kernel, done, **more)
        print_rows((x.row for x in done), as_json)
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
        done = sorted(done, key=lambda x: x.row.median_ms if x.row else float("inf"))
    columns = ["tile", *NEEDS, *(SPEED if is_timed else ()), "limit"]
    rows = [cells(x, is_timed) for x in done]
    screen.print(f"\n{title}")
    screen.print(table(columns, rows, numbers=columns[:-1]))


def cells(x: Candidate, is_timed: bool) -> tuple:
    """A candidate's line."""
    needs, why, speed, fits = ["-"] * 3, x.failed, (), None
    if (built := x.built) is not None:
        needs = [built.registers, built.spills, f"{built.shared_memory / 1024:.0f}"]
        fits = built.occupancy
    needs += [fits.programs, f"{100 * fits.share:.0f} %"] if fits else ["-", "-"]
    if is_timed:
        speed = (digits(x.row.median_ms), digits(x.row.tflops)) if x.row else ("-", "-")
    if x.outcome:
        why = x.outcome.wrong or x.outcome.refused or why
    why = why or (fits.limit if fits else "")
    return x.name + (" *" if x.is_default else ""), *needs, *speed, why


def as_record(x: Candidate) -> dict:
    """A candidate that was not timed, as JSON takes it."""
    built = x.built.record if x.built else None
    fields = dict(name=x.name, config=list(x.config), is_default=x.is_default)
    return {**fields, "failed": x.failed, "built": built}


def draw(path: str, done: list[Candidate], title: str) -> None:
    """Speed of each tile if there is one, else its registers and shared memory."""
    series = {"TFLOP/s": [x.row.tflops if x.row else None for x in done]}
    if not any(x.outcome for x in done):
        series = {
            "registers a thread": [x.built.registers if x.built else None for x in done],
            "shared memory, KiB": [x.built.shared_memory / 1024 if x.built else None for x in done],
            "spilled bytes a thread": [x.built.spills if x.built else None for x in done],
        }
    bars(path, Axes(title, "", ", ".join(series)), [x.name for x in done], series)
