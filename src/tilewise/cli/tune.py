"""`tilewise tune`: the fastest tiles for this GPU, kept in the user's cache and used from then."""

from __future__ import annotations

import itertools
import json

import click
import torch
from rich.progress import track
from rich.table import Table

from .options import DTYPES, Exit, IntList, json_option
from .tables import console, digits, table


@click.command(short_help="Find the fastest kernel configurations for this GPU.")
@click.option("--headdim", type=IntList(), default="64,128", show_default=True)
@click.option("--dtype", default="bf16", type=click.Choice(list(DTYPES)[:3]), show_default=True)
@click.option(
    "--seqlen", type=click.IntRange(1), default=4096, show_default=True, help="Sequence length."
)
@click.option("--dry-run", is_flag=True, help="Only measure; do not change the cache.")
@json_option
def tune(headdim: tuple[int, ...], dtype: str, seqlen: int, dry_run: bool, as_json: bool) -> None:
    """Find the fastest kernel configurations for this GPU.

    Times each kernel in every configuration that fits: causal and full, forward and backward. The
    fastest go to your cache (see `tilewise info`) and are used for every head dim that pads to the
    same power of two.
    """
    if not torch.cuda.is_available():
        click.echo("tilewise tune: no CUDA or ROCm GPU here, so there is nothing to time", err=True)
        raise SystemExit(Exit.NO_GPU)
    from ..explain.sweep import sweep
    from ..tuning.select import add_measured

    device = torch.device("cuda", torch.cuda.current_device())
    calls = list(itertools.product(headdim, (False, True)))
    common = dict(dtype=getattr(torch, DTYPES[dtype]), seqlen=seqlen)
    screen = console(as_json)
    rows = [
        row
        for width, is_causal in track(calls, "measuring", console=screen, disable=as_json)
        for row in sweep(device, headdim=width, is_causal=is_causal, **common)
    ]
    if as_json:
        for row in rows:
            click.echo(json.dumps({**row._asdict(), "key": row.key._asdict()}))
    else:
        screen.print(_table(rows))
    try:
        path = None if dry_run else add_measured(device, {row.key: row.config for row in rows})
    except OSError as error:
        click.echo(
            f"tilewise tune: nothing was kept, {error}; let TILEWISE_CACHE name a folder that can "
            "be written",
            err=True,
        )
        raise SystemExit(Exit.FAILED) from error
    faster = sum(row.ms < 0.98 * row.ms_before for row in rows)
    place = "nothing was kept" if path is None else f"kept in {path}"
    screen.print(f"{faster} of {len(rows)} kernels got over 2 % faster; {place}.")


def _table(rows: list) -> Table:
    columns = ("kernel", "head dim", "mask", "M x N, warps, stages", "ms", "before")
    return table(columns, map(_cells, rows), numbers=columns[4:])


def _cells(row) -> tuple:
    config = row.config
    shape = f"{config.BLOCK_M} x {config.BLOCK_N}, {config.num_warps}, {config.num_stages}"
    shape += ", descriptors" if config.descriptors else ""
    mask = "causal" if row.key.is_causal else "full"
    return row.key.kernel, row.key.block_d, mask, shape, digits(row.ms), digits(row.ms_before)
