"""FlashAttention-3's `flash_attn_with_kvcache` as its own test asks it, drawn from what that test
is parametrised by, test_flash_attn_kvcache of hopper/test_flash_attn.py, one case for a number.

Of every three cases one has a window, and a sequence with more queries than keys, whose first
queries stand before key 0; half of these have chunks. On a CPU lengths, page sizes and head dims
are an eighth or so.
"""

from __future__ import annotations

import dataclasses
import random
from typing import NamedTuple

import torch

import tilewise

from .budget import Given, standard
from .reference import Span, Terms

Tensor = torch.Tensor
NHEADS = 6
LENGTHS = (
    *((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000)),
    *((128, 128), (256, 512), (2048, 3577)),
)


@dataclasses.dataclass(frozen=True)
class Flash3Case:
    """One call, in full but for the values of its tensors."""

    number: int
    device: str
    seqlen_q: int
    seqlen_k: int
    headdim: int
    nheads_k: int
    kept: str  # dtype of the cache
    page_size: int | None
    is_causal: bool
    window: tuple[int, int]
    chunk: int
    queries: tuple[int, ...]
    is_packed: bool
    cached: tuple[int, ...]  # keys of each sequence before the new ones, padding among them
    new: tuple[int, ...] | None
    leftpad: tuple[int, ...] | None
    rows: tuple[int, ...] | None  # of the cache
    rotary_dim: int
    is_interleaved: bool

    @property
    def keys(self) -> list[int]:
        """That each sequence sees."""
        none = (0,) * len(self.cached)
        sides = zip(self.cached, self.new or none, self.leftpad or none)
        return [before + new - pad for before, new, pad in sides]

    @property
    def starts_before_keys(self) -> bool:
        """Whether queries stand before key 0, under a window."""
        return self.window != (-1, -1) and any(n > m for n, m in zip(self.queries, self.keys))


def flash3_case(number: int, device: str) -> Flash3Case:
    """The case of a number."""
    for attempt in range(1000):
        case = _drawn(random.Random(f"flash3 {number} {attempt} {device}"), number, device)
        if number % 3 or (case.starts_before_keys and (number % 6 or case.chunk)):
            return case
    raise AssertionError(f"no case {number}")


def _drawn(rng: random.Random, number: int, device: str) -> Flash3Case:
    part = 1 if device == "cuda" else 8
    batch = 5 if device == "cuda" else 2
    seqlen_q, seqlen_k = (max(n // part, 1) for n in rng.choice(LENGTHS))
    page_size = rng.choice([None, *(n for n in (1, 4, 128 // part) if seqlen_k % n == 0)])
    is_causal, is_local = rng.choice(((False, False), (True, False), (False, True)))
    is_packed = rng.random() < 0.5
    kept = rng.choice(("bfloat16", "bfloat16", "float8_e4m3fn"))

    def lengths(most: int) -> tuple[int, ...]:
        least = max(1, most - 20) if is_packed else most
        return tuple(rng.randint(least, most) for _ in range(batch))

    new = rotary_dim = None
    if rng.random() < 0.5:
        new = lengths(seqlen_q if rng.random() < 0.5 else rng.randint(1, seqlen_q))
        rotary_dim = 0 if kept != "bfloat16" else rng.choice((0, 64, 128)) // (part // 2 or 1)
    room = seqlen_k - (0 if new is None else seqlen_q)
    cached = tuple(rng.randint(new is None, room) for _ in range(batch))
    has_rows, has_pad = (page_size is None and rng.random() < 0.5 for _ in "12")
    return Flash3Case(
        number=number,
        device=device,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        headdim=128 if device == "cuda" else 64,
        nheads_k=rng.choice((6, 1, 3)),
        kept=kept,
        page_size=page_size,
        is_causal=is_causal,
        window=(rng.randrange(seqlen_k), rng.randrange(seqlen_k)) if is_local else (-1, -1),
        chunk=rng.choice((0, rng.randint(1, 2 * seqlen_k))) if is_causal or is_local else 0,
        queries=lengths(seqlen_q),
        is_packed=is_packed,
        cached=cached,
        new=new,
        leftpad=tuple(rng.randrange(max(n, 1)) for n in cached) if has_pad else None,
        rows=tuple(rng.sample(range(2 * batch), batch)) if has_rows else None,
        rotary_dim=rotary_dim or 0,
        is_interleaved=rng.random() < 0.5,
    )


class Content(NamedTuple):
    """Lists have a tensor (length, heads, headdim) for each sequence."""

    q: list[Tensor]
    k: list[Tensor]  # in the cache before
    v: list[Tensor]
    k_new: list[Tensor]
    v_new: list[Tensor]
    cos: Tensor
    sin: Tensor


def _content(case: Flash3Case) -> Content:
    generator = torch.Generator().manual_seed(case.number)
    new = case.new or (0,) * len(case.cached)

    def rows(counts: tuple[int, ...], heads: int, dtype: str) -> list[Tensor]:
        shapes = [(n, heads, case.headdim) for n in counts]
        # Numbers of 8 bits, so that an append rounds nothing
        found = [torch.randn(x, generator=generator).to(getattr(torch, dtype)) for x in shapes]
        return [x.to(case.device, torch.bfloat16) for x in found]

    angles = 6.28 * torch.rand(case.seqlen_k, case.rotary_dim // 2, generator=generator)
    tables = (f(angles).to(case.device, torch.bfloat16) for f in (torch.cos, torch.sin))
    of_cache, of_new = (
        [rows(n, case.nheads_k, case.kept) for _ in "kv"] for n in (case.cached, new)
    )
    return Content(rows(case.queries, NHEADS, "bfloat16"), *of_cache, *of_new, *tables)


def run_flash3(case: Flash3Case) -> list[str]:
    """What is wrong with what `flash_attn_with_kvcache` gives."""
    content = _content(case)
    expected = _expected(case, content)
    asked = _asked(case, content)
    out, lse = tilewise.flash_attn_with_kvcache(**asked, return_softmax_lse=True)
    if not case.is_packed:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    faults = []
    for name, found in (("out", out), ("lse", lse)):
        right = expected.values[name]
        error = torch.where(found.double() == right, 0.0, (found.double() - right).abs()).max()
        if not error <= expected.allowed[name]:
            faults.append(f"{name}: {error:.2e} off, {expected.allowed[name]:.2e} allowed: {case}")
    return faults


def _asked(case: Flash3Case, content: Content) -> dict:
    """The arguments of the call."""
    batch, device = len(case.cached), case.device
    shape = batch if case.rows is None else 2 * batch, case.seqlen_k, case.nheads_k, case.headdim
    caches = [torch.full(shape, torch.nan, device=device, dtype=torch.bfloat16) for _ in "kv"]
    for cache, sequences in zip(caches, (content.k, content.v)):
        for i, x in enumerate(sequences):
            cache[case.rows[i] if case.rows else i, : len(x)] = x
    asked: dict = {"cache_seqlens": _ints(case.cached, device), "causal": case.is_causal}
    asked |= {"window_size": case.window, "attention_chunk": case.chunk}
    if case.page_size is not None:
        pages = batch * case.seqlen_k // case.page_size
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(device)
        asked["page_table"] = order.int().view(batch, -1)
        caches = [x.view(pages, case.page_size, *shape[2:])[order.argsort()] for x in caches]
    caches = [x.to(getattr(torch, case.kept)) for x in caches]
    if case.rows is not None:
        asked["cache_batch_idx"] = _ints(case.rows, device)
    if case.leftpad is not None:
        asked["cache_leftpad"] = _ints(case.leftpad, device)
    if case.new is not None:
        join = torch.cat if case.is_packed else torch.stack
        asked |= {"k": join(content.k_new), "v": join(content.v_new)}
        if case.rotary_dim:
            asked |= {"rotary_cos": content.cos, "rotary_sin": content.sin}
            asked["rotary_interleaved"] = case.is_interleaved
    if case.is_packed:
        asked |= {"cu_seqlens_q": _starts(case.queries, device), "max_seqlen_q": case.seqlen_q}
        if case.new is not None:
            asked["cu_seqlens_k_new"] = _starts(case.new, device)
    q = (torch.cat if case.is_packed else torch.stack)(content.q)
    return asked | {"q": q, "k_cache": caches[0], "v_cache": caches[1]}


def _ints(numbers: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _starts(counts: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor((0, *counts), device=device).cumsum(0).int()


def _expected(case: Flash3Case, content: Content):
    """The oracle's answer over rows of all sequences."""
    q, k, v, spans, first_q, first_k = [], [], [], [], 0, 0
    is_one = not case.is_causal and case.window == (-1, -1)
    for i, before in enumerate(case.cached):
        pad = case.leftpad[i] if case.leftpad else 0
        at_q = torch.full_like if is_one else torch.add
        place = torch.arange(len(content.q[i]), device=case.device)
        q.append(_turned(content.q[i], at_q(place, before), case, content))
        place = torch.arange(len(content.k_new[i]), device=case.device) + before
        new = _turned(content.k_new[i], place, case, content)
        k.append(torch.cat([content.k[i], new])[pad:])
        v.append(torch.cat([content.v[i], content.v_new[i]])[pad:])
        spans.append(Span(i, first_q, len(q[i]), first_k, len(k[i])))
        first_q, first_k = first_q + len(q[i]), first_k + len(k[i])
    diagonals = [len(y) - len(x) for x, y in zip(q, k)]

    def is_in_chunk(t, b, h, i, j):
        position = i + diagonals[b]
        first = position - torch.remainder(position, case.chunk)
        return (j >= first) & (j < first + case.chunk)

    left, right = (None if side < 0 else side for side in case.window)
    terms = Terms(
        scale=case.headdim**-0.5,
        left=left,
        right=0 if case.is_causal else right,
        mask=is_in_chunk if case.chunk else None,
    )
    tensors = {"q": torch.cat(q), "k": torch.cat(k), "v": torch.cat(v)}
    lse_off = 2**-13 if case.device == "cpu" else 0.0
    given = Given(
        tensors, (), spans, terms, torch.zeros_like(tensors["q"]), None, 0.0, 0.0, lse_off
    )
    return standard(given)


def _turned(x: Tensor, position: Tensor, case: Flash3Case, content: Content) -> Tensor:
    """Pairs of the first rotary_dim numbers of each row, turned by the angles of its position."""
    if not case.rotary_dim or case.new is None:
        return x
    cos, sin = (table[position].float().unsqueeze(1) for table in (content.cos, content.sin))
    turning, rest = x[..., : case.rotary_dim].float(), x[..., case.rotary_dim :]
    pairs = turning.unflatten(-1, (-1, 2) if case.is_interleaved else (2, -1))
    dim = -1 if case.is_interleaved else -2
    a, b = pairs.unbind(dim)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim).flatten(-2)
    return torch.cat([turned.to(x.dtype), rest], -1)
