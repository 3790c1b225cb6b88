"""A KV cache whose sequences lie on several ranks, in whole pieces: which rank has which keys and
appends them, and attention that reads each rank's keys and exchanges results once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...dispatch import choose_cached
from ...errors import OURS, ArgumentError
from ...features import refuse_gradients
from ...frontend.append import append
from ...frontend.attention import attention
from ...frontend.cached import check_cached
from ...frontend.invariance import check_split_size
from ...frontend.scalars import Numbers, Window, as_int, check_causal
from ...frontend.values import check_reach
from ...kernels.common.cached import Cached
from ...kernels.cpu import cache as cpu_cache
from ...kernels.cpu import cache_states
from ...problem import OPEN, Extras
from ...tile.rotary import Rotary
from ..layouts.group import checked
from ..layouts.work import Band, band_of
from .agreement import Agreement, answering, check_pages

Tensor = torch.Tensor
# Arguments of `tilewise.attention` for which it does not matter where a key is
PASSED = "scale", "softcap", "sinks", "k_descale", "v_descale", "backend"


class CacheShards:
    """A KV cache over the ranks of a group: piece i of each sequence, `piece` keys, lies on rank
    i % ranks, behind the sequence's earlier pieces there.

    Example:
        >>> import torch, tilewise.distributed as td
        >>> shards = td.CacheShards(512, group=1)  # in a program, a process group
        >>> k_cache, v_cache = torch.zeros(2, 40, 16, 2, 32).unbind(0)  # this rank's 40 pages
        >>> table = torch.randperm(32, dtype=torch.int32).view(1, 32)  # of its keys
        >>> used = torch.tensor([5], dtype=torch.int32)  # keys of the whole sequence, new ones too
        >>> q, k, v = torch.randn(1, 5, 4, 32), *torch.randn(2, 1, 5, 2, 32)
        >>> shards.append(k_cache, v_cache, k, v, seqused_k=used, page_table=table)
        >>> where = dict(seqused_k=used, page_table=table)
        >>> shards.attention(q, k_cache, v_cache, causal=True, **where).shape
        torch.Size([1, 5, 4, 32])

    All ranks call `append` and `attention` with the same queries, new keys and lengths. Each has
    pages and a page table of its own, with `lengths(seqused_k)` keys.

    Args:
        piece: keys per piece, a multiple of the page size, and of `split_size` where it is asked
            for: 512, 1024 or 2048 are its defaults, by query heads per key head.
        group: the process group or DeviceMesh; None for the default group; or a number of ranks,
            to plan for.
    """

    def __init__(self, piece: int, group: Any = None) -> None:
        size = as_int(piece)
        if size is None or size < 1:
            raise ArgumentError(f"piece={piece!r}: it must be an int of at least 1")
        self.piece, self.group = size, checked(group)
        self.is_planned = type(self.group) is int
        self.ranks = self.group if self.is_planned else dist.get_world_size(self.group)
        self.rank = 0 if self.is_planned else dist.get_rank(self.group)
        is_alone = self.is_planned or self.ranks == 1
        self.agreement = None if is_alone else Agreement(self.group)

    def lengths(self, seqused_k: Tensor, rank: int | None = None) -> Tensor:
        """The keys that a rank has of each sequence, by default this one, int32.

        >>> import torch, tilewise.distributed as td
        >>> td.CacheShards(16, group=2).lengths(torch.tensor([40, 9]), rank=1)
        tensor([16,  0], dtype=torch.int32)
        """
        rank = self.rank if rank is None else rank
        turn = self.piece * self.ranks
        last = (seqused_k % turn - rank * self.piece).clamp(0, self.piece)
        return (seqused_k // turn * self.piece + last).int()

    def append(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        seqused_k: Tensor,
        page_table: Tensor,
        rotary: Rotary | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
    ) -> None:
        """Writes those new keys and values to this rank's cache that it owns, as
        `tilewise.cache.append` does. k and v are (batch, seqlen_new, nheads_k, headdim), the last
        ones of the `seqused_k` keys of each whole sequence.
        """
        check_pages(k_cache, seqused_k, page_table=page_table, piece=self.piece, batch=len(k))
        lengths, names = self.lengths(seqused_k), OURS._replace(seqused_k="lengths(seqused_k)")
        check_reach(k_cache, page_table, seqused_k=lengths, words=names, read=k.shape[1])
        last, page_size = seqused_k.long().unsqueeze(1), k_cache.shape[1]
        position = last - k.shape[1] + torch.arange(k.shape[1], device=last.device)
        piece, place = position // self.piece, position % self.piece
        is_owned = (piece % self.ranks == self.rank) & (position >= 0)
        row = piece // self.ranks * self.piece + place
        entry = (row // page_size).clamp(0, page_table.shape[1])
        # Behind a table lies a page that is not there
        page = F.pad(page_table.long(), (0, 1), value=len(k_cache)).gather(1, entry)
        slots = torch.where(is_owned, page * page_size + row % page_size, -1)
        options: Any = dict(rotary=rotary, k_descale=k_descale, v_descale=v_descale)
        append(k_cache, v_cache, k, v, seqused_k=seqused_k, slots=slots, **options)

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        seqused_k: Tensor,
        page_table: Tensor,
        causal: bool | str = False,
        window: Window = None,
        split_size: int | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Exact attention of queries over the keys of all ranks; every rank gets the result.

        By default each rank computes `out` and `lse` for its keys, and one exchange of these
        follows: the bits are the same in every run, and the error is within the budget. With
        `split_size`, or in `tilewise.batch_invariant()`, the state of each piece is exchanged and
        all are folded in their order: the bits are those of `tilewise.attention` over one cache.

        Args:
            q: (batch, seqlen_q, nheads, headdim), the last ones of each sequence, on all ranks.
            k_cache: this rank's pages, (num_pages, page_size, nheads_k, headdim).
            v_cache: shaped as k_cache, with its own headdim_v.
            seqused_k: int32 (batch,), keys of the whole sequences.
            page_table: int32 (batch, pages), of its keys; for pieces on GPUs as wide on all ranks.
            causal: as in `tilewise.attention`, by positions in the whole sequence.
            window: likewise.
            split_size: keys per split, of which `piece` has a whole number.
            return_lse: whether to return the log-sum-exp, too.
            options: scale, softcap, sinks (which count once), k_descale, v_descale, backend.

        Returns:
            `out`, and with `return_lse` also the log-sum-exp, as `tilewise.attention`.

        Raises:
            ArgumentError: an argument is wrong.
            NotImplementedError: an argument is not supported here.
        """
        with contextlib.nullcontext() if self.agreement is None else self.agreement.reporting():
            check_pages(k_cache, seqused_k, page_table=page_table, piece=self.piece, batch=len(q))
            self._check(causal=causal, options=options)
            # The first rank alone adds them
            if (sinks := options.get("sinks")) is not None and sinks.shape != q.shape[2:3]:
                raise ArgumentError(
                    f"sinks has shape {tuple(sinks.shape)}: it must be ({q.shape[2]},)"
                )
            refuse_gradients("cached", [("q", q), ("k", k_cache), ("v", v_cache)])
            band = band_of(window, causal is not False)
            size = self._split_size(q, k_cache, split_size=split_size)
            if self.agreement is not None:
                about = f"window={tuple(band)}, split_size={size}, pieces of {self.piece}"
                if size and not q.is_cpu:
                    about += f", {page_table.shape[1]} pages in the page table"
                self.agreement.check(q, dict(seqused_k=seqused_k, sinks=sinks), about)
        if self.ranks == 1:
            options |= dict(seqused_k=seqused_k, page_table=page_table, split_size=split_size)
            options["window"] = band.left, band.right
            out, lse = attention(q, k_cache, v_cache, return_lse=True, **options)
            return (out, lse) if return_lse else out
        lengths, queries = self.lengths(seqused_k), q.shape[1]
        mask = self._mask(queries, seqused_k, lengths=lengths, band=band)
        options |= dict(seqused_k=lengths, page_table=page_table, mask_mod=mask)
        if size and q.numel():
            out, lse = self._fold(q, k_cache, v_cache, used=seqused_k, size=size, options=options)
        else:
            if band.left != OPEN:  # of the last keys here no query sees more
                rounds = (queries + band.left) // (self.piece * self.ranks) + 1
                options["window"] = rounds * self.piece, None
            out, lse = self._merge(q, k_cache, v_cache, options=options)
        return (out, lse) if return_lse else out

    def _check(self, *, causal: Any, options: Any) -> None:
        refused = [name for name in options if name not in PASSED]
        if refused:
            raise NotImplementedError(
                f"{refused[0]} with cache shards: besides masks by causal and window a call takes "
                f"{', '.join(PASSED)}; tilewise.attention takes it, with the whole cache on a rank"
            )
        if self.is_planned and self.ranks > 1:
            raise ArgumentError(
                f"group={self.group}: a number of ranks has no processes; pass a process group"
            )
        if check_causal(causal) == "top_left":
            raise ArgumentError(
                "causal='top_left' with a cache: the queries are the last ones of their sequence, "
                "so it must be False, True or 'bottom_right'"
            )

    def _split_size(self, q: Tensor, k_cache: Tensor, split_size: int | None) -> int:
        """The keys of a piece of the call; 0 where nothing asks for pieces."""
        size = check_split_size(split_size, q.shape[2] // k_cache.shape[2])
        if size and self.piece % size:
            raise ArgumentError(
                f"split_size={size} and piece={self.piece}: a rank's pieces must be whole pieces "
                "of the call, so make the cache with a multiple of split_size"
            )
        return size

    def _mask(
        self, queries: int, seqused_k: Tensor, lengths: Tensor, band: Band
    ) -> Callable[..., Any] | None:
        """Which of this rank's keys a query sees, by their positions in the whole sequence; None
        for all.
        """
        left, right, piece = band.left, band.right, self.piece
        hides_right = right != OPEN and right < queries - 1
        if left == OPEN and not hides_right:
            return None
        between = (self.ranks - 1) * piece  # two pieces, keys of other ranks
        shift = seqused_k.int() - lengths - self.rank * piece

        def sees(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            distance = q_idx + shift[b] - (kv_idx + kv_idx // piece * between)
            if left == OPEN:
                return distance >= -right
            return (distance <= left) & (distance >= -right) if hides_right else distance <= left

        return sees

    def _merge(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Exchanges `out` and `lse` of each rank's keys, and merges them in the order of ranks."""
        if self.rank:
            options["sinks"] = None  # they count once
        with answering(self._gather, q, (*q.shape[:3], v_cache.shape[3] + 1)):
            out, lse = attention(q, k_cache, v_cache, return_lse=True, **options)
        sent = torch.cat((out.to(lse.dtype), lse.transpose(1, 2).unsqueeze(-1)), -1)
        outs, lses = self._gather(sent).split((out.shape[-1], 1), -1)
        parts = (outs * lses.softmax(0)).masked_fill(lses == -torch.inf, 0)  # NaN without keys
        lse = lses.logsumexp(0).squeeze(-1).transpose(1, 2)
        return parts.sum(0).to(q.dtype), lse

    def _fold(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        used: Tensor,
        size: int,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Exchanges the states of all pieces, and folds them in their order."""
        extras = Extras(sinks=options.get("sinks"), seqused_k=options["seqused_k"])
        numbers = Numbers(options.get("scale"), options.get("softcap"))
        table = options["page_table"]
        agreement: Any = self.agreement
        cached = Cached(q, k_cache, v_cache, table, extras=extras)
        descales = {name: options.get(name) for name in ("k_descale", "v_descale")}
        cached = cached._replace(backend=options.get("backend"), **descales)
        keys, turn = max(1, table.shape[1] * k_cache.shape[1]), self.piece // size
        if q.is_cpu:  # a GPU's lengths the host would have to wait for
            keys = -(-max([1, *used.tolist()]) // self.ranks)
        turns = -(-keys // self.piece)
        count = turns * turn * q.shape[:3].numel() * (v_cache.shape[3] + 2)
        with agreement.reporting() if q.is_cpu else answering(self._gather, q, (count,)):
            cached = check_cached(cached, numbers, split_size=size, mask_mod=options["mask_mod"])
            backend = choose_cached(cached)
            if backend is cpu_cache:
                states = cache_states.write_states(cached, turns * self.piece)
            else:
                states = backend.write_states(cached, turns * turn)
            if q.is_cpu:
                agreement.meet()
        states = self._gather(states)
        if backend is cpu_cache:
            return cache_states.fold_states(cached, states, turn)
        from ...kernels.portable.decode_launch import fold_states  # imports Triton

        return fold_states(cached, states, used=used, turn=turn)

    def _gather(self, sent: Tensor) -> Tensor:
        """What each rank sends, (ranks, ...)."""
        received = sent.new_empty((self.ranks * len(sent), *sent.shape[1:]))
        # torch 2.13 gave it another name
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(received, sent, group=self.group)
        return received.unflatten(0, (self.ranks, -1))
