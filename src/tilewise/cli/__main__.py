"""The `tilewise` command.

Its commands are imported when asked for, so that `--help` loads none of them.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

MISSING = (
    "tilewise's command line needs click and rich: install them with `pip install 'tilewise[cli]'`"
)

try:
    import click
except ModuleNotFoundError:
    sys.exit(MISSING)


class Entry(NamedTuple):
    """Where a command lives and what `--help` says of it."""

    module: str
    summary: str


COMMANDS = {
    "info": Entry(
        "tilewise.cli.info", "What is usable here, and for the rest why not and what to do."
    ),
    "demo": Entry(
        "tilewise.cli.demo", "A real model computes with tilewise, beside standard attention."
    ),
    "generate": Entry(
        "tilewise.cli.generate", "A Llama served from a paged cache, with continuous batching."
    ),
    "verify": Entry("tilewise.cli.verify", "Hold every feature to fp64 on this machine."),
    "mask": Entry("tilewise.cli.mask", "Draw a mask by tiles: full, partial or skipped."),
    "bench": Entry("tilewise.cli.bench", "Time attention beside its peers, correctness first."),
    "tune": Entry("tilewise.cli.tune", "Find the fastest kernel configurations for this GPU."),
    "explain": Entry(
        "tilewise.cli.explain", "Who serves a call and why, in which launches; no GPU needed."
    ),
    "hub": Entry("tilewise.cli.hub", "What makes a kernel on Hugging Face's hub be tilewise."),
}


class Lazy(click.Group):
    """A group whose commands are `module.<name>` of COMMANDS, imported by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            return getattr(importlib.import_module(COMMANDS[cmd_name].module), cmd_name)
        except ModuleNotFoundError as error:
            if error.name == "rich":
                raise click.ClickException(MISSING) from error
            if error.name == COMMANDS[cmd_name].module:
                raise click.ClickException(f"`tilewise {cmd_name}` is not here yet") from error
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


@click.command(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Exact attention for PyTorch, computed tile by tile.

    Exit codes: 0 ok, 1 a check failed, 2 wrong usage, 3 no GPU where one is needed.
    """


if __name__ == "__main__":
    main(prog_name="tilewise")
