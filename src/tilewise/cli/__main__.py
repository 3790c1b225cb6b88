"""The `tilewise` command."""

from __future__ import annotations

import sys

from .. import __version__
from ..errors import missing

if reason := missing("the tilewise command", "click", "rich"):
    sys.exit(reason)

import click

from .bench import bench
from .demo import demo
from .explain import explain
from .generate import generate
from .hub import hub
from .info import info
from .mask import mask
from .tune import tune
from .verify import verify


@click.group(
    commands=[info, demo, generate, verify, mask, bench, tune, explain, hub],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="tilewise")
def main() -> None:
    """Exact attention for PyTorch, computed tile by tile.

    Exit codes: 0 ok, 1 a check failed, 2 wrong usage, 3 no GPU where one is needed.
    """


if __name__ == "__main__":
    main(prog_name="tilewise")
