"""Names of arguments in flash-attn, torch and here. The migration page prints these tables, and an
unexpected keyword argument is answered from them.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Word(NamedTuple):
    """An argument of `tilewise.attention` that does the same, and what else is to be known."""

    attention: str
    remark: str = ""  # for the migration page
    hint: str = ""  # for an error of `attention`, where the name alone would mislead


NO_EFFECT = Word("", "a hint without effect", hint="leave it out, as it changes no result")
FLASH = {
    "q": Word("q", "(batch, seqlen, nheads, headdim), packed (total, nheads, headdim)"),
    "k": Word("k"),
    "v": Word("v", "may have another headdim"),
    "cu_seqlens_q": Word("cu_seqlens_q"),
    "cu_seqlens_k": Word("cu_seqlens_k"),
    "max_seqlen_q": Word("max_seqlen_q", "optional"),
    "max_seqlen_k": Word("max_seqlen_k", "optional"),
    "dropout_p": Word("dropout_p", "rounded to a multiple of 1/256; not in FA3"),
    "softmax_scale": Word("scale"),
    "causal": Word("causal", "bottom-right in all"),
    "window_size": Word("window", "-1 means no limit; `window` also takes None"),
    "softcap": Word("softcap", "0 means none; `attention` takes None"),
    "alibi_slopes": Word("alibi_slopes", "not in FA3"),
    "deterministic": Word("deterministic"),
    "return_attn_probs": Word(
        "return_lse",
        "returns (out, lse, None), as FA2 does without probabilities; FA3 returns (out, lse)",
    ),
    "block_table": Word("page_table", "any page size; lengths are `seqused_k`; no gradient"),
    "return_lse": Word(
        "return_lse", "returns (out, lse); -inf if a row attends to no key, +inf in FA2"
    ),
    "learnable_sink": Word("sinks"),
    "seqused_q": Word("seqused_q"),
    "seqused_k": Word("seqused_k"),
    "attention_chunk": Word(
        "mask_mod", "write the mask as a function", "mask_mod=, such as tilewise.mods.chunked(size)"
    ),
    "num_splits": NO_EFFECT,
    "pack_gqa": NO_EFFECT,
    "q_descale": Word("q_descale", "for `float8_e4m3fn` q, k and v; keyword-only here"),
    "k_descale": Word(
        "k_descale", "also for 8-bit caches, in `flash_attn_with_kvcache` and with pages"
    ),
    "v_descale": Word("v_descale"),
    "out_dtype": Word("out_dtype", "the output dtype with FP8 inputs; not in FA3"),
}
SDPA = {
    "query": Word("q", '(..., nheads, seqlen, headdim) is `layout="bhsd"`'),
    "key": Word("k"),
    "value": Word("v"),
    "attn_mask": Word(
        "mask_mod or bias",
        "floats become a `bias`, bools a `mask_mod` that reads them",
        hint="bias= for numbers, and for bools mask_mod=, a function that reads them",
    ),
    "dropout_p": Word("dropout_p", "rounded to a multiple of 1/256"),
    "is_causal": Word(
        "causal",
        'torch\'s is `causal="top_left"`',
        hint="causal=; torch's corner is tilewise.attention(causal='top_left')",
    ),
    "scale": Word("scale"),
    "enable_gqa": Word("", "inferred from the head counts", "leave it out, as head counts say it"),
}
FLEX = {
    "query": Word("q", '(batch, nheads, seqlen, headdim) is `layout="bhsd"`'),
    "key": Word("k"),
    "value": Word("v"),
    "score_mod": Word(
        "score_mod",
        "applied to the scaled score, as in torch; may use [these torch functions]"
        "(api/mods.md#what-functions-may-be-made-of)",
    ),
    "block_mask": Word("block_mask", "also torch's own, converted once"),
    "scale": Word("scale"),
    "enable_gqa": SDPA["enable_gqa"],
    "return_lse": Word("return_lse"),
    "kernel_options": Word(
        "", "ignored: they tune torch's kernels", "leave them out, as they tune torch's kernels"
    ),
    "return_aux": Word("return_lse", "`AuxRequest(lse=True)`; `max_scores` is not supported"),
}
# The migration page has no tables of these
CACHE = {
    "k_cache": Word("k"),
    "v_cache": Word("v"),
    "cache_seqlens": Word("seqused_k", hint="seqused_k=, which counts the new keys, too"),
    "cache_batch_idx": Word("page_table", hint="page_table=cache_batch_idx[:, None]"),
    "cu_seqlens_k_new": Word("cu_seqlens_q"),
    "return_softmax_lse": Word("return_lse"),
    "qv": Word("", hint="a second query for MLA is not supported"),
    "sm_margin": NO_EFFECT,
    "scheduler_metadata": NO_EFFECT,
}
THEIRS = CACHE | FLEX | SDPA | FLASH
# Arguments of drop-in functions that mean less or more than what is asked for here
NARROWER = "attention_chunk", "cache_batch_idx"
CAVEATS = {
    "cache_seqlens": "cache_seqlens=, which does not count the new keys",
    "is_causal": "is_causal=, whose corner is the top left",
}

ATTENTION = "tilewise.attention"

_arguments: dict[str, list[str]] = {}  # of each function, by its public name


def refuses_others(name: str) -> Callable[[Function], Function]:
    """Decorates a public function that ends in `**unknown`, without a wrapper: its signature is
    shown without that, and `unexpected` knows its arguments.
    """

    def register(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
        _arguments[name] = [x.name for x in parameters]
        return function

    return register


def unexpected(name: str, unknown: Iterable[str]) -> TypeError:
    """What Python says of keyword arguments that this function does not take, with their names
    here.
    """
    answers = [f"{x!r}{_answer(x, _arguments[name])}" for x in unknown]
    article, plural = ("an ", "") if len(answers) == 1 else ("", "s")
    return TypeError(
        f"{name}() got {article}unexpected keyword argument{plural} {'; '.join(answers)}"
    )


def _answer(unknown: str, arguments: list[str]) -> str:
    hint = THEIRS.get(unknown, Word(unknown)).hint
    meant = _meanings(unknown)
    same = [x for x in meant if x in arguments]
    if hint and (same or not meant):
        return f": here it is {hint}" if same else f": {hint}"
    # Names of other libraries for what `meant` names in `attention`
    same = same or [x for x in arguments if x not in NARROWER and set(_meanings(x)) & set(meant)]
    if same:
        return f": here it is {_either(same)}"
    if set(meant) & set(_arguments[ATTENTION]):
        return f": {ATTENTION} has it" + ("" if meant == [unknown] else f", as {_either(meant)}")
    for name, names in _arguments.items():
        if unknown in names:
            return f": {name} has it"
    close = difflib.get_close_matches(unknown, arguments, n=1)
    return f": did you mean {close[0]}=?" if close else ""


def _meanings(name: str) -> list[str]:
    """The arguments of `attention` that do what one of this name does."""
    if name not in THEIRS:
        return [name]
    return [x for x in THEIRS[name].attention.split(" or ") if x]


def _either(names: Iterable[str]) -> str:
    return " or ".join(CAVEATS.get(name, f"{name}=") for name in names)
