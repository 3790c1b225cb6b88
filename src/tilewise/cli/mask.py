"""`tilewise mask`: a mask drawn by tiles, full, partial or skipped, here or as SVG."""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path
from typing import NamedTuple

import click
from rich.text import Text

from .. import mods
from ..errors import ArgumentError
from ..sparse import create_block_mask
from .options import IntList, NewFile
from .tables import console

KINDS = ("skipped", "partial", "full")
CELLS = ("··", "▒▒", "██")
STYLES = ("dim", "yellow", "green")
COLOURS = ("#e8e8e8", "#e69f00", "#0072b2")  # Okabe and Ito's: distinct in any colour vision
ROWS, SVG_CELLS, SVG_SIDE = 64, 128, 512
OPERATORS = {ast.BitAnd: lambda x, y: x & y, ast.BitOr: lambda x, y: x | y}
NAMES = ("causal", "sliding_window", "prefix_lm", "document", "chunked", "dilated")
GRAMMAR = f"a mask is made of {', '.join(NAMES)} with integer arguments, joined by & | ~"


class Picture(NamedTuple):
    """What is drawn: `cells` are kinds, rows of queries, each `step` x `step` tiles."""

    cells: list[list[int]]
    step: int


@click.command(short_help="Draw a mask by tiles: full, partial or skipped.")
@click.argument("expression")
@click.option("--seqlen", type=IntList(), default="2048", show_default=True, help="S, or Sq,Sk.")
@click.option("--block", type=IntList(), default="128", show_default=True, help="B, or M,N.")
@click.option("--svg", type=NewFile(dir_okay=False, path_type=Path), help="Also draw to FILE.")
def mask(
    expression: str, seqlen: tuple[int, ...], block: tuple[int, ...], svg: Path | None
) -> None:
    """Draw a mask by tiles: full, partial or skipped.

    EXPRESSION joins masks by & | ~, in quotes: "causal & sliding_window(256, 0)". There are causal,
    sliding_window(left, right), prefix_lm(n), document(len, len, ...), chunked(n) and dilated(n);
    documents are together as long as --seqlen.
    """
    for name, value in (("--seqlen", seqlen), ("--block", block)):
        if len(value) > 2:
            raise click.UsageError(f"{name} takes one number, or two for queries and keys")
    seqlen_q, seqlen_k = seqlen[0], seqlen[-1]
    try:
        mask = parse(expression, max(seqlen_q, seqlen_k))
        blocks = create_block_mask(mask, 1, 1, seqlen_q, seqlen_k, block=(block[0], block[-1]))
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
    kinds = blocks.kinds()[0, 0]
    counts = [int((kinds == kind).sum()) for kind in range(3)]
    said = [
        f"{expression}: {seqlen_q} queries x {seqlen_k} keys in tiles of {block[0]} x {block[-1]}",
        f"{sum(counts)} tiles: {counts[2]} full, {counts[1]} partial, {counts[0]} skipped "
        f"({blocks.sparsity():.1f} % of the work is skipped)",
    ]
    screen = console()
    screen.print(said[0], soft_wrap=True, markup=False)
    screen.print(drawn(coarsen(kinds, ROWS, columns=screen.width // len(CELLS[0]))))
    screen.print(said[1], soft_wrap=True, markup=False)
    if svg is not None:
        try:
            picture = coarsen(kinds, SVG_CELLS, columns=SVG_CELLS)
            svg.parent.mkdir(parents=True, exist_ok=True)
            svg.write_text(as_svg(picture, said, counts=counts), encoding="utf-8")
        except OSError as error:
            raise click.FileError(str(svg), error.strerror) from error
        screen.print(f"drawn in {svg}", soft_wrap=True, markup=False)


def parse(text: str, seqlen: int) -> mods.Mask:
    """A mask from its expression, of which nothing is executed."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _wrong(f"{text!r} is no expression: {GRAMMAR}") from error
    return _mask(tree, seqlen)


def _wrong(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="EXPRESSION")


def _mask(node: ast.expr, seqlen: int) -> mods.Mask:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_mask(node.left, seqlen), _mask(node.right, seqlen))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_mask(node.operand, seqlen)
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.func.id not in NAMES:
        raise _wrong(f"`{ast.unparse(node)}` has no meaning in a mask: {GRAMMAR}")
    arguments = [_number(argument) for argument in call.args]
    named = {str(keyword.arg): _number(keyword.value) for keyword in call.keywords}
    if call.func.id == "document" and not named:
        return _document(arguments, seqlen)
    try:
        return getattr(mods, call.func.id)(*arguments, **named)
    except TypeError as error:
        raise _wrong(f"`{ast.unparse(node)}`: {error}") from error


def _number(node: ast.expr) -> int | None:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node, sign = node.operand, -1
    if isinstance(node, ast.Constant):
        if node.value is None and sign == 1:
            return None
        if type(node.value) is int:
            return sign * node.value
    raise _wrong(f"`{ast.unparse(node)}` is no integer: {GRAMMAR}")


def _document(arguments: list[int | None], seqlen: int) -> mods.Mask:
    """Documents of these lengths, which cover the sequence; the last may pass its end."""
    import torch

    lengths = [length for length in arguments if length and length > 0]
    if not lengths or lengths != arguments:
        raise _wrong("document takes the lengths of documents, such as document(160, 300)")
    total = sum(lengths)
    if total < seqlen:
        whole = ", ".join(map(str, [*lengths, seqlen - total]))
        raise _wrong(
            f"these documents have {total} of {seqlen} tokens: document({whole}) has all,"
            f" or pass --seqlen {total}"
        )
    ends = torch.tensor(lengths).clamp(max=seqlen).cumsum(0)
    return mods.document(torch.bucketize(torch.arange(seqlen), ends, right=True, out_int32=True))


def coarsen(kinds, rows: int, columns: int) -> Picture:
    """At most so many rows and columns: a cell of several tiles is full or skipped if all are."""
    step = max(1, -(-kinds.shape[0] // max(1, rows)), -(-kinds.shape[1] // max(1, columns)))
    cells = []
    for strip in kinds.split(step):
        parts = [part.unique().tolist() for part in strip.split(step, dim=1)]
        cells.append([part[0] if len(part) == 1 else 1 for part in parts])
    return Picture(cells, step)


def drawn(picture: Picture) -> Text:
    """For a terminal; the marks differ without colour too."""
    text = Text(no_wrap=True)
    for row in picture.cells:
        for kind in row:
            text.append(CELLS[kind], STYLES[kind])
        text.append("\n")
    for kind in (2, 1, 0):
        text.append(CELLS[kind], STYLES[kind]).append(f" {KINDS[kind]}" + "  " * (kind > 0))
    if picture.step > 1:
        text.append(f"\neach mark is {picture.step} x {picture.step} tiles")
    return text


def as_svg(picture: Picture, said: list[str], counts: list[int]) -> str:
    """A picture of its own, with a title and a description for those who cannot see it."""
    height, width = len(picture.cells), len(picture.cells[0])
    pixels = max(2, SVG_SIDE // max(height, width))  # of a tile's side
    gap = 1 if pixels > 4 else 0
    paths = []
    for kind, colour in enumerate(COLOURS):
        tiles = "".join(
            f"M{x * pixels} {y * pixels}h{pixels - gap}v{pixels - gap}h{gap - pixels}z"
            for y, row in enumerate(picture.cells)
            for x, tile_kind in enumerate(row)
            if tile_kind == kind
        )
        if tiles:
            paths.append(f'<path class="{KINDS[kind]}" fill="{colour}" d="{tiles}"/>')
    foot, wide = height * pixels + 12, max(width * pixels, 360)
    legend = [
        f'<rect x="{i * 120}" y="{foot}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        f'<text x="{i * 120 + 18}" y="{foot + 11}">{KINDS[kind]} {counts[kind]}</text>'
        for i, kind in enumerate((2, 1, 0))
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {foot + 20}" role="img" '
            'aria-labelledby="title desc" font-family="sans-serif" font-size="12">',
            f'<title id="title">{escape(said[0])}</title>',
            f'<desc id="desc">{escape(said[1])}. Rows are queries, columns keys.</desc>',
            *paths,
            *legend,
            "</svg>\n",
        ]
    )
