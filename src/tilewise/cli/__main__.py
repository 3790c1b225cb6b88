"""The `tilewise` command."""

from __future__ import annotations

import sys

from .. import __version__
from ..errors import missing

if reason := missing("the tilewise command", ["click", "rich"]):
    sys.exit(reason)

import click

from .explain import explain
from .hub import hub
from .info import info
from .mask import mask
from .tune import tune
from .verify import verify

MOVED = {
    "bench": "python -m benchmarks bench",
    "demo": "python -m examples.demo",
    "generate": "python -m examples.generate",
}


class Commands(click.Group):
    """The commands; of one that is a program of the repository, where it is."""

    def resolve_command(self, ctx: click.Context, args: list[str]):
        """The command that the first argument names."""
        if args[0] in MOVED:
            ctx.fail(
                f"`tilewise {args[0]}` is `{MOVED[args[0]]}` now, in a clone of tilewise's"
                " repository."
            )
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    commands=[info, verify, mask, tune, explain, hub],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="tilewise")
def main() -> None:
    """Exact attention for PyTorch, computed tile by tile.

    Exit codes: 0 ok, 1 a check failed, 2 wrong usage, 3 no GPU where one is needed.
    """


if __name__ == "__main__":
    main(prog_name="tilewise")
