"""`bench`: our attention and its peers in interleaved rounds, each held to fp64 first.

A module a command; dense shapes have the options of `bench` itself.
"""

from __future__ import annotations

import click

from .decode import decode
from .dense import dense
from .distributed import distributed
from .modifiers import modifiers
from .serving import serving
from .varlen import varlen


class Bench(click.Group):
    """Commands by name; what begins with no name of one is the options of `dense`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = {*self.commands, *self.get_help_option_names(ctx)}
        return super().parse_args(ctx, args if args and args[0] in named else ["dense", *args])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        dense.format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


bench = Bench(
    "bench",
    help=dense.help,
    short_help="Time attention and its peers, after checking each result.",
    subcommand_metavar="[fwd|bwd|fwd+bwd]...",
    commands=[dense, varlen, modifiers, decode, serving, distributed],
)
