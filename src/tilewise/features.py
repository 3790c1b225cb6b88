"""The optional inputs of attention, each described once: checks, refusals and the schemas of
operators read these tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
INT32, FP32 = (torch.int32,), (torch.float32,)
SLOPES = ("nheads",), ("batch", "nheads")
IN_BF16 = "leave q, k and v in bfloat16"
PAGES = "leave q in bfloat16, which supports 8-bit pages"
DOCUMENTS = "documents belong in the layout: layout.packed(cu_seqlens), or td.documents(cu_seqlens)"
PADDING = "leave padding out of the sequence, or make it a document of its own"
WHOLE = "call tilewise.attention, on whole sequences"
ONLY_FP8 = "it is for FP8, which no method supports"


class Feature(NamedTuple):
    """An argument: its name in tables and its flag in a `Problem`, if it selects code; the shapes
    that a tensor may have, in names of sizes, its dtypes, and what to do instead where a kind of
    call refuses it.
    """

    title: str = ""
    flag: str = ""
    shapes: tuple[tuple[str, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    depends_on_shift: bool = False  # whether what it does changes where all scores of a row shift
    is_whole: bool = False  # whether no shard or mapped call may take a part of it
    option: str = ""  # of `tilewise explain`, and its field of a shape
    cached: str = ""
    fp8: str = ""
    sharded: str = ""

    def shape_of(self, rank: int) -> tuple[str, ...]:
        """The shape of so many dimensions."""
        return next((shape for shape in self.shapes if len(shape) == rank), ())

    def has(self, size: str) -> bool:
        """Whether a tensor may have a dimension of this size."""
        return any(size in shape for shape in self.shapes)


FEATURES = {
    "softcap": Feature("softcap", "has_softcap", depends_on_shift=True, option="softcap"),
    "alibi_slopes": Feature("ALiBi", "has_alibi", shapes=SLOPES, dtypes=FP32, option="alibi"),
    "sinks": Feature(
        "sinks",
        "has_sinks",
        shapes=(("nheads",),),
        dtypes=FLOATS,
        depends_on_shift=True,
        option="sinks",
    ),
    "seqused_k": Feature(
        "seqused_k", "has_seqused_k", shapes=(("batch",),), dtypes=INT32, sharded=PADDING
    ),
    "cu_seqlens_q": Feature(
        "packed sequences", "is_packed", shapes=(("batch + 1",),), dtypes=INT32, sharded=DOCUMENTS
    ),
    "deterministic": Feature("deterministic gradients", "deterministic"),
    "bias": Feature(
        is_whole=True,
        cached="pass a mask_mod or alibi_slopes",
        fp8=f"use alibi_slopes, or {IN_BF16}",
        sharded="write it as a score_mod of positions",
    ),
    "score_mod": Feature(
        cached="pass softcap or alibi_slopes", fp8=f"use softcap and alibi_slopes, or {IN_BF16}"
    ),
    "dropout_p": Feature(cached="leave it out", fp8=f"leave it out, or {IN_BF16}"),
    "dropout_rng": Feature(shapes=(("2",),), dtypes=(torch.int64,), is_whole=True),
    "mask_mod": Feature(fp8=f"use causal, window and cu_seqlens, or {IN_BF16}"),
    "block_mask": Feature(
        cached="pass its mask as mask_mod",
        fp8=f"use causal, window and cu_seqlens, or {IN_BF16}",
        sharded="pass its predicate as mask_mod",
    ),
    "attention_chunk": Feature(fp8=f"use window_size, or {IN_BF16}"),
    "cu_seqlens_k": Feature(
        shapes=(("batch + 1",),),
        dtypes=INT32,
        cached="pass k and v as (batch, seqlen_k, nheads_k, headdim) or as pages, and their "
        "lengths as seqused_k",
        sharded=DOCUMENTS,
    ),
    "max_seqlen_q": Feature(sharded=DOCUMENTS),
    "max_seqlen_k": Feature(sharded=DOCUMENTS),
    "seqused_q": Feature(
        shapes=(("batch",),),
        dtypes=INT32,
        cached="let cu_seqlens_q say how many queries each sequence has",
        sharded=PADDING,
    ),
    "page_table": Feature(shapes=(("batch", "pages"),), dtypes=INT32, fp8=PAGES, sharded=WHOLE),
    "block_table": Feature(fp8=PAGES),
    **dict.fromkeys(
        ("q_descale", "k_descale", "v_descale"),
        Feature(
            shapes=((), ("nheads_k",), ("batch", "nheads_k")),
            dtypes=(torch.float32,),
            sharded=WHOLE,
        ),
    ),
    **dict.fromkeys(("out_dtype", "backward"), Feature(sharded=ONLY_FP8)),
    "split_size": Feature(
        fp8="leave it out: FP8 products do not fix the bits of a row", sharded=WHOLE
    ),
    "out": Feature(fp8="leave it out, and use what is returned", sharded="it returns new tensors"),
}
OPTIONS = {x.option: name for name, x in FEATURES.items() if x.option}
REFUSALS = {
    "cached": "{name} with a cache, split_size or out is not supported: {remedy}",
    "fp8": "{name} with FP8 products is not supported: {remedy}",
    "sharded": "{name}: no method of tilewise.distributed supports it; {remedy}",
}
# What has no gradient, and what to do instead
NO_GRADIENT = {
    "slopes": "alibi_slopes have no gradient; pass score_mod=tilewise.scores.alibi(slopes), which "
    "learns them, or detach() them",
    "cached": "a call with a cache has no gradient, because the cache is written in place; call "
    "under torch.no_grad(), detach() it, or train with plain k and v, without page_table and out",
    "fp8": "8-bit tensors and their scales have no gradient; detach() them, or quantise with "
    'tilewise.quantize, and pass its result and backward="bf16" to tilewise.attention',
    "scales": "scales have no gradient; detach() it",
    "tables": "tables have no gradient; detach() it",
}

# The fields of operators that are no optional tensors
TYPES = {
    **dict.fromkeys(("q", "k", "v", "q_scale", "k_scale", "v_scale"), "Tensor"),
    **dict.fromkeys(("scale", "softcap", "dropout_p"), "float"),
    **dict.fromkeys(("left", "right"), "SymInt"),
    **dict.fromkeys(("align", "mask_mod", "score_mod", "score_derivative"), "str"),
    **dict.fromkeys(("deterministic", "has_bias_grad", "is_long", "is_transposed"), "bool"),
    **dict(captured="Tensor[]?", mask_block="int[2]", split_size="int"),
    **dict(out_dtype="ScalarType", backend="str?"),
}

SHARDED_TYPES = {
    **dict(
        layout="Tensor", causal="str", left="int", right="int", scale="float?", softcap="float?"
    ),
    **dict(method="str?", bitwise="bool", needs_grad="bool"),
}

# Their arguments, in the order of saved programs
OPERATORS = {
    "context_parallel": (
        *("alibi_slopes", "sinks", "dropout_rng", "captured", "layout", "causal", "scale", "left"),
        *("right", "softcap", "dropout_p", "mask_mod", "score_mod", "deterministic", "backend"),
        *("method", "bitwise", "needs_grad"),
    ),
    "flash_attn_cache": (
        *("q", "k", "v", "page_table", "seqused_k", "cu_seqlens_q", "alibi_slopes", "sinks"),
        *("captured", "scale", "softcap", "left", "right", "split_size", "mask_mod", "backend"),
        *("k_descale", "v_descale"),
    ),
    "flash_attn_fp8_forward": (
        *("q", "k", "v", "q_scale", "k_scale", "v_scale", "v_mean", "v_drift", "alibi_slopes"),
        *("sinks", "seqused_k", "seqused_q", "cu_seqlens_q", "cu_seqlens_k", "is_transposed"),
        *("scale", "softcap", "left", "right", "align", "is_long", "out_dtype", "backend"),
    ),
}

# The operator of `flash_attn_with_kvcache` with new keys
WITH_NEW_KEYS = (
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? out, Tensor k, Tensor v, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor cache_seqlens, Tensor? cache_batch_idx, "
    "Tensor? cache_leftpad, Tensor? block_table, Tensor? page_table, Tensor? alibi_slopes, "
    "Tensor? learnable_sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k_new, "
    "Tensor? rotary_seqlens, Tensor? k_descale, Tensor? v_descale, Tensor(d!)? k_row_scales, "
    "Tensor(e!)? v_row_scales, float softmax_scale, float softcap, bool causal, "
    "SymInt[] window_size, SymInt attention_chunk, SymInt max_seqlen_q, bool rotary_interleaved, "
    "bool is_invariant) -> (Tensor, Tensor)"
)


def refuse(kind: str, **arguments: Any) -> None:
    """NotImplementedError for the first argument that is not None and that this kind of call does
    not take.
    """
    for name, value in arguments.items():
        if value is not None and (remedy := getattr(FEATURES[name], kind)):
            raise NotImplementedError(REFUSALS[kind].format(name=name, remedy=remedy))


def refuse_gradients(of: str, named: Iterable[tuple[str, Any]]) -> None:
    """NotImplementedError for the first tensor that requires a gradient, of what has none."""
    for name, x in named:
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}.requires_grad: {NO_GRADIENT[of]}")


def schema_of(names: Iterable[str], **types: str) -> str:
    """Arguments of an operator as torch's schemas write them; `types` are those that differ."""
    types = TYPES | types
    return ", ".join(f"{types.get(name, 'Tensor?')} {name}" for name in names)
