"""The door of `cache.append`."""

from __future__ import annotations

import torch

from ..errors import ArgumentError
from ..kernels.common.cached import Append
from ..tile.rotary import Rotary
from .cache_checks import check_kind, check_reach, check_starts
from .checks import knows_values
from .qkv import DTYPES, check_tensor

Tensor = torch.Tensor


def check_append(asked: Append) -> None:
    """Shapes, dtypes and devices, and that every new key has a place."""
    _check_rows(asked)
    k, batch = asked.k, _batch(asked)
    if asked.slots is None and asked.seqused_k is None:
        raise ArgumentError(
            "seqused_k and slots are missing: pass seqused_k, the keys of each sequence with the "
            "new ones, or slots, where each new key goes"
        )
    if asked.slots is not None:
        check_tensor("slots", asked.slots)
        check_kind("slots", asked.slots, k, (torch.int64,), "k")
        if asked.slots.shape != k.shape[:-2]:
            raise ArgumentError(
                f"slots has shape {tuple(asked.slots.shape)}: it must be {tuple(k.shape[:-2])}, "
                "one for each new key"
            )
    for name, x, dims in (("page_table", asked.page_table, 2), ("seqused_k", asked.seqused_k, 1)):
        if x is not None:
            check_tensor(name, x)
            check_kind(name, x, k, (torch.int32,), "k")
            if x.dim() != dims or x.shape[0] != batch:
                raise ArgumentError(
                    f"{name} has shape {tuple(x.shape)}: with {batch} sequences it must be "
                    f"({batch}{', pages)' if dims == 2 else ',)'}"
                )
    if asked.slots is None and asked.page_table is None and asked.k_cache.shape[0] != batch:
        raise ArgumentError(
            f"k_cache has {asked.k_cache.shape[0]} sequences and {batch} get new keys: they must "
            "be equal, or page_table or slots say where keys go"
        )
    if asked.rotary is not None:
        _check_rotary(asked)


def _batch(asked: Append) -> int:
    if asked.cu_seqlens_q is not None:
        return asked.cu_seqlens_q.shape[0] - 1
    if asked.k.dim() == 3:  # keys by slots alone
        return 0 if asked.seqused_k is None else asked.seqused_k.shape[0]
    return asked.k.shape[0]


def _check_rows(asked: Append) -> None:
    starts = asked.cu_seqlens_q
    if starts is not None:
        check_tensor("cu_seqlens_q", starts)
        check_kind("cu_seqlens_q", starts, asked.k, (torch.int32,), "k")
        if starts.dim() != 1 or starts.shape[0] == 0:
            raise ArgumentError(
                f"cu_seqlens_q has shape {tuple(starts.shape)}: it must be (batch + 1,)"
            )
    for name, x in zip(Append._fields[:4], asked[:4]):
        check_tensor(name, x)
        is_packed = starts is not None or (asked.slots is not None and x.dim() == 3)
        dims = 3 if name in ("k", "v") and is_packed else 4
        if x.dim() != dims:
            shape = "(total, nheads_k, headdim)" if dims == 3 else "of 4 dimensions"
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}: it must be {shape}")
        if x.stride(-1) != 1 and x.shape[-1] != 1:
            raise ArgumentError(
                f"{name} has stride {x.stride(-1)} in its last dimension: it must be contiguous"
            )
        check_kind(name, x, asked.k, (asked.k.dtype,), "k")
    check_kind("k", asked.k, asked.k, DTYPES, "k")
    for name, new, old in (("k", asked.k, asked.k_cache), ("v", asked.v, asked.v_cache)):
        if new.shape[-2:] != old.shape[-2:]:
            raise ArgumentError(
                f"{name} has {new.shape[-2]} heads of {new.shape[-1]} and {name}_cache "
                f"{old.shape[-2]} of {old.shape[-1]}: they must be equal"
            )
    for name, a, b in (("v", asked.k, asked.v), ("v_cache", asked.k_cache, asked.v_cache)):
        if a.shape[:-1] != b.shape[:-1]:
            raise ArgumentError(
                f"{name} has shape {tuple(b.shape)} and {name.replace('v', 'k', 1)} "
                f"{tuple(a.shape)}: they must be equal but for headdim"
            )
    if starts is not None and knows_values(starts):
        check_starts(starts, asked.k.shape[0], "keys")


def _check_rotary(asked: Append) -> None:
    rotary = asked.rotary
    if not isinstance(rotary, Rotary):
        raise ArgumentError(
            f"rotary is a {type(rotary).__name__}: it must be a tilewise.cache.Rotary or None"
        )
    if asked.seqused_k is None or (asked.k.dim() == 3 and asked.cu_seqlens_q is None):
        raise ArgumentError(
            "rotary needs the positions of new keys: pass seqused_k, and cu_seqlens_q if they are "
            "packed"
        )
    check_tables(rotary, asked.k, "k")


def check_tables(rotary: Rotary, x: Tensor, of: str) -> None:
    """cos and sin of angles for the heads of x."""
    for name, table in (("cos", rotary.cos), ("sin", rotary.sin)):
        check_tensor(f"rotary.{name}", table)
        check_kind(f"rotary.{name}", table, x, DTYPES, of)
        most = x.shape[-1] // 2
        if table.dim() != 2 or table.shape != rotary.cos.shape or table.shape[1] > most:
            raise ArgumentError(
                f"rotary.{name} has shape {tuple(table.shape)}: both tables must be (positions, "
                f"rotary_dim / 2), rotary_dim at most headdim, {x.shape[-1]}"
            )


def check_places(asked: Append, seqused_k: Tensor) -> None:
    """Every key that is told of has a place, and every position its angle."""
    check_reach(asked.k_cache, asked.page_table, seqused_k)
    longest = max(seqused_k.tolist(), default=0)
    if asked.rotary is not None and longest > asked.rotary.cos.shape[0]:
        raise ArgumentError(
            f"seqused_k has {longest} keys and rotary.cos {asked.rotary.cos.shape[0]} positions: "
            "make longer tables"
        )
