"""The call as torch.compile sees it: two operators, forward and backward. A layout crosses as a
tensor of numbers, so that one graph serves all layouts and lengths, and masks and score functions
as texts. What the call checks and chooses it does as it runs, on real tensors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d

from ...features import OPERATORS, SHARDED_TYPES, schema_of
from ...frontend.checks import check_rank, check_tensors
from ...frontend.scalars import Numbers, check_causal, check_flag
from ...kernels.common.outputs import empty_out
from ...mods.expressions import lookup
from ...mods.flat import FlatMods, count_tensors
from ...mods.flatten import modifiers_of
from ...mods.masks import Mask
from ...mods.scores import ScoreMod
from ...mods.serialize import MASK, SCORE_FUNCTION, deserialize, serialize
from ...ops import attention as ops
from ...ops.calls import PLAIN_TENSORS
from ...ops.context_parallel import unsharded
from ...ops.schema import SAVED, SAVED_TENSORS, no_double_backward, record_of
from ...ops.schema import operator as define
from ...problem import INPUTS, Extras, Saved
from ...tile.dropout_numbers import draw_rng
from ..layouts.layout import Layout
from ..methods.grads import LEARNED
from ..methods.shard_call import ShardCall
from ..transport.arena import Arena, reporting
from .arguments import index_sizes, refuse_captured_gradients, sharded_call
from .choice import arena_for, attend, backward, choose

Tensor = torch.Tensor
FIRST = 2 + INPUTS  # of what is saved: out and lse, q, k and v
GRADS = INPUTS + 1  # q's, k's, v's, and that of the learned tensor
# Of the operators, after q, k and v: those of a call as scalars, masks and score functions as texts
NAMES = OPERATORS["context_parallel"]
LAYOUT = INPUTS + NAMES.index("layout")  # its place, after the optional tensors


def is_traced(*inputs: Tensor) -> bool:
    """Tells whether a compiler sees the call, or tensors that have no numbers."""
    return torch.compiler.is_compiling() or any(type(x) not in PLAIN_TENSORS for x in inputs)


def attention(
    layout: Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    numbers: Numbers,
    extras: Extras,
    modifiers: FlatMods,
    **flags: Any,
) -> tuple[Tensor, Tensor]:
    """Calls the operator: `out` and `lse` of a rank's rows, (batch, tokens, heads, headdim)."""
    refuse_captured_gradients(modifiers)
    if numbers.dropout_p and extras.dropout_rng is None and layout.ranks == 1:
        extras = extras._replace(dropout_rng=draw_rng(q.device))
    left, right = numbers.sides()
    values: dict[str, Any] = (
        flags | numbers._asdict() | extras._asdict() | dict(left=left, right=right)
    )
    values |= {name: check_flag(name, flags[name]) for name in ("deterministic", "bitwise")}
    values |= dict(
        captured=list(modifiers.captured) or None,
        layout=layout.table,
        causal="" if numbers.causal is False else check_causal(numbers.causal),
        mask_mod=serialize(modifiers.mods.mask),
        score_mod=serialize(modifiers.mods.score),
        needs_grad=ops.needs_grad((q, k, v, values[LEARNED])),
    )
    arguments = {name: values[name] for name in NAMES}
    return torch.ops.tilewise.context_parallel_forward(q, k, v, **arguments)


@contextlib.contextmanager
def _running(
    q: Tensor, k: Tensor, v: Tensor, call: Sequence[Any]
) -> Iterator[tuple[Arena | None, ShardCall, str]]:
    """Inside, a call runs on its arena by the method that is chosen."""
    values: dict[str, Any] = dict(zip(NAMES, call))
    layout = _layout_of_table(values["layout"])
    with reporting(layout), unsharded(), torch.no_grad():
        arena, spec = arena_for(layout, q.device), _spec_of(layout, q, k=k, v=v, values=values)
        yield arena, spec, choose(arena, spec, q, k=k, v=v, method=values["method"])


def _spec_of(
    layout: Layout, q: Tensor, k: Tensor, v: Tensor, *, values: dict[str, Any]
) -> ShardCall:
    """Reads and checks the call of an operator's arguments after q, k and v."""
    captured, causal = tuple(values.pop("captured") or ()), values["causal"] or False
    mask = score = None
    if values["mask_mod"]:
        name = deserialize(values["mask_mod"], MASK)
        mask = Mask(lookup(name), captured[: count_tensors(name)])
        captured = captured[count_tensors(name) :]
    if values["score_mod"]:
        score = ScoreMod(lookup(deserialize(values["score_mod"], SCORE_FUNCTION)), captured)
    values |= dict(causal=causal, window=(values["left"], values["right"]))
    check_rank(q, k, v=v)
    return sharded_call(
        layout,
        q,
        k,
        v=v,
        numbers=record_of(Numbers, values),
        extras=record_of(Extras, values),
        modifiers=modifiers_of(mask, score, None, index_sizes(layout, q)),
        deterministic=values["deterministic"],
        backend=values["backend"],
        bitwise=values["bitwise"],
        learns=values["needs_grad"],
    )


def _layout_of_table(table: Tensor) -> Layout:
    """Reads a layout from its table."""
    numbers = tuple(table.tolist())
    names = numbers[5 + numbers[3] :][: numbers[0]]
    name = bytes(names).decode().partition("\n")[2]
    resolve: Any = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009
    group = resolve(name) if name else None
    return _layout_of(numbers, group)


@functools.lru_cache(maxsize=64)
def _layout_of(numbers: tuple[int, ...], group: Any) -> Layout:
    stream = iter(numbers)
    n_letters, seqlen, rank, ranks, n_starts = itertools.islice(stream, 5)
    lengths = tuple(itertools.islice(stream, ranks))
    kind = bytes(itertools.islice(stream, n_letters)).decode().partition("\n")[0]
    starts = tuple(itertools.islice(stream, n_starts)) or None
    runs = tuple(tuple((next(stream), next(stream)) for _ in range(n)) for n in lengths)
    return Layout(kind, seqlen, runs=runs, rank=rank, cu_seqlens=starts, group=group)


def _forward(arguments: tuple) -> tuple[Tensor, ...]:
    q, k, v, *call = arguments
    with _running(q, k, v=v, call=call) as (arena, spec, method):
        results = attend(arena, spec, q=q, k=k, v=v, method=method, return_lse=True)
    return tuple(x.contiguous() for x in results if x is not None)


def _backward(arguments: tuple) -> tuple[Tensor, ...]:
    saved, call = Saved._make(arguments[:SAVED_TENSORS]), arguments[SAVED_TENSORS:]
    with _running(saved.q, saved.k, v=saved.v, call=call) as (arena, spec, method):
        grads = backward(arena, spec, saved, method=method)
    absent = saved.q.new_empty(0)
    return tuple(absent if x is None else x.contiguous() for x in grads[:GRADS])


def _forward_fake(arguments: tuple) -> tuple[Tensor, Tensor]:
    q, k, v = arguments[:INPUTS]
    check_rank(q, k, v=v)
    check_tensors(q, k, v=v)
    return empty_out(q, v.shape[3])


def _backward_fake(arguments: tuple) -> tuple[Tensor, ...]:
    saved = Saved._make(arguments[:SAVED_TENSORS])
    learned = arguments[SAVED_TENSORS + NAMES.index(LEARNED)]
    grads = [x.new_empty(x.shape) for x in (saved.q, saved.k, saved.v)]
    return *grads, saved.q.new_empty(0) if learned is None else torch.empty_like(learned)


def _setup_context(ctx, inputs, output):
    tensors, ctx.options = inputs[: LAYOUT - 1], inputs[LAYOUT + 1 :]
    captured, table = inputs[LAYOUT - 1 : LAYOUT + 1]
    ctx.save_for_backward(*output, *tensors, table, *(captured or ()))
    ctx.set_materialize_grads(False)


def _autograd(ctx, dout, dlse):
    grads: list[Any] = [None] * (LAYOUT + 1 + len(ctx.options))
    if dout is None and dlse is None:
        return tuple(grads)
    (out, lse, q, k, v), tensors = ctx.saved_tensors[:FIRST], ctx.saved_tensors[FIRST:]
    optional, (table, *captured) = tensors[: LAYOUT - 1 - INPUTS], tensors[LAYOUT - 1 - INPUTS :]
    dout = torch.zeros_like(out) if dout is None else dout
    call = dict(zip(NAMES, (*optional, captured or None, table, *ctx.options)))
    backward = torch.ops.tilewise.context_parallel_backward
    *grads[:INPUTS], dlearned = backward(dout, dlse, q, k, v, out, lse, **call)
    if call[LEARNED] is not None:
        grads[INPUTS + NAMES.index(LEARNED)] = dlearned
    return tuple(grads)


CALL = schema_of(NAMES, **SHARDED_TYPES)
# Inductor leaves such operators out of the CUDA graphs that it captures (`refuse_capture`)
TAGS = (torch.Tag.cudagraph_unsafe,)
define(
    "context_parallel_forward",
    f"(Tensor q, Tensor k, Tensor v, {CALL}) -> (Tensor, Tensor)",
    kernel=_forward,
    fake=_forward_fake,
    backward=_autograd,
    setup_context=_setup_context,
    tags=TAGS,
)
define(
    "context_parallel_backward",
    f"({SAVED}, {CALL}) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_backward,
    fake=_backward_fake,
    backward=no_double_backward,
    tags=TAGS,
)
