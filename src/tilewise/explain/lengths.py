"""Sets of sequence lengths, by name: what packed shapes are made of.

A sequence has as many keys as queries, as in training and in prefill. Orders and draws come from
SEED, so that a name means the same lengths everywhere.
"""

from __future__ import annotations

import torch

TOKENS = 65536
SEED = 1
DOCUMENTS = 16  # in one row of a document mask


def zipf(tokens: int, count: int, exponent: float = 1.0) -> tuple[int, ...]:
    """`tokens` in lengths proportional to 1 / rank^exponent, shuffled; the longest of them takes up
    what rounding leaves. ValueError where another would be empty.
    """
    weights = [rank**-exponent for rank in range(1, count + 1)]
    lengths = [round(tokens * weight / sum(weights)) for weight in weights]
    lengths[0] += tokens - sum(lengths)
    if min(lengths) < 1:
        raise ValueError(f"{tokens} tokens are too few for {count} sequences of Zipf lengths")
    order = torch.randperm(count, generator=_generator())
    return tuple(lengths[place] for place in order.tolist())


def _uniform(count: int, least: int, most: int) -> tuple[int, ...]:
    """Lengths between `least` and `most`, both included."""
    return tuple(torch.randint(least, most + 1, (count,), generator=_generator()).tolist())


def documents(tokens: int, count: int = DOCUMENTS) -> tuple[int, ...]:
    """`tokens` in documents of uneven lengths: the longest has at most 16 times the least's, and
    the last takes up what rounding leaves.
    """
    if tokens < 16 * count:
        raise ValueError(f"{count} documents want {16 * count} tokens at least, not {tokens}")
    weights = (torch.rand(count, generator=_generator()) * 15 + 1).tolist()
    ends = [round(tokens * sum(weights[: i + 1]) / sum(weights)) for i in range(count)]
    return tuple(end - start for start, end in zip([0, *ends], ends))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


SETS = {
    "equal512": (512,) * 128,
    "equal4096": (4096,) * 16,
    "zipf": zipf(TOKENS, 64, exponent=1.1),
    "one-long": (32768, *(256,) * 128),
    "prefill-chat": _uniform(64, 16, most=2047),
}


def sequences(lengths: str) -> tuple[int, ...]:
    """The lengths that a name or a list such as "160,300" stands for; ValueError for others."""
    if lengths in SETS:
        return SETS[lengths]
    parts = lengths.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"lengths {lengths!r} are neither a set ({', '.join(SETS)}) nor numbers such as 160,300"
        )
    return tuple(int(part) for part in parts)
