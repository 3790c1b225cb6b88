"""The cases of a KV cache: each is drawn from its seed and its lane alone, as those of cases.py.

    cached_case(1234, cached_lane_of("hopper", "cpu"))

A look is what selects code, a shape is lengths and numbers, a place is where the same keys lie.
"""

from __future__ import annotations

import dataclasses
import random
from typing import NamedTuple

from .lanes import HALF

FEATURES = ("window", "softcap", "slopes", "sinks", "mask", "logits", "scale")
COUNTS = (0, 1, 1, 2, 2, 3, 5)
# Masks of functions.py by position, and the tree of drafts; those of ROWS ask for the sequence
MASKS = ("window", "prefix", "documents", "chunks", "dilated", "pairs", "joined", "turns")
ROWS = ("prefixes", "keys of rows", "tree")
KEPT = ("", "", "e4m3", "int8")
SCALES = ("none", "tensor", "head", "sequence", "row")
MEMORY = ("dense", "heads first", "side by side", "a layer")
MOVED = ("q", "q", "k", "v", "out", "page_table", "seqused_k", "alibi_slopes", "sinks", "k_descale")
LAZY = ("q", "page_table", "seqused_k", "sinks")
PAGES = (None, 1, 3, 8, 16, 16, 32, 64, 100, 128)


class CachedLane(NamedTuple):
    """A backend and a device; what is drawn there."""

    backend: str
    device: str
    dtypes: tuple[str, ...]
    headdims: tuple[int, ...]  # multiples of 16 where a cache of 8 bits is drawn
    splits: tuple[int | None, ...]  # None first
    longest: int
    most_batch: int
    most_queries: int
    looks: int = 0  # on a GPU each look is a compilation: there are no more than this
    tanh_off: float = 0.0  # see budget.py

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.device}"


_SMALL = dict(device="cpu", longest=330, most_batch=3, most_queries=20)
_GPU = dict(device="cuda", longest=5000, most_batch=9, most_queries=200, tanh_off=2**-10)
_PORTABLE = ("float32", *HALF)
_ANY = (8, 16, 24, 40, 64, 72, 128)
_HOPPER = (16, 32, 64, 64, 80, 128, 128, 192, 256)
_SPLITS = (None, 64, 128, 192)
CACHED_LANES = {
    lane.name: lane
    for lane in (
        CachedLane("cpu", dtypes=_PORTABLE, headdims=_ANY, splits=(None, 16, 100, 256), **_SMALL),
        CachedLane("portable", dtypes=_PORTABLE, headdims=_ANY, splits=(None, 16, 100), **_SMALL),
        CachedLane("hopper", dtypes=HALF, headdims=_HOPPER, splits=(None, 128, 256), **_SMALL),
        CachedLane("portable", dtypes=_PORTABLE, headdims=_ANY, splits=_SPLITS, looks=20, **_GPU),
        CachedLane(
            "hopper", dtypes=HALF, headdims=_HOPPER, splits=(None, 128, 512), looks=30, **_GPU
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class CachedLook:
    """What selects code."""

    dtype: str
    kept: str  # "": the queries' dtype
    scales: str
    headdim: int
    headdim_v: int
    nheads_k: int
    group: int
    causal: bool
    features: tuple[str, ...]
    mask: str
    packed: bool
    page_size: int | None
    memory: str
    layout: str
    moved: tuple[tuple[str, int], ...] = ()  # arguments that lie at multiples of so few bytes
    out: str = ""  # "own", or "overlapping": refused, and then its own
    lazy: str = ""  # an argument that torch has yet to negate

    def has(self, feature: str) -> bool:
        return feature in self.features


@dataclasses.dataclass(frozen=True)
class CachedCase:
    """One call, in full but for the values of its tensors, which come from the seed as well."""

    seed: int
    lane: CachedLane
    look: CachedLook
    queries: tuple[int, ...]  # of each sequence
    keys: tuple[int, ...]
    spare: int  # rows that no sequence uses, at the end of each
    left: int | None
    right: int | None
    softcap: float | None
    scale: float | None
    logits: float
    split_size: int | None

    @property
    def served_by(self) -> str | None:
        """The backend to ask for: Hopper's refuses what it cannot read by vectors or TMA."""
        names = {name for name, _ in self.look.moved}
        is_refused = self.lane.backend == "hopper" and not names.isdisjoint("qkv")
        return None if is_refused else self.lane.backend

    @property
    def computed_by(self) -> str:
        """The backend that then serves it."""
        other = "cpu" if self.lane.device == "cpu" else "portable"
        return self.served_by or other

    @property
    def command(self) -> str:
        """What runs this case again, in the root of the repository."""
        lane = f"--backend {self.lane.backend} --device {self.lane.device}"
        return f"python -m tests.fuzz --cache --seed {self.seed} {lane}"

    def __str__(self) -> str:
        look = {n: x for n, x in dataclasses.asdict(self.look).items() if x}
        own = dataclasses.asdict(self)
        own = {n: x for n, x in own.items() if n not in ("seed", "lane", "look") and x}
        return f"{self.command}    # {', '.join(f'{n}={x}' for n, x in (look | own).items())}"


def cached_lane_of(backend: str, device: str) -> CachedLane:
    """The lane of a backend on a device."""
    return CACHED_LANES[f"{backend}-{device}"]


def cached_case(seed: int, lane: CachedLane) -> CachedCase:
    """The case of a seed in a lane."""
    name = f"{lane.name} {seed % lane.looks}" if lane.looks else seed
    look = _look(random.Random(f"cached look {name}"), lane)
    return _shape(seed, random.Random(f"cached shape {seed}"), look, lane)


def as_chunk(case: CachedCase) -> CachedCase:
    """The same with as many queries as Hopper's forward of training takes, where it takes the rest
    of the case.
    """
    look = case.look
    mask = {"features": tuple(x for x in look.features if x != "mask"), "mask": ""}
    look = dataclasses.replace(look, **mask, packed=False, kept="", scales="", out="own")
    queries = (9 + case.seed * 7 % (case.lane.most_queries - 8),) * len(case.queries)
    return dataclasses.replace(case, look=look, queries=queries, split_size=None)


def _look(rng: random.Random, lane: CachedLane) -> CachedLook:
    features = set(rng.sample(FEATURES, rng.choice(COUNTS)))
    kept = rng.choice(KEPT)
    headdims = [d for d in lane.headdims if not kept or d % 16 == 0]
    headdim = rng.choice(headdims)
    packed = rng.random() < 0.7
    mask = rng.choice((*MASKS, *(ROWS if packed else ROWS[:-1]))) if "mask" in features else ""
    scales = rng.choice(SCALES) if kept else ""
    page_size = rng.choice(PAGES)
    memory = rng.choice(MEMORY)
    # Beside 8 bits the portable kernels multiply 16
    dtypes = HALF if kept and lane.backend == "portable" else lane.dtypes
    moved = rng.sample(MOVED, 2) if rng.random() < 0.3 else []
    lazy = rng.choice(LAZY) if rng.random() < 0.1 else ""
    moved = [name for name in moved if name != lazy]
    return CachedLook(
        dtype=rng.choice(dtypes),
        kept=kept,
        scales=scales,
        headdim=headdim,
        headdim_v=headdim if rng.random() < 0.7 else rng.choice(headdims),
        nheads_k=rng.choice((1, 2, 2, 3)),
        group=rng.choice((1, 2, 4, 4, 5, 7)),
        causal=mask == "tree" or rng.random() < 0.6,
        features=tuple(sorted(features)),
        mask=mask,
        packed=packed,
        page_size=page_size,
        memory=memory,
        layout="bshd" if packed or rng.random() < 0.6 else "bhsd",
        moved=tuple((name, rng.choice((2, 4, 8))) for name in moved),
        out=rng.choice(("", "own", "overlapping")),
        lazy=lazy,
    )


def _shape(seed: int, rng: random.Random, look: CachedLook, lane: CachedLane) -> CachedCase:
    batch = rng.randint(1, lane.most_batch)
    few = rng.random() < 0.6
    most = 8 if few else lane.most_queries
    queries = [rng.choice((1, 1, 0, rng.randint(1, most))) for _ in range(batch)]
    if not look.packed:
        queries = [rng.randint(1, most)] * batch
    keys = [_length(rng, lane.longest) for _ in range(batch)]
    if look.mask == "tree":  # whose queries are among the keys
        keys = [max(k, q) for q, k in zip(queries, keys)]
        queries = [min(q, 64) for q in queries[1:]] + [1]
    # Contiguous rows of 16 bits, one query count for all: a cache only where split_size or out says
    # so, wherever the case is put
    splits = lane.splits if look.packed or look.kept or look.out else lane.splits[1:]
    has_window = look.has("window")
    return CachedCase(
        seed=seed,
        lane=lane,
        look=look,
        queries=tuple(queries),
        keys=tuple(keys),
        spare=rng.choice((0, 0, 1, 30)),
        left=rng.choice((0, 5, 70, 130, 300)) if has_window else None,
        right=rng.choice((0, 3, None)) if has_window and not look.causal else None,
        softcap=rng.choice((3.0, 20.0)) if look.has("softcap") else None,
        scale=rng.choice((0.05, 0.7)) if look.has("scale") else None,
        logits=rng.choice((30.0, 300.0)) if look.has("logits") and not look.kept else 0.0,
        split_size=rng.choice(splits),
    )


def _length(rng: random.Random, longest: int) -> int:
    """0 and 1, neighbours of the sizes of tiles, and anything."""
    near = rng.choice((16, 64, 128, 256, 512)) + rng.choice((-1, 0, 1))
    return min(longest, rng.choice((0, 1, near, near, *(rng.randint(1, longest) for _ in "12"))))
