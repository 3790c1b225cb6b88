"""The tensors of a case with a cache: what sequences hold, and where it lies, with NaN and wild
page numbers in all that is not used.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tilewise import mods

from . import formulas, functions
from .cached_cases import ROWS, CachedCase
from .places import lying, negated
from .reference import Span, Terms

Tensor = torch.Tensor
STORED = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"e4m3": 448.0, "int8": 127.0}
WILD = (-1, 2**31 - 1)  # entries of the page table that are not used


class Content(NamedTuple):
    """What each sequence holds."""

    q: list[Tensor]  # (seqlen_q, nheads, headdim)
    k: list[Tensor]  # (seqlen_k, nheads_k, headdim), as it is stored
    v: list[Tensor]
    k_scales: list[Tensor]  # (seqlen_k, nheads_k), fp32, whatever their kind
    v_scales: list[Tensor]
    slopes: Tensor | None
    sinks: Tensor | None
    captured: dict[str, Tensor]
    ancestors: list[Tensor]  # of a tree of drafts


class Place(NamedTuple):
    """Where sequences lie, which must not change a bit."""

    order: tuple[int, ...]  # of sequences in the batch
    page_size: int | None
    memory: str
    seed: int  # of the order of pages


def content_of(case: CachedCase) -> Content:
    """The values of a case, on the CPU."""
    look = case.look
    generator = torch.Generator().manual_seed(case.seed)
    nheads = look.nheads_k * look.group

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    dtype = getattr(torch, look.dtype)
    q = [normal(n, nheads, look.headdim) for n in case.queries]
    k, v = (
        [normal(n, look.nheads_k, d) for n in case.keys] for d in (look.headdim, look.headdim_v)
    )
    if case.logits:
        size = math.sqrt(case.logits / (case.scale or look.headdim**-0.5) / look.headdim)
        noise = 0.1 / math.sqrt(case.logits)
        q, k = ([size * (1 + noise * x) for x in xs] for xs in (q, k))
    stored = [_stored(case, xs, generator) for xs in (k, v)]
    learned = torch.rand(nheads, generator=generator), normal(nheads)
    longest = max((*case.queries, *case.keys, 1))
    names = (look.mask,) if look.mask != "tree" else ()
    return Content(
        [x.to(dtype) for x in q],
        *(stored[0][0], stored[1][0], stored[0][1], stored[1][1]),
        learned[0] if look.has("slopes") else None,
        learned[1].to(dtype) if look.has("sinks") else None,
        functions.captured(names, len(case.keys), nheads, longest, generator),
        [_ancestors(n, generator) for n in case.queries],
    )


def _stored(case: CachedCase, xs: list[Tensor], generator: torch.Generator) -> tuple[list, list]:
    """Rows as a cache keeps them, and their scales."""
    look = case.look
    if not look.kept:
        return [x.to(getattr(torch, look.dtype)) for x in xs], [x.new_ones(x.shape[:2]) for x in xs]
    largest = LARGEST[look.kept]
    size = largest / 4
    several = torch.rand(len(xs), look.nheads_k, generator=generator) + 0.5
    codes, scales = [], []
    for row, x in enumerate(xs):
        scale = torch.rand(x.shape[:2], generator=generator) + 0.5
        if look.scales != "row":
            scale = several[row if look.scales == "sequence" else 0].expand_as(scale)
        if look.scales in ("tensor", "none"):
            scale = several[0, :1].expand_as(scale)
        is_scaled = look.scales != "none"
        code = (x * (size if is_scaled else 1)).round()
        # Past the largest, int8 wraps, and torch before 2.13 makes NaN of e4m3
        codes.append(code.clamp(-largest, largest).to(STORED[look.kept]))
        scales.append(scale / size if is_scaled else torch.ones_like(scale))
    return codes, scales


def _ancestors(count: int, generator: torch.Generator) -> Tensor:
    """Bits of a tree of drafts: each has a parent before it, or none, and its own bit."""
    bits = []
    for i in range(min(count, 64)):
        parent = int(torch.randint(-1, max(i, 1), (), generator=generator))
        bit = 1 << i if i < 63 else -(1 << 63)
        bits.append((bits[parent] if 0 <= parent < i else 0) | bit)
    return torch.tensor(bits, dtype=torch.int64)


def placed(case: CachedCase, content: Content, place: Place) -> dict:
    """The arguments of `attention`."""
    look, device = case.look, case.lane.device
    pick = [[xs[i] for i in place.order] for xs in content[:5]]
    q, k, v, k_scales, v_scales = pick
    lengths = torch.tensor([len(x) for x in k], dtype=torch.int32)
    starts = torch.tensor([0, *(len(x) for x in q)]).cumsum(0).int()
    asked: dict = {"seqused_k": lengths.to(device), "layout": look.layout}
    if place.page_size is None:
        table, room = None, max(max(lengths.tolist(), default=0) + case.spare, 1)
        rows = torch.arange(len(k))[:, None] * room + torch.arange(room)
        pages, size = len(k), room
    else:
        size = place.page_size
        table, rows, pages = _table(lengths.tolist(), size, case.spare, place.seed)
        asked["page_table"] = table.to(device)
    k, v = _cache((k, v), rows, lengths.tolist(), (pages, size), place.memory, device)
    asked |= {"k": k, "v": v}
    for name, scales in (("k_descale", k_scales), ("v_descale", v_scales)):
        asked |= _scales(name, look.scales, scales, rows, (pages, size), device)
    if look.packed and look.mask not in ROWS:  # rows behind all sequences
        q = [*q, *(x.new_full((place.seed % 4, *x.shape[1:]), math.nan) for x in q[:1])]
    asked["q"] = (torch.cat(q) if look.packed else torch.stack(q)).to(device)
    if look.packed:
        asked["cu_seqlens_q"] = starts.to(device)
    if look.layout == "bhsd":
        asked |= {name: asked[name].transpose(1, 2) for name in "qkv"}
        for name in ("k_descale", "v_descale"):
            if look.scales == "row":
                asked[name] = asked[name].transpose(1, 2)
    for name, x in (("alibi_slopes", content.slopes), ("sinks", content.sinks)):
        if x is not None:
            asked[name] = x.to(device)
    if look.mask == "tree":
        bits = torch.cat([content.ancestors[i] for i in place.order]).to(device)
        asked["mask_mod"] = mods.tree(bits, asked["seqused_k"], asked["cu_seqlens_q"])
    elif look.mask:
        read = {name: x.to(device) for name, x in content.captured.items()}
        for name in ("prefix", "flags"):
            if name in read:
                read[name] = read[name][list(place.order)]
        asked["mask_mod"] = functions.MASKS[look.mask](read)
    return _moved_anywhere(case, asked)


def _moved_anywhere(case: CachedCase, asked: dict) -> dict:
    """Arguments where the look has them lie, and `out`."""
    look = case.look
    if look.out:
        shape = (*asked["q"].shape[:-1], look.headdim_v)
        asked["out"] = torch.full(shape, math.nan, dtype=asked["q"].dtype, device=case.lane.device)
    for name, unit in look.moved:
        x = asked.get(name)
        if x is not None:
            asked[name] = lying(x, unit, (unit,) * (x.dim() - 1))
    if asked.get(look.lazy) is not None:
        asked[look.lazy] = negated(asked[look.lazy])
    return asked


def _table(lengths: list[int], size: int, spare: int, seed: int) -> tuple[Tensor, Tensor, int]:
    """Page tables, the row of the pool of each key, and the number of pages."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // size) for n in lengths]
    pages = sum(counts) + 2
    order = torch.randperm(pages, generator=generator).tolist()
    width = max(1, *counts) + -(-spare // size)
    table = torch.tensor(WILD * width, dtype=torch.int32)[:width].repeat(len(counts), 1)
    rows = torch.zeros(len(counts), width * size, dtype=torch.int64)
    for b, count in enumerate(counts):
        for i in range(count):
            page = order.pop()
            table[b, i] = page
            rows[b, i * size : (i + 1) * size] = page * size + torch.arange(size)
    return table, rows, pages


def _cache(
    kv: tuple, rows: Tensor, lengths: list[int], shape: tuple[int, int], memory: str, device: str
) -> list[Tensor]:
    """k and v, (pages, page_size, nheads_k, columns), in one kind of memory."""
    pages, size = shape
    heads, columns = kv[0][0].shape[1], [xs[0].shape[2] for xs in kv]
    dtype = kv[0][0].dtype
    poison = -128 if dtype == torch.int8 else math.nan

    def full(*sizes: int) -> Tensor:
        return torch.full(sizes, poison).to(dtype)

    if memory == "side by side":
        views = full(pages, size, heads, sum(columns)).split(columns, -1)
    elif memory == "heads first":
        views = [full(pages, heads, size, d).transpose(1, 2) for d in columns]
    elif memory == "a layer":
        views = [full(pages, 3, size, heads, d)[:, 1] for d in columns]
    else:
        views = [full(pages, size, heads, d) for d in columns]
    for view, xs in zip(views, kv):
        for b, n in enumerate(lengths):
            at = rows[b, :n]
            _bytes(view)[at // size, at % size] = _bytes(xs[b])
    return [_moved(view, device) for view in views]


def _moved(view: Tensor, device: str) -> Tensor:
    """The view on a device with the strides that it has."""
    if device == "cpu":
        return view
    whole = torch.tensor([], dtype=torch.uint8).set_(view.untyped_storage()).to(device)
    return whole.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())


def _bytes(x: Tensor) -> Tensor:
    """Eight bits as integers, which torch can index."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def _scales(
    name: str, kind: str, scales: list, rows: Tensor, shape: tuple[int, int], device: str
) -> dict:
    if kind in ("", "none"):
        return {}
    if kind == "row":
        found = torch.full((*shape, scales[0].shape[1]), math.nan)
        for b, x in enumerate(scales):
            at = rows[b, : len(x)]
            found[at // shape[1], at % shape[1]] = x
    else:
        by_sequence = [x[0] if len(x) else None for x in scales]
        one = next((x for x in by_sequence if x is not None), torch.ones(scales[0].shape[1]))
        found = one[0] if kind == "tensor" else one
        if kind == "sequence":
            found = torch.stack([one if x is None else x for x in by_sequence])
    return {name: found.contiguous().to(device)}


def oracle_inputs(case: CachedCase, content: Content) -> tuple[dict[str, Tensor], list, Terms]:
    """The same call for reference.py: tensors by rows, spans, terms."""
    device = case.lane.device
    spans, first_q, first_k = [], 0, 0
    for number, (queries, keys) in enumerate(zip(case.queries, case.keys)):
        spans.append(Span(number, first_q, queries, first_k, keys))
        first_q, first_k = first_q + queries, first_k + keys
    k, v = (
        torch.cat([x.float() * s[..., None] for x, s in zip(xs, scales)])
        for xs, scales in ((content.k, content.k_scales), (content.v, content.v_scales))
    )
    tensors = {"q": torch.cat(content.q), "k": k, "v": v}
    if not case.look.kept:
        tensors |= {"k": torch.cat(content.k), "v": torch.cat(content.v)}
    for name, x in (("slopes", content.slopes), ("sinks", content.sinks)):
        if x is not None:
            tensors[name] = x
    tensors |= {f"captured.{name}": x for name, x in content.captured.items()}
    diagonals = [keys - queries for queries, keys in zip(case.queries, case.keys)]

    def by_position(t, b, h, i, j):
        if case.look.mask == "tree":
            draft, bits = j - diagonals[b], content.ancestors[b].to(device)
            return (draft < 0) | ((bits[i] >> draft.clamp(min=0)) & 1).bool()
        return formulas.MASKS[case.look.mask](t, b, h, i + diagonals[b], j)

    terms = Terms(
        scale=case.scale or case.look.headdim**-0.5,
        left=case.left,
        right=0 if case.look.causal else case.right,
        softcap=case.softcap,
        mask=by_position if case.look.mask else None,
    )
    return {name: x.to(device) for name, x in tensors.items()}, spans, terms
