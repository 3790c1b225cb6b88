"""Option types of packed shapes: sets of lengths, heads, passes."""

from __future__ import annotations

import click

from .options import IntList, NameList

DIRECTIONS = ("fwd", "bwd", "fwd+bwd")


class LengthSets(click.ParamType):
    """Names of sets of lengths, or one set as numbers: `zipf,equal512` or `160,300`."""

    name = "sets"

    def convert(self, value, param, ctx) -> tuple[str, ...]:
        from ..bench.lengths import SETS

        if isinstance(value, tuple):
            return value
        parts = NameList().convert(value, param, ctx)
        if parts and all(part in SETS for part in parts):
            return parts
        try:
            numbers = IntList().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither sets ({', '.join(SETS)}) nor one as 160,300 or 1k,4k")
        return (",".join(map(str, numbers)),)


class HeadList(click.ParamType):
    """`16x128,32:8x128`: query heads, their key heads where these are fewer, headdim."""

    name = "heads"

    def convert(self, value, param, ctx) -> tuple[tuple[int, int, int], ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._heads(part.strip()) for part in value.split(","))
        except ValueError:
            self.fail(
                f"{value!r} is not a list such as 16x128,32:8x128 (query:key heads x headdim)"
            )

    def _heads(self, text: str) -> tuple[int, int, int]:
        heads, headdim = text.split("x")
        nheads, _, nheads_k = heads.partition(":")
        found = int(nheads), int(nheads_k or nheads), int(headdim)
        if min(found) < 1 or found[0] % found[1]:
            raise ValueError(text)
        return found


class PassList(click.ParamType):
    """`fwd,bwd`."""

    name = "passes"

    def convert(self, value, param, ctx) -> tuple[str, ...]:
        parts = NameList().convert(value, param, ctx)
        if not parts or not set(parts) <= set(DIRECTIONS):
            self.fail(f"{value!r} is not a list of {', '.join(DIRECTIONS)}", param, ctx)
        return parts
