"""docs/migration.md: arguments of our drop-in functions, read from their signatures, beside those
of others.

    PYTHONPATH=src python docs/extensions/migration.py

What a signature does not say is in the tables of `tilewise.keywords`; a test holds both together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import tilewise
from tilewise.keywords import FLASH, FLEX, SDPA, Word

PAGE = Path(__file__).resolve().parents[1] / "migration.md"
TEXT = Path(__file__).with_suffix(".md")
NONE = "–"

# flash-attn 3's own order; what is here alone no function of ours takes.
FLASH_3 = (
    *("q", "k", "v", "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale"),
    *("window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic"),
    *("sm_margin", "return_attn_probs"),
)
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
FLASH_3_VARLEN = (*FLASH_3[:3], *LENGTHS, "seqused_q", "seqused_k", *FLASH_3[3:])
ABSENT = {
    "qv": "a second query for MLA: not supported",
    "sm_margin": "omit it: it does not change results",
}


def parameters(function: Callable) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def place(name: str, names: tuple[str, ...]) -> str:
    return str(names.index(name) + 1) if name in names else NONE


def positional(function: Callable) -> tuple[str, ...]:
    found = parameters(function).items()
    return tuple(name for name, one in found if one.kind is one.POSITIONAL_OR_KEYWORD)


def default(one: inspect.Parameter) -> str:
    return "" if one.default is one.empty else f"`{one.default!r}`"


def told(word: Word) -> str:
    return " or ".join(f"`{name}`" for name in word.attention.split(" or ") if name) or NONE


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def flash_table(function: Callable, flash_3: tuple[str, ...]) -> str:
    """Where each argument stands in all three; flash-attn 2's places are those of our function."""
    ours, flash_2 = parameters(function), positional(function)
    head = ["argument", "default", "position in flash-attn 2, and here", "in FA3"]
    head += ["in `attention`", ""]
    rows = [
        [
            *(f"`{name}`", default(one), place(name, flash_2) if name in flash_2 else "keyword"),
            *(place(name, flash_3), told(FLASH[name]), FLASH[name].remark),
        ]
        for name, one in ours.items()
    ]
    rows += [
        [f"`{name}`", "", NONE, place(name, flash_3), NONE, ABSENT[name]]
        for name in flash_3
        if name not in ours
    ]
    return table(head, rows)


def torch_table(function: Callable, words: dict[str, Word]) -> str:
    head = ["argument", "default", "in `attention`", ""]
    rows = [
        [f"`{name}`", default(one), told(words[name]), words[name].remark]
        for name, one in parameters(function).items()
    ]
    return table(head, rows)


def packed_functions() -> str:
    """The relatives, which take the same behind their tensors."""
    known = ("flash_attn_func", "flash_attn_varlen_func")
    names = [n for n in tilewise.__all__ if n.startswith("flash_attn") and n not in known]
    names = [n for n in names if "packed" in n]
    return ", ".join(f"`{name}`" for name in names)


def page() -> str:
    """The whole page."""
    return TEXT.read_text("utf-8").format(
        flash=flash_table(tilewise.flash_attn_func, FLASH_3),
        varlen=flash_table(tilewise.flash_attn_varlen_func, FLASH_3_VARLEN),
        packed=packed_functions(),
        sdpa=torch_table(tilewise.scaled_dot_product_attention, SDPA),
        flex=torch_table(tilewise.flex_attention, FLEX),
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(PAGE)
