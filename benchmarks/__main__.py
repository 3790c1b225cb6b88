"""`python -m benchmarks`: experiments, and what is made of the rows they save.

PYTHONPATH=src python -m benchmarks --help    # at the root of a clone
"""

from __future__ import annotations

import click

from .commands.blocks import blocks
from .commands.cold import cold
from .commands.compare import compare
from .commands.host import host
from .commands.io import io
from .commands.matmul import matmul
from .commands.memory import memory
from .commands.report import figures, report
from .commands.schedule import schedule
from .commands.speedup import speedup
from .commands.trace import trace

COMMANDS = (
    *(memory, io, speedup, blocks, host, cold, matmul),
    *(compare, report, figures),
    *(trace, schedule),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Experiments on tilewise, beside `tilewise bench`, and what is made of the rows they save.

    Exit codes: 0 ok, 1 a check failed, 2 wrong usage, 3 no GPU where one is needed.
    """


for command in COMMANDS:
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
