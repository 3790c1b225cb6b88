"""The cases: each is drawn from its seed and its lane alone, and prints as what draws it again.

    case(1234, lane_of("cpu", "cpu"))

A look is what selects code: dtype, heads and features. A shape is lengths and numbers.
On a GPU a look has a seed of its own, `seed % lane.looks`, and so has what else Triton compiles
for: which sides of a window there are, whether lengths are multiples of 16. So few kernels serve
many cases.

The number of features beside causal (three fifths of the cases), packing (a quarter) and layout is
drawn first, 0 to 6 and 2.4 in the mean, and then which of eleven, evenly. So each is in about a
fifth of the cases, many cases have one alone, and three quarters have no softcap of either kind:
a feature that bounds the scores hides the errors of all others, and must not be in most cases.
"""

from __future__ import annotations

import dataclasses
import random

from .functions import LEARNED, MASKS, SCORES
from .lanes import Lane

FEATURES = ("window", "softcap", "slopes", "sinks", "bias", "score", "mask", "dropout") + (
    *("used", "logits", "scale"),
)
COUNTS = (0, 1, 1, 2, 2, 3, 4, 6)
MEMORY = ("dense", "dense", "transposed", "sequence first", "fused", "padded")
MISALIGNED = ("sliced", "by 1", "by 2", "by 4", "expanded")  # elements; sliced is by 3
TAILS = (0, 1, 7, 70)
LAZY = ("q", "k", "v", "bias", "sinks", "dout", "dlse")
BLOCKS = (128, 128, 64, 32, 16), (128, 128, 64, 256, 16)
BLOCKS_OF_HOPPER = (128,) * 9 + (64,), (128, 256)


@dataclasses.dataclass(frozen=True)
class Look:
    """What selects code."""

    dtype: str
    headdim: int
    headdim_v: int
    causal: bool | str
    features: tuple[str, ...]
    packed: bool
    slopes: str  # "heads" or "batch"
    bias: str  # which dimensions it has, of "bhqk"
    bias_dtype: str
    score: str
    learned: bool
    mask: str
    block: tuple[int, int] | None
    layout: str
    memory: str
    lse_grad: bool
    deterministic: bool
    nheads: int  # with headdim the strides, which Triton compiles for
    nheads_k: int

    def has(self, feature: str) -> bool:
        return feature in self.features

    @property
    def has_softcap(self) -> bool:
        return self.has("softcap") or self.score == "softcapped"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, in full but for the values of its tensors, which come from the seed as well."""

    seed: int
    lane: Lane
    look: Look
    queries: tuple[int, ...]  # of each sequence, used ones; in a batch all are equal
    keys: tuple[int, ...]
    spare_q: tuple[int, ...]  # rows behind each that are not used
    spare_k: tuple[int, ...]
    left: int | None
    right: int | None
    softcap: float | None
    scale: float | None
    logits: float  # 0, or what scores are forced to
    values: str  # "normal", "equal" or "spread"
    dropout_p: float
    rng: tuple[int, int]
    lazy: tuple[str, ...]  # tensors that torch has yet to negate
    shift: int  # elements by which small tensors begin off a multiple of 16 bytes
    tail_q: int = 0  # rows behind all packed sequences
    tail_k: int = 0

    @property
    def command(self) -> str:
        """What runs this case again, in the root of the repository."""
        backend = f" --backend {self.lane.backend}" if self.lane.backend else ""
        return f"python -m tests.fuzz --seed {self.seed}{backend} --device {self.lane.device}"

    def __str__(self) -> str:
        """The command, and what the case has beside what no case can lack."""
        look = {n: x for n, x in dataclasses.asdict(self.look).items() if x}
        own = {n: getattr(self, n) for n in ("queries", "keys")}
        others = ("spare_q", "spare_k", "left", "right", "softcap", "scale", "logits", "values")
        own |= {n: x for n in others if (x := getattr(self, n)) and x != (0,) * len(self.keys)}
        own |= {n: x for n in ("lazy", "shift", "tail_q", "tail_k") if (x := getattr(self, n))}
        if self.dropout_p:
            own |= {"dropout_p": self.dropout_p, "rng": self.rng}
        return f"{self.command}    # {', '.join(f'{n}={x}' for n, x in (look | own).items())}"


def case(seed: int, lane: Lane) -> Case:
    """The case of a seed in a lane."""
    name = f"{lane.name} {seed % lane.looks}" if lane.looks else seed
    look, rng = _look(random.Random(f"look {name}"), lane), random.Random(f"shape {seed}")
    drawn = _shape(seed, rng, random.Random(f"shapes {name}") if lane.looks else rng, look, lane)
    rng = random.Random(f"tails {name}")
    if not look.packed or rng.random() < 0.5:
        return drawn
    return dataclasses.replace(drawn, tail_q=rng.choice(TAILS), tail_k=rng.choice(TAILS))


def _look(rng: random.Random, lane: Lane) -> Look:
    features = set(rng.sample(FEATURES, rng.choice(COUNTS)))
    headdim = rng.choice(lane.headdims)
    packed = rng.random() < 0.25
    learned, block = rng.random() < 0.5, None
    score = rng.choice(list(SCORES)) if "score" in features else ""
    mask = rng.choice(list(MASKS)) if "mask" in features else ""
    memory = rng.choice(MISALIGNED if rng.random() < 0.1 else MEMORY)
    causal = rng.choice((False, False, True, "bottom_right", "top_left"))
    if packed:
        features -= {"bias"}
        memory = "dense" if memory in ("expanded", "sequence first") else memory
    elif mask and rng.random() < 0.5:  # a block mask has no band beside it
        rows, columns = BLOCKS_OF_HOPPER if lane.backend == "hopper" else BLOCKS
        block = rng.choice(rows), rng.choice(columns)
        features, causal = features - {"window"}, False
    nheads_k = rng.choice([n for n in (1, 1, 2, 3) if n <= lane.most_heads])
    group = rng.choice([n for n in (1, 1, 2, 3, 4) if n * nheads_k <= lane.most_heads])
    deterministic = rng.random() < (0.0 if block and lane.backend == "hopper" else 0.2)
    return Look(
        dtype=rng.choice(lane.dtypes),
        headdim=headdim,
        headdim_v=headdim if rng.random() < 0.75 else rng.choice(lane.headdims),
        causal=causal,
        features=tuple(sorted(features)),
        packed=packed,
        slopes=rng.choice(("heads", "batch")) if "slopes" in features else "",
        bias=rng.choice(("bhqk", "hqk", "qk", "bk", "k", "q", "h")) if "bias" in features else "",
        bias_dtype=rng.choice(("float32", "")),
        score=score,
        learned=learned and score in LEARNED and not (deterministic and lane.backend != "cpu"),
        mask=mask,
        block=block,
        layout="bshd" if packed else rng.choice(("bshd", "bhsd")),
        memory=memory,
        lse_grad=rng.random() < 0.4,
        deterministic=deterministic,
        nheads=nheads_k * group,
        nheads_k=nheads_k,
    )


def _shape(seed: int, rng: random.Random, compiled: random.Random, look: Look, lane: Lane) -> Case:
    """The shape of a look; what kernels are compiled for is drawn from `compiled`."""
    if look.packed:
        batch = compiled.randint(1, 2 + lane.most_batch)
        longest = lane.longest if batch == 1 else lane.longest // 2
        queries, keys = ([_length(rng, longest, 0.1) for _ in range(batch)] for _ in "qk")
        if rng.random() < 0.3:
            keys = queries
    else:
        batch = compiled.randint(1, lane.most_batch)
        length, length_k = (_length(rng, lane.longest, 0.02) for _ in "qk")
        queries, keys = [length] * batch, [length_k] * batch
        if look.memory == "fused" or rng.random() < 0.3:
            keys = queries
    spares = 0, 1, 7, 40
    if lane.looks:
        is_whole = compiled.random() < 0.5
        spares = (0, 16, 48) if is_whole else spares
        queries, keys = ([_of_class(n, is_whole) for n in x] for x in (queries, keys))
    spare_q = spare_k = [0] * batch
    if look.has("used"):
        if look.packed:
            spare_q, spare_k = ([rng.choice(spares) for _ in keys] for _ in "qk")
        else:
            room = keys[0]
            keys = [rng.choice((room, rng.randint(0, room), room // 2, 0)) for _ in keys]
            spare_k = [room - n for n in keys]
    left = right = None
    if look.has("window"):
        left, right = (compiled.choice((None, 0, 1, 5, 17, 64, 130, 1000)) for _ in "lr")
    return Case(
        *(seed, lane, look),
        *(tuple(queries), tuple(keys), tuple(spare_q), tuple(spare_k)),
        left=left,
        right=right,
        softcap=rng.choice((0.7, 1.5, 5.0, 30.0, 50.0, 1000.0)) if look.has("softcap") else None,
        scale=rng.choice((0.02, 0.3, 1.0, 1.7)) if look.has("scale") else None,
        logits=rng.choice((30.0, 60.0, 100.0)) if look.has("logits") else 0.0,
        values=rng.choice(("normal",) * 6 + ("equal", "spread")),
        dropout_p=rng.choice((0.01, 0.1, 0.5, 0.9)) if look.has("dropout") else 0.0,
        rng=(rng.randint(-(2**63), 2**63 - 1), rng.choice((0, rng.randint(-(2**63), 2**63 - 1)))),
        lazy=tuple(rng.sample(LAZY, 2)) if rng.random() < 0.15 else (),
        shift=compiled.choice((0, 0, 1, 2)),
    )


def _of_class(n: int, is_whole: bool) -> int:
    """A length as it is, or near it, that is a multiple of 16, or is none and not 1 either."""
    if is_whole or n == 0:
        return -(-n // 16) * 16
    return n + 2 if n == 1 else n + (n % 16 == 0)


def _length(rng: random.Random, longest: int, empty: float) -> int:
    """A length: none, few, near a tile's end, or any."""
    if rng.random() < empty:
        return 0
    kind = rng.random()
    if kind < 0.2:
        return rng.randint(1, 5)
    if kind < 0.45:
        tile = rng.choice([n for n in (16, 32, 64, 128, 256, 512) if n <= longest])
        return max(1, min(longest, tile + rng.randint(-1, 1)))
    return rng.randint(1, longest if kind > 0.8 else max(1, longest // 3))
