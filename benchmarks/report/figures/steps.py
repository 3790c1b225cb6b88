"""Questions about steps of decoding: `{us: B32 q1}`, `{decode fa3: B8 q1 page16 H100}`.

A step answers to words: B32, q1, 8Ki (its longest keys), page16, zipf, chunk2Ki, split2Ki, e4m3,
int8:row. A question means the step that has all of its words and no other; 8Ki keys go without
saying. Times that are divided are of one run, the newest in which both took part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tilewise.explain.steps import Decode

from ...bench.row import Row
from ...bench.timer import ratio
from ..evidence import OURS, Evidence, environment_of
from ..page import length
from .calls import CARDS, NONE, WAYS, figure, marked, where

KEYS = "8Ki"
USUAL = dict(nheads=32, nheads_k=8, headdim=128, headdim_v=128, causal=True, dtype="bfloat16")
Run = dict[tuple[str, str], Row]  # by provider, and by its cache's kind


def words_of(of: Decode) -> frozenset[str]:
    """What a step answers to, its cache's kind aside."""
    words = [f"B{of.batch}", f"q{of.seqlen_q}", length(of.seqlen_k)]
    words += [f"page{of.page_size}"] if of.page_size else []
    words += [of.lengths] if of.lengths else []
    words += [f"chunk{length(of.chunk)}"] if of.chunk >= 0 else []
    words += [f"chunks{of.chunks}"] if of.chunks > 1 else []
    words += [f"split{length(of.split_size)}"] if of.split_size else []
    words += ["append"] if of.appends else []
    return frozenset(words)


def step_of(words: Sequence[str]) -> frozenset[str]:
    """What the step that is meant answers to."""
    asked = set(words) - CARDS - WAYS - {kind_of(words)}
    has_keys = any(word[0].isdigit() for word in asked)
    return frozenset(asked if has_keys else {*asked, KEYS})


def runs(evidence: Evidence, words: Sequence[str]) -> Iterator[Run]:
    """The rows of each run that are of this step, the newest run first."""
    place, asked = where(evidence, words), step_of(words)
    found: dict[str, Run] = {}
    for row in sorted(evidence.others.get("decode", []), key=lambda row: row.date):
        of = Decode(**row.shape)
        usual = USUAL.items() <= of._asdict().items()
        if usual and environment_of(row) == place and words_of(of) == asked:
            found.setdefault(row.run, {})[row.provider, of.cache] = row
    return reversed(found.values())


def kind_of(words: Sequence[str]) -> str:
    """The kind of an 8-bit cache; "" for 16 bits."""
    return next((word for word in words if word.partition(":")[0] in ("e4m3", "int8")), "")


def ours_of(words: Sequence[str]) -> str:
    """Our way that is meant."""
    return next((f"{OURS}:{word}" for word in words if word in WAYS), OURS)


def us(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Microseconds, of the run that `{decode fa3: ...}` is of where there is one."""
    ours = ours_of(words), kind_of(words)
    mine = [run for run in runs(evidence, words) if ours in run]
    beside = [run for run in mine if ("fa3", "") in run]
    return figure((beside or mine)[0][ours].median_ms * 1e3) if mine else NONE


def decode(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Time of a peer over ours, in bold where the peer is the faster."""
    kind = kind_of(words)
    return quotient(runs(evidence, words), (ours_of(words), kind), (names[0], kind))


def cache(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Time with a 16-bit cache over time with one of 8 bits, `{cache: B32 q1 e4m3}`."""
    return quotient(runs(evidence, words), (OURS, kind_of(words)), (OURS, ""))


def quotient(found: Iterable[Run], ours: tuple[str, str], theirs: tuple[str, str]) -> str:
    """Their time over ours, of the first run that has both."""
    for run in found:
        if {ours, theirs} <= run.keys():
            return marked(ratio(run[ours].rounds_ms, run[theirs].rounds_ms).median)
    return NONE


def step(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Cells of a table: microseconds, then the ratio to each peer."""
    ratios = [decode(evidence, [name], words) for name in names]
    return " | ".join([us(evidence, [], words), *ratios])


def ratios(evidence: Evidence, peer: str, words: Sequence[str]) -> dict[Decode, float]:
    """Time of a peer over ours for every step with a 16-bit cache, of the newest run with both."""
    place = where(evidence, words)
    found: dict[Decode, dict[str, dict[str, Row]]] = {}
    for row in sorted(evidence.others.get("decode", []), key=lambda row: row.date):
        of = Decode(**row.shape)
        if environment_of(row) == place and not of.cache:
            found.setdefault(of, {}).setdefault(row.run, {})[row.provider] = row
    return {
        of: ratio(rows[OURS].rounds_ms, rows[peer].rounds_ms).median
        for of, by_run in found.items()
        for rows in by_run.values()
        if {OURS, peer} <= rows.keys()
    }


ANSWERS = {"us": us, "decode": decode, "step": step, "cache": cache}
