"""Computes one case with a cache: against the oracle, and the contract of docs/design/cache.md."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch

import tilewise
from tilewise.kernels.hopper.fwd import cached as hopper
from tilewise.kernels.hopper.fwd import parts_launch
from tilewise.kernels.portable import decode_launch
from tilewise.testing import use_emulator, use_interpreter

from .budget import Given, standard
from .cached_cases import MEMORY, PAGES, ROWS, CachedCase
from .cached_inputs import Content, Place, content_of, oracle_inputs, placed

Tensor = torch.Tensor
Attend = Callable[..., tuple[Tensor, Tensor]]
ALIKE = 8  # queries that have the bits of one by all schedules
CHUNK = 9  # queries of which Hopper's forward of training takes a sequence, as a chunk


class CachedOutcome(NamedTuple):
    """What became of a case: `faults` is empty where it is right. None may be refused."""

    case: CachedCase
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join((str(self.case), *self.faults))


class Found(NamedTuple):
    """out, (rows, nheads, headdim_v), and lse, (nheads, rows), of each sequence."""

    out: list[Tensor]
    lse: list[Tensor]
    walks: bool  # whether each tile of queries walks all keys; else these are in pieces


def run_cached(case: CachedCase, attend: Attend = tilewise.attention) -> CachedOutcome:
    """The outcome of a case; `attend` is what stands in for `tilewise.attention`."""
    rng = random.Random(f"place {case.seed}")
    content = content_of(case)
    order = tuple(range(len(case.keys)))
    place = Place(order, case.look.page_size, case.look.memory, case.seed)
    try:
        with _on_cpu(case), mock.patch.object(hopper, "least_queries", lambda *_: CHUNK):
            found = _compute(case, content, place, attend)
            faults = _elsewhere(case, content, place, found, rng, attend)
            faults += _alone(case, content, place, found, rng, attend)
    except Exception as error:
        return CachedOutcome(case, (f"raised {type(error).__name__}: {error}",))
    return CachedOutcome(case, (*faults, *_compare(case, content, found)))


@contextlib.contextmanager
def _on_cpu(case: CachedCase) -> Iterator[None]:
    lane, context = case.lane, contextlib.nullcontext()
    if lane.device == "cpu" and lane.backend == "portable":
        context = _few_sms(1 + case.seed % 4)
    if lane.device == "cpu" and lane.backend == "hopper":
        context = _emulated(case.seed)
    with context:
        yield


@contextlib.contextmanager
def _emulated(seed: int) -> Iterator[None]:
    """The emulator, on a GPU with so few SMs that tiles of small cases have a part or two."""
    with use_emulator(seed), mock.patch.object(parts_launch, "SMS", 1 + seed % 2 * 131):
        yield


@contextlib.contextmanager
def _few_sms(count: int) -> Iterator[None]:
    """The interpreter, on so few SMs that programs of small cases walk several pieces."""
    with use_interpreter(), mock.patch.object(decode_launch, "INTERPRETED_SMS", count):
        yield


def _compute(case: CachedCase, content: Content, place: Place, attend: Attend) -> Found:
    look = case.look
    asked = placed(case, content, place)
    window = (case.left, case.right) if look.has("window") else None
    options = dict(causal=look.causal, window=window, softcap=case.softcap, scale=case.scale)
    options |= dict(split_size=case.split_size, return_lse=True)
    _check_refusals(case, asked, options)
    with _noted() as walks:
        out, lse = attend(**asked, **options, backend=case.served_by)
    if not look.packed:
        out = (out.transpose(1, 2) if look.layout == "bhsd" else out).flatten(0, 1)
        lse = lse.transpose(0, 1).flatten(1)
    counts = [len(content.q[i]) for i in place.order]
    tail, lse_tail, total = out[sum(counts) :], lse[:, sum(counts) :], sum(counts)
    assert (tail.isnan() if look.out else tail == 0).all(), "out behind the last sequence"
    assert (lse_tail == -math.inf).all(), "lse behind the last sequence"
    out, lse = out[:total], lse[:, :total]
    pairs = dict(zip(place.order, zip(out.split(counts), lse.split(counts, 1))))
    out, lse = ([pairs[i][side] for i in sorted(pairs)] for side in (0, 1))
    return Found(out, lse, walks == [True])


@contextlib.contextmanager
def _noted() -> Iterator[list[bool]]:
    """Whether each of Hopper's calls walks all keys."""
    seen, why = [], hopper.why_in_pieces

    def noted(*asked) -> str | None:
        seen.append((reason := why(*asked)) is None)
        return reason

    with mock.patch.object(hopper, "why_in_pieces", noted):
        yield seen


def _check_refusals(case: CachedCase, asked: dict, options: dict) -> None:
    """Hopper's kernel refuses what it cannot read, and every backend an out that overlaps."""
    if not asked["q"].numel():
        return
    if case.served_by != case.lane.backend:
        _raises(NotImplementedError, asked, options, case.lane.backend)
    if case.look.out == "overlapping" and asked["out"].shape[:-1].numel() > 1:
        shape = asked["out"].shape
        whole = asked | dict(out=asked["q"].new_zeros(shape[-1]).expand(shape))
        _raises(tilewise.ArgumentError, whole, options, case.served_by)


def _raises(kind: type[Exception], asked: dict, options: dict, backend: str | None) -> None:
    try:
        tilewise.attention(**asked, **options, backend=backend)
    except kind:
        return
    raise AssertionError(f"nothing raised {kind.__name__}")


def _elsewhere(
    case: CachedCase, content: Content, place: Place, found: Found, rng: random.Random, attend
) -> list[str]:
    """Other pages, in other memory, of sequences in another order: C0, C1, C4."""
    order = list(place.order)
    rng.shuffle(order)
    other = Place(tuple(order), rng.choice(PAGES), rng.choice(MEMORY), case.seed + 1)
    again = _compute(case, content, other, attend)
    return _differences(found, again, f"in {other}")


def _alone(
    case: CachedCase, content: Content, place: Place, found: Found, rng: random.Random, attend
) -> list[str]:
    """Some queries of one sequence, with the keys up to the last of them: C1, C2."""
    look = case.look
    row = rng.randrange(len(case.keys))
    n, keys = case.queries[row], case.keys[row]
    if not n or look.mask in ROWS:
        return []
    a, b = 0, n
    is_promised = n <= ALIKE or not (case.computed_by == "portable" or found.walks)
    if look.causal and n <= keys and is_promised:
        a = rng.randrange(n)
        b = rng.randint(a + 1, n)
    stop = keys - n + b
    part = content._replace(
        q=[content.q[row][a:b]],
        **{name: [getattr(content, name)[row][:stop]] for name in ("k", "v")},
        **{name: [getattr(content, name)[row][:stop]] for name in ("k_scales", "v_scales")},
    )
    again = _compute(case, part, Place((0,), *place[1:]), attend)
    mine = Found([found.out[row][a:b]], [found.lse[row][:, a:b]], found.walks)
    return _differences(mine, again, f"for queries {a} to {b} of sequence {row} alone")


def _differences(found: Found, again: Found, where: str) -> list[str]:
    """A line for each tensor of other bits, where keys were summed in one way: that of a chunk
    depends on the form of its cache, too.
    """
    if found.walks != again.walks:
        return []
    return [
        f"{name} of sequence {i} has other bits {where}"
        for name, xs, ys in zip(("out", "lse"), found[:2], again[:2])
        for i, (x, y) in enumerate(zip(xs, ys, strict=True))
        if not torch.equal(x, y)
    ]


def _compare(case: CachedCase, content: Content, found: Found) -> list[str]:
    """A line for each tensor that is over its budget."""
    tensors, spans, terms = oracle_inputs(case, content)
    dout = tensors["q"].new_zeros(*tensors["q"].shape[:2], case.look.headdim_v)
    given = Given(
        tensors, (), spans, terms, dout, None, case.softcap or 0.0, case.lane.tanh_off,
        lse_off=2**-13 if case.computed_by == "cpu" else 0.0, equal=case.logits > 0,
    )  # fmt: skip
    right = standard(given)
    faults = []
    for name, xs, dim in (("out", found.out, 0), ("lse", found.lse, 1)):
        mine, expected = torch.cat(xs, dim).double(), right.values[name]
        error = torch.where(mine == expected, 0.0, (mine - expected).abs())
        worst = error.max().item() if error.numel() else 0.0
        if not worst <= right.allowed[name]:  # NaN too
            faults.append(f"{name}: {worst:.2e} off, {right.allowed[name]:.2e} allowed")
    return faults
