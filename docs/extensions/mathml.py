"""Formulas as MathML, made when the site is built.

A browser lays MathML out by itself, in the reader's size and colour, and a screen reader speaks it.
MathJax and KaTeX would be a megabyte of script and fonts to vendor, pictures would need LaTeX.
"""

from docutils import nodes
from latex2mathml.converter import convert


def inline(translator, node: nodes.math) -> None:
    """A formula within a sentence."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block(translator, node: nodes.math_block) -> None:
    """A formula on a line of its own; a long one scrolls inside its box."""
    formula = convert(node.astext(), display="block")
    translator.body.append(f'<div class="formula">{formula}</div>\n')
    raise nodes.SkipNode


def setup(app) -> dict:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
