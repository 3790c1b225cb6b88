"""The matrix of calls that every backend is held to: sizes and features, by name.

Tests, GPU tests and `tilewise verify` run these same cases. The list is picked by hand, each case
for a fault it would show, so that it stays short: `case.tiles` says what an interpreter would pay.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Sizes(NamedTuple):
    """The sizes of a call; `headdim_v` 0 is headdim."""

    batch: int = 1
    seqlen_q: int = 64
    seqlen_k: int = 64
    nheads: int = 2
    nheads_k: int = 2
    headdim: int = 32
    headdim_v: int = 0


class Features(NamedTuple):
    """The features of a call besides its sizes."""

    causal: bool | str = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    scale: float | None = None
    alibi: str = ""  # "heads" (nheads,) or "batch" (batch, nheads)
    sinks: bool = False
    seqused_k: tuple[int, ...] | None = None
    layout: str = "bshd"
    memory: str = "dense"  # one of MEMORY
    logits: float = 0.0  # forces scores to + and - this
    lse_grad: bool = False  # a gradient comes in through lse, too
    bias: str = ""  # its own dimensions, of "bhqk"; it has others of 1
    mask: str = ""  # one of `modified.MASKS`
    blocks: tuple[int, int] | None = None  # the mask comes as a block mask of such blocks
    score: str = ""  # one of `modified.SCORES`
    dropout: float = 0.0
    learned: bool = False  # the score function's captured tensor requires grad

    def cap_error(self, queries: Tensor, keys: Tensor, scale: float, eps: float) -> Tensor | float:
        """The relative error of scores by the rounding of a cap's t = tanh(x): off by u t, which is
        u t / (1 - t^2) in x, or u sinh(2x) / 2x of it, with u = eps / 2.
        """
        if not self.softcap:
            return 0.0
        x = scale / self.softcap * queries @ keys.transpose(2, 3)
        x = x.square().nanmean().sqrt()
        return eps / 2 * torch.sinh(2 * x) / (2 * x)


class Case(NamedTuple):
    """One call: its name, sizes and features."""

    name: str
    sizes: Sizes
    features: Features

    @property
    def tiles(self) -> int:
        """How many 64 x 64 tiles of scores the call has, hidden ones included."""
        s = self.sizes
        return s.batch * s.nheads * -(-s.seqlen_q // 64) * -(-s.seqlen_k // 64)

    @property
    def seed(self) -> int:
        """The seed of its tensors."""
        return zlib.crc32(self.name.encode())

    @property
    def parts(self) -> list[Case]:
        """Its sequences, of which a batch is one."""
        return [self]


class PackedCase(NamedTuple):
    """One call of packed sequences. Each has the lengths of `queries` and `keys`, and behind them
    as many rows that are not used as `spare` says, and `tail` more rows lie behind all of them.
    """

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    features: Features
    sizes: Sizes = Sizes(nheads=4, nheads_k=2)
    spare: int = 0
    tail: int = 0

    @property
    def tiles(self) -> int:
        """How many 64 x 64 tiles of scores the call has, hidden ones included."""
        return sum(part.tiles for part in self.parts)

    @property
    def seed(self) -> int:
        """The seed of its tensors."""
        return zlib.crc32(self.name.encode())

    @property
    def parts(self) -> list[Case]:
        """Each sequence as a call of its own."""
        return [
            Case(f"{self.name}-{i}", self.sizes._replace(seqlen_q=m, seqlen_k=n), self.features)
            for i, (m, n) in enumerate(zip(self.queries, self.keys, strict=True))
        ]


def _case(name: str, sizes: dict | None = None, **features) -> Case:
    return Case(name, Sizes(**(sizes or {})), features=Features(**features))


def _lengths(seqlen_q: int, seqlen_k: int, nheads: int = 1) -> dict:
    return dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k, nheads=nheads, nheads_k=nheads)


def _headdims(headdim: int, headdim_v: int = 0) -> dict:
    return dict(
        seqlen_q=70, seqlen_k=75, nheads=1, nheads_k=1, headdim=headdim, headdim_v=headdim_v
    )


_LENGTHS = [(1, 1), (1, 239), (239, 1), (799, 3), (3, 799), (64, 64), (113, 203), (192, 320)]
_LONGER_QUERIES = [(203, 113), (65, 64), (257, 1)]
_WIDE = dict(batch=2, seqlen_q=113, seqlen_k=203, nheads=4, nheads_k=2)
_TALL = dict(batch=2, seqlen_q=203, seqlen_k=113, nheads=4, nheads_k=2)
_SQUARE = dict(batch=2, seqlen_q=100, seqlen_k=100)

CASES: tuple[Case, ...] = (
    *(_case(f"{a}x{b}", _lengths(a, b)) for a, b in _LENGTHS),
    *(_case(f"{a}x{b}-causal", _lengths(a, b), causal=True) for a, b in _LENGTHS),
    *(_case(f"{a}x{b}-causal", _lengths(a, b), causal=True) for a, b in _LONGER_QUERIES),
    *(_case(f"{a}x{b}-top-left", _lengths(a, b), causal="top_left") for a, b in _LENGTHS[3:7]),
    *(_case(f"{a}x{b}-top-left", _lengths(a, b), causal="top_left") for a, b in _LONGER_QUERIES),
    # Keys past what the last query sees, where its block is whole.
    _case("128x500-top-left", _lengths(128, 500), causal="top_left"),
    _case("1023x1024", _lengths(1023, 1024)),
    _case("1023x1024-causal", _lengths(1023, 1024), causal=True, lse_grad=True),
    # No keys, no queries, no batch.
    _case("no-keys", _lengths(33, 0)),
    _case("no-keys-sinks", _lengths(33, 0), sinks=True, lse_grad=True),
    _case("no-queries", _lengths(0, 33), causal=True),
    _case("no-batch", dict(batch=0)),
    _case("all-rows-masked", _SQUARE, causal=True, seqused_k=(0, 0), lse_grad=True),
    _case("some-rows-masked", _SQUARE, causal=True, seqused_k=(0, 37), lse_grad=True),
    # Head dims: the smallest, odd ones, between powers of two, the widest, two in one call.
    *(_case(f"d{d}", _headdims(d), causal=True) for d in (1, 3, 8, 17, 40, 80, 96, 128, 192, 256)),
    *(_case(f"d{d}", _headdims(d), causal=True) for d in (100, 257, 512)),
    *(_case(f"d{d}-v{e}", _headdims(d, e)) for d, e in ((64, 32), (32, 64), (17, 5), (192, 128))),
    _case("d40-v72-causal", _headdims(40, 72), causal=True, lse_grad=True),
    _case("d64-v100-sliced", _headdims(64, 100), memory="sliced", lse_grad=True),
    _case("d512-v64", _headdims(512, 64), window=(40, 3)),
    # Heads that share keys.
    _case("gqa", _WIDE, causal=True),
    _case("gqa-3", dict(_SQUARE, nheads=6, nheads_k=2), causal=True, lse_grad=True),
    _case("mqa", dict(_SQUARE, nheads=5, nheads_k=1)),
    _case("mqa-decode", dict(batch=3, seqlen_q=1, seqlen_k=203, nheads=8, nheads_k=1), causal=True),
    # Scores far from 0: LSE near -100 is where exp(S - LSE) overflows if anything is amiss.
    _case("logits-100", _WIDE, logits=100.0),
    _case("logits-100-causal", _SQUARE, logits=100.0, causal=True, lse_grad=True),
    _case("logits-100-s192", _lengths(192, 192), logits=100.0, causal=True),
    _case("scale-2", _SQUARE, scale=2.0),
    # Windows, on either side of the diagonal, narrower and wider than a tile.
    _case("window-left", _WIDE, window=(20, -1)),
    _case("window-right", _WIDE, window=(-1, 20), lse_grad=True),
    _case("window-both", _WIDE, window=(10, 7)),
    _case("window-one", _SQUARE, window=(0, 0)),
    _case("window-causal", _WIDE, causal=True, window=(70, 0)),
    _case("window-tall", _TALL, window=(10, 7), lse_grad=True),
    _case("window-top-left", _WIDE, causal="top_left", window=(33, 0)),
    _case("window-wider-than-all", _SQUARE, window=(1000, 1000)),
    # Non-linear score functions and shifts.
    _case("softcap", _WIDE, softcap=1.5, lse_grad=True),
    _case("softcap-causal", _SQUARE, softcap=1.5, causal=True),
    _case("softcap-logits", _SQUARE, softcap=30.0, logits=100.0),
    _case("alibi", _WIDE, alibi="heads"),
    _case("alibi-batch-causal", _WIDE, alibi="batch", causal=True, lse_grad=True),
    _case("alibi-top-left", _TALL, alibi="heads", causal="top_left"),
    # Sinks, and padding full of NaN.
    _case("sinks", _WIDE, sinks=True),
    _case("sinks-causal-tall", _TALL, sinks=True, causal=True, lse_grad=True),
    _case("sinks-window", _SQUARE, sinks=True, window=(16, 0)),
    _case("seqused", _WIDE, seqused_k=(203, 64)),
    _case("seqused-causal", _WIDE, seqused_k=(130, 1), causal=True, lse_grad=True),
    _case("seqused-top-left", _WIDE, seqused_k=(65, 0), causal="top_left"),
    _case(
        "everything",
        _WIDE,
        causal=True,
        window=(90, 0),
        softcap=3.0,
        alibi="batch",
        sinks=True,
        seqused_k=(150, 40),
        lse_grad=True,
    ),
    # A bias, in every way that it can be shared.
    _case("bias", _WIDE, bias="bhqk"),
    _case("bias-heads-causal", _WIDE, bias="hqk", causal=True, lse_grad=True),
    _case("bias-keys", _WIDE, bias="bk"),
    _case("bias-queries", _TALL, bias="q", causal=True),
    _case("bias-of-heads", _SQUARE, bias="h", sinks=True, alibi="heads", softcap=3.0),
    # Masks, asked for every pair, and by blocks.
    _case("mask-prefix", _WIDE, mask="prefix"),
    _case("mask-by-head-window", _WIDE, mask="by-head", window=(60, 20), lse_grad=True),
    _case("mask-holes", _TALL, mask="holes", sinks=True),
    _case("mask-documents-causal", _WIDE, mask="documents", causal="top_left", seqused_k=(150, 90)),
    _case("blocks-causal", _WIDE, mask="causal", blocks=(64, 64)),
    _case("blocks-documents", _WIDE, mask="documents", blocks=(32, 64), lse_grad=True),
    _case("blocks-by-head", _TALL, mask="by-head", blocks=(128, 128), alibi="batch"),
    _case("blocks-holes", _TALL, mask="holes", blocks=(16, 32), softcap=3.0, sinks=True),
    _case("blocks-seqused", _SQUARE, mask="prefix", blocks=(64, 32), seqused_k=(40, 0)),
    # Score functions.
    _case("score-tilted", _WIDE, score="tilted", lse_grad=True),
    _case("score-table-causal", _WIDE, score="table", causal=True),
    _case("score-nonlinear", _TALL, score="nonlinear", alibi="heads"),
    _case("score-hiding", _TALL, score="hiding", bias="hk", sinks=True),
    _case("learned-table", _WIDE, score="table", learned=True, causal=True, lse_grad=True),
    _case("learned-by-key", _TALL, score="by-key", learned=True, sinks=True, window=(60, 50)),
    # Dropout.
    _case("dropout", _WIDE, dropout=0.1, lse_grad=True),
    _case("dropout-causal", _TALL, dropout=0.5, causal=True, sinks=True),
    *(
        _case(
            f"everything-more{name}",
            _WIDE | headdims,
            window=(120, 60),
            softcap=3.0,
            alibi="batch",
            sinks=True,
            bias="hqk",
            mask="by-head",
            score="table",
            learned=True,
            dropout=0.2,
            lse_grad=True,
        )
        for name, headdims in (
            ("", {}),
            ("-d100-v65", dict(headdim=100, headdim_v=65)),
            ("-d320-v512", dict(headdim=320, headdim_v=512)),
        )
    ),
    _case("blocks-d100", dict(_WIDE, headdim=100), mask="causal", blocks=(128, 128), bias="bhqk"),
    _case("blocks-d512", dict(_WIDE, headdim=512), mask="documents", blocks=(64, 64), dropout=0.1),
    # Memory.
    _case("layout-bhsd", _WIDE, layout="bhsd", memory="transposed", causal=True),
    _case("layout-bhsd-dense", _WIDE, layout="bhsd", lse_grad=True),
    _case("transposed", _WIDE, memory="transposed"),
    _case("sequence-first", _WIDE, memory="sequence_first", causal=True),
    _case("sliced", _WIDE, memory="sliced"),
    _case("packed", dict(_SQUARE, nheads=4), memory="packed", causal=True),
    _case("expanded", _WIDE, memory="expanded"),
)

PACKED = (
    PackedCase("packed-lengths", (5, 0, 70, 33), (7, 4, 60, 50), Features(lse_grad=True)),
    PackedCase("packed-causal", (160, 300), keys=(160, 300), features=Features(causal=True)),
    PackedCase("packed-one", (65,), keys=(130,), features=Features(causal=True, window=(40, 0))),
    PackedCase("packed-no-keys", (9, 20), (0, 30), Features(causal="top_left", lse_grad=True)),
    PackedCase("packed-many", (1,) * 40 + (100,), (3,) * 40 + (90,), Features(softcap=3.0)),
    PackedCase(
        "packed-everything",
        (20, 64, 9, 130),
        keys=(25, 64, 12, 100),
        features=Features(True, (50, 0), softcap=3.0, alibi="batch", sinks=True, lse_grad=True),
        spare=5,
    ),
    PackedCase(
        "packed-padded-heads", (50, 20), (70, 20), Features(), Sizes(1, 1, 1, 3, 3, 24, 40), 3
    ),
    PackedCase(
        "packed-d100", (50, 0, 20), (70, 9, 20), Features(True), Sizes(1, 1, 1, 2, 1, 100, 65), 3
    ),
    PackedCase(
        "packed-tail",
        (20, 64, 9, 100),
        keys=(25, 64, 12, 90),
        features=Features(True, (50, 0), sinks=True, lse_grad=True),
        spare=3,
        tail=170,
    ),
    PackedCase("packed-short-tail", (70, 0), keys=(40, 3), features=Features(), tail=9),
    PackedCase("packed-d512", (30, 20), (40, 20), Features(True), Sizes(1, 1, 1, 2, 1, 512)),
)
