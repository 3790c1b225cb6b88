"""Masks: which keys a query sees, as functions of positions (`tilewise.mods` has the page)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import ClassVar

import torch

from ..errors import ArgumentError, a_type
from ..tile import predicates
from .function import TracedFunction, check_sizes, check_tensor
from .symbols import Symbol
from .trace import MASK, maximum, trace
from .trace_cache import trace_once

Tensor = torch.Tensor
Predicate = Callable[..., Tensor | Symbol | bool]
DENSE_LIMIT = 1 << 26  # bools that `dense` will make


class Mask(TracedFunction):
    """A mask: its predicate as an expression tree, and the tensors that it captured; made by `mask`
    and the named masks.

    Example:
        >>> window = causal() & ~mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx > 2)
        >>> window.dense(1, 1, 4, 4)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [0, 1, 1, 1]], dtype=torch.int32)
    """

    KIND: ClassVar[str] = "mask"

    def __call__(self, b, h, q_idx, kv_idx):
        """Evaluates the predicate; inside another mask's function, a part of that function.

        Args:
            b: batch index, int or integer tensor; the four broadcast against each other.
            h: query head index.
            q_idx: position of the query.
            kv_idx: position of the key.

        Returns:
            Bools, of the broadcast shape of those indices that the predicate uses.
        """
        return self._value(b, h, q_idx, kv_idx)

    def __and__(self, other: Predicate) -> Mask:
        return _joined("&", self, other=other)

    def __or__(self, other: Predicate) -> Mask:
        return _joined("|", self, other=other)

    def __invert__(self) -> Mask:
        return mask(lambda b, h, q_idx, kv_idx: ~self(b, h, q_idx, kv_idx))

    def __rand__(self, other: Predicate) -> Mask:
        return _joined("&", other, other=self)

    def __ror__(self, other: Predicate) -> Mask:
        return _joined("|", other, other=self)

    def __bool__(self) -> bool:
        raise ArgumentError(
            f"{self!r} has no truth value (for `and`, `or`, `not` or `if`): join masks with &, | "
            "and ~"
        )

    def dense(
        self,
        batch: int,
        nheads: int,
        seqlen_q: int,
        seqlen_k: int,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Evaluates the predicate for all pairs, for tests and pictures.

        Args:
            batch: batch size.
            nheads: query heads.
            seqlen_q: queries.
            seqlen_k: keys.
            device: that of the captured tensors, else the CPU, by default.

        Returns:
            bool (batch, nheads, seqlen_q, seqlen_k).

        Raises:
            ArgumentError: the mask would be too large.
        """
        shape = (batch, nheads, seqlen_q, seqlen_k)
        count = batch * nheads * seqlen_q * seqlen_k
        if count > DENSE_LIMIT:
            raise ArgumentError(
                f"a dense mask of shape {shape} has {count} elements, more than {DENSE_LIMIT}: "
                "build a BlockMask with tilewise.sparse.create_block_mask"
            )
        device = self.device(device)
        check_sizes(self, shape)
        b, h, q, k = (torch.arange(n, device=device) for n in shape)
        is_seen = self(b[:, None, None, None], h[:, None, None], q[:, None], k)
        return is_seen.to(device).expand(shape).contiguous()


def mask(function: Predicate) -> Mask:
    """Makes a mask from any predicate of (b, h, q_idx, kv_idx).

    Example:
        >>> strided = mask(lambda b, h, q_idx, kv_idx: (q_idx + h) % 2 == kv_idx % 2)
        >>> strided
        Mask((((q_idx + h) % 2) == (k_idx % 2)))

    Args:
        function: a predicate that uses what `tilewise.mods.trace` lists; True where a query attends
            to a key. What it captures gets no gradient.

    Raises:
        ArgumentError: the function cannot be traced.

    FlexAttention (Dong et al. 2024, arXiv 2412.05496).
    """
    if isinstance(function, Mask):
        return function
    if not callable(function):
        raise ArgumentError(
            f"mask_mod is {a_type(function)}: it must be a Mask or a function of (b, h, q_idx, "
            "kv_idx); for a tensor x pass lambda b, h, q_idx, kv_idx: x[q_idx, kv_idx]"
        )
    return trace_once(function, _traced)


def _traced(function: Predicate) -> Mask:
    expr, tensors = trace(function, MASK)
    return Mask(expr, tensors)


def causal(diagonal: int = 0) -> Mask:
    """Keys up to the query's own position plus `diagonal`.

    Example:
        >>> causal(diagonal=1).dense(1, 1, 2, 4)[0, 0].int()
        tensor([[1, 1, 0, 0],
                [1, 1, 1, 0]], dtype=torch.int32)

    Args:
        diagonal: keys; 0 is top-left, seqlen_k - seqlen_q bottom-right.
    """
    _check_int("diagonal", diagonal)
    return mask(lambda b, h, q_idx, kv_idx: predicates.within_right(q_idx, kv_idx, diagonal, 0))


def sliding_window(left: int | None, right: int | None = None) -> Mask:
    """Keys at most `left` before and `right` after the query's position.

    Example:
        >>> sliding_window(1, 0).dense(1, 1, 3, 3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)

    Args:
        left: keys before the query; None or -1: no limit.
        right: keys after it; None or -1: no limit.
    """
    for name, limit in (("left", left), ("right", right)):
        if limit is not None:
            _check_int(name, limit, least=-1)

    def predicate(b, h, q_idx, kv_idx):
        keep = True
        if left not in (None, -1):
            keep = predicates.within_left(q_idx, kv_idx, diagonal=0, left=left)
        if right not in (None, -1):
            near = predicates.within_right(q_idx, kv_idx, diagonal=0, right=right)
            keep = near if keep is True else keep & near
        return keep

    return mask(predicate)


def prefix_lm(prefix: int | Tensor) -> Mask:
    """Causal, and all queries attend to the first `prefix` keys.

    Example:
        >>> prefix_lm(2).dense(1, 1, 3, 3)[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)

    Args:
        prefix: keys: an int, or int32 or int64 (batch,).
    """
    if not isinstance(prefix, Tensor):
        _check_int("prefix", prefix, least=0)
        return mask(lambda b, h, q_idx, kv_idx: (kv_idx < prefix) | (kv_idx <= q_idx))
    check_tensor("prefix", prefix, ranks=(1,), shapes="(batch,)")
    return mask(lambda b, h, q_idx, kv_idx: (kv_idx < prefix[b]) | (kv_idx <= q_idx))


def document(doc_ids: Tensor) -> Mask:
    """Keys of the query's own document.

    Example:
        >>> document(torch.tensor([0, 0, 1], dtype=torch.int32)).dense(1, 1, 3, 3)[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)

    Args:
        doc_ids: int32 or int64, (seqlen,) or (batch, seqlen), the document of each position.
    """
    check_tensor("doc_ids", doc_ids, ranks=(1, 2), shapes="(seqlen,) or (batch, seqlen)")
    if doc_ids.ndim == 1:
        return mask(lambda b, h, q_idx, kv_idx: doc_ids[q_idx] == doc_ids[kv_idx])
    return mask(lambda b, h, q_idx, kv_idx: doc_ids[b, q_idx] == doc_ids[b, kv_idx])


def chunked(size: int) -> Mask:
    """Keys of the query's own chunk (with causal: Llama 4's local layers).

    Example:
        >>> chunked(2).dense(1, 1, 3, 3)[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)

    Args:
        size: positions per chunk.
    """
    _check_int("size", size, least=1)
    return mask(lambda b, h, q_idx, kv_idx: q_idx // size == kv_idx // size)


def dilated(stride: int) -> Mask:
    """Keys at distances that are multiples of `stride`.

    Example:
        >>> dilated(2).dense(1, 1, 3, 3)[0, 0].int()
        tensor([[1, 0, 1],
                [0, 1, 0],
                [1, 0, 1]], dtype=torch.int32)

    Args:
        stride: positions.

    Longformer (Beltagy et al. 2020, arXiv 2004.05150).
    """
    _check_int("stride", stride, least=1)
    # abs: kernels then need no care for what % gives below 0
    return mask(lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) % stride == 0)


def tree(ancestors: Tensor, seqused_k: Tensor, cu_seqlens_q: Tensor) -> Mask:
    """A tree of draft tokens (speculative decoding), with a KV cache: queries are the last keys of
    their sequence.

    Example:
        >>> ancestors = torch.tensor([0b001, 0b011, 0b101])  # two children of the first draft
        >>> starts, used = torch.tensor([0, 3]).int(), torch.tensor([5]).int()
        >>> q_idx, kv_idx = torch.arange(2, 5)[:, None], torch.arange(5)
        >>> tree(ancestors, used, starts)(0, 0, q_idx, kv_idx).int()
        tensor([[1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 0, 1]], dtype=torch.int32)

    Keys before the drafts are visible to all queries. Up to 64 drafts per sequence; nothing is read
    on the host.

    Args:
        ancestors: int64 (total_q,): bit j says whether the query attends to draft j of its
            sequence; set its own bit, too.
        seqused_k: int32 (batch,), keys of each sequence, as in `tilewise.attention`.
        cu_seqlens_q: int32 (batch + 1,), where the queries of each sequence begin.
    """
    check_tensor("ancestors", ancestors, ranks=(1,), shapes="(total_q,)")
    check_tensor("seqused_k", seqused_k, ranks=(1,), shapes="(batch,)")
    check_tensor("cu_seqlens_q", cu_seqlens_q, ranks=(1,), shapes="(batch + 1,)")
    if ancestors.dtype != torch.int64:
        raise ArgumentError(f"ancestors.dtype is {ancestors.dtype}: it must be int64")
    starts, first = cu_seqlens_q[:-1], seqused_k - cu_seqlens_q.diff()

    def predicate(b, h, q_idx, kv_idx):
        draft = kv_idx - first[b]
        row = maximum(starts[b] + q_idx - first[b], 0)  # below, before the drafts: of no effect
        bits = ancestors[row] >> maximum(draft, 0)
        return (draft < 0) | ((bits & 1) == 1)

    return mask(predicate)


JOINS = {"&": operator.and_, "|": operator.or_}


def _joined(op: str, one: Predicate, other: Predicate) -> Mask:
    for operand in (one, other):
        if not callable(operand):
            raise ArgumentError(
                f"`{op}` joins a mask with {a_type(operand)}: it joins masks and functions of "
                "(b, h, q_idx, kv_idx)"
            )
    first, second, join = mask(one), mask(other), JOINS[op]
    return mask(
        lambda b, h, q_idx, kv_idx: join(first(b, h, q_idx, kv_idx), second(b, h, q_idx, kv_idx))
    )


def _check_int(name: str, value: int, least: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentError(f"{name} is {a_type(value)}: it must be an int")
    if least is not None and value < least:
        raise ArgumentError(f"{name}={value}: it must be at least {least}")
