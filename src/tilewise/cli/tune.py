"""`tilewise tune`: the fastest tiles for this GPU, kept in the user's cache and used from then."""

from __future__ import annotations

import itertools
import json
import sys

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@click.command()
@click.option("--headdim", default="64,128", show_default=True, help="Head dims, by commas.")
@click.option("--dtype", default="bf16", type=click.Choice(list(DTYPES)), show_default=True)
@click.option("--seqlen", default=4096, show_default=True, help="Sequence length.")
@click.option("--dry-run", is_flag=True, help="Measure only; leave the cache as it is.")
@click.option("--json", "as_json", is_flag=True, help="Rows as JSON lines.")
def tune(headdim: str, dtype: str, seqlen: int, dry_run: bool, as_json: bool) -> None:
    """Find the fastest kernel configurations for this GPU.

    Each kernel is timed in every configuration that fits, causal and full, forward and backward.
    Winners go to the user's cache (see `tilewise info`) and are used for every head dim that pads
    to the same power of two.
    """
    if not torch.cuda.is_available():
        click.echo("tilewise tune: no CUDA or ROCm GPU here, so there is nothing to time", err=True)
        sys.exit(3)
    from ..bench.tune import Workload, search
    from ..tuning.select import add_measured

    device = torch.device("cuda", torch.cuda.current_device())
    works = [
        Workload(int(d), DTYPES[dtype], is_causal, seqlen)
        for d, is_causal in itertools.product(headdim.split(","), (False, True))
    ]
    console = Console(stderr=as_json, highlight=False)
    steps = track(works, "measuring", console=console, disable=as_json)
    found = [row for work in steps for row in search(work, device)]
    if as_json:
        for row in found:
            click.echo(json.dumps({**row._asdict(), "key": row.key._asdict()}))
    else:
        console.print(_table(found))
    try:
        path = None if dry_run else add_measured(device, {row.key: row.config for row in found})
    except OSError as error:
        click.echo(
            f"tilewise tune: nothing was kept, {error}; let TILEWISE_CACHE name a folder that can "
            "be written",
            err=True,
        )
        sys.exit(1)
    faster = sum(row.ms < 0.98 * row.ms_before for row in found)
    kept = "nothing was kept" if path is None else f"kept in {path}"
    console.print(f"{faster} of {len(found)} kernels got over 2 % faster; {kept}.")


def _table(found: list) -> Table:
    table = Table("kernel", "head dim", "mask", "M x N, warps, stages", box=None)
    for column in ("ms", "before"):
        table.add_column(column, justify="right")
    for row in found:
        config = row.config
        shape = f"{config.BLOCK_M} x {config.BLOCK_N}, {config.num_warps}, {config.num_stages}"
        shape += ", descriptors" if config.descriptors else ""
        mask = "causal" if row.key.is_causal else "full"
        times = (f"{row.ms:.3g}", f"{row.ms_before:.3g}")
        table.add_row(row.key.kernel, str(row.key.block_d), mask, shape, *times)
    return table
