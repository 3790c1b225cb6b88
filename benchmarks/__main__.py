"""`python -m benchmarks`: attention and its peers, experiments, and what is made of their rows.

PYTHONPATH=src python -m benchmarks --help    # at the root of a clone
"""

from __future__ import annotations

import click

from .account import io
from .bench.commands import bench
from .bench.row import ARGUMENTS
from .blocks import blocks
from .cold import cold
from .compare import compare
from .cpu import cpu
from .host import host
from .memory import memory
from .online import trace
from .products import matmul
from .report.command import figures, report
from .schedule import schedule
from .speedup import speedup

EXPERIMENTS = [memory, io, speedup, blocks, host, cold, matmul, cpu]


class Remembered(click.Group):
    """A group whose commands can ask what they were given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)


@click.group(
    cls=Remembered,
    commands=[bench, *EXPERIMENTS, compare, report, figures, trace, schedule],
    context_settings={"help_option_names": ["-h", "--help"]},
)
def main() -> None:
    """Measure attention and its peers, run experiments, and report on the rows they save.

    Exit codes: 0 ok, 1 a check failed, 2 wrong usage, 3 no GPU where one is needed.
    """


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
