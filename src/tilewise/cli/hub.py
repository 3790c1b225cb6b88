"""`tilewise hub`: what LOCAL_KERNELS must be, for programs that take names of hub kernels alone."""

from __future__ import annotations

import click

from ..errors import ArgumentError
from ..integrations.hub import NAME, local_kernels


@click.command(short_help="Print LOCAL_KERNELS, so that Hub kernel names resolve to tilewise.")
@click.argument("names", nargs=-1, metavar="[OWNER/NAME]...")
def hub(names: tuple[str, ...]) -> None:
    """Print LOCAL_KERNELS, so that Hub kernel names ('tilewise/attention' by default) resolve to
    tilewise.

    \b
    export LOCAL_KERNELS=$(tilewise hub)
    trl sft --attn_implementation tilewise/attention ...
    """
    try:
        click.echo(local_kernels(*names or (NAME,)))
    except ArgumentError as error:
        raise click.BadParameter(str(error), param_hint="[OWNER/NAME]...") from error
