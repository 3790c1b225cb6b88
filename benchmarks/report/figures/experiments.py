"""Questions about the experiments: host time, memory, bytes, speed-up, matmul, first calls, CPU.

Rows that are no times of attention calls: each function reads the rows of one command of
`python -m benchmarks`, the newest of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...bench.row import Row
from ...bench.timer import ratio
from ...memory import exponent
from ..evidence import OURS, Environment, Evidence, environment_of, is_ours
from ..page import length, times
from .calls import CARDS, NONE, digits, span, where, words_of

GIB = 1 << 30
# Before, rows of the host chose the backend of torch's attention at every call, which took longer
# than the call
CHOSEN_ONCE = "2026-11-27T18:30"


def newest(
    evidence: Evidence, suite: str, words: Sequence[str] = (), **extra: str
) -> Iterator[Row]:
    """The GPU's rows of a suite whose `extra` says this, the newest of each shape and provider; of
    the card that the words name, if they do.
    """
    found: dict[tuple[str, str], Row] = {}
    place = where(evidence, words)
    for row in sorted(evidence.others.get(suite, []), key=lambda row: row.date):
        if environment_of(row) == place and extra.items() <= row.extra.items():
            found[str(row.shape), row.provider] = row
    return iter(found.values())


def host(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Microseconds of the host a call: `{host flash: compile}`, `{host: compile H100}`."""
    name = names[0] if names else OURS
    rows = newest(evidence, "host", words[1:], mode=words[0])
    found = [r for r in rows if r.provider == name and r.date >= CHOSEN_ONCE]
    return f"{found[-1].extra['host_us']:.0f}" if found else NONE


def peaks(evidence: Evidence, name: str, direction: str) -> dict[int, int]:
    """Peak bytes by length."""
    return {
        row.shape["seqlen_q"]: row.extra["peak_bytes"]
        for row in newest(evidence, "memory")
        if (row.provider, row.shape["direction"]) == (name, direction) and "peak_bytes" in row.extra
    }


def peak(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """GiB beside the inputs: `{peak standard: fwd 32Ki}`."""
    sizes = {length(s): found for s, found in peaks(evidence, names[0], words[0]).items()}
    return digits(sizes[words[1]] / GIB) if words[1] in sizes else NONE


def growth(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The power of S that peaks grow with."""
    found = exponent(peaks(evidence, names[0], words[0]))
    return NONE if found is None else f"{found:.2f}"


def moved(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """GB that a call moves: `{moved tilewise formula: fwd+bwd}`, or by the card's counters."""
    for row in newest(evidence, "io"):
        if row.provider == names[0] and row.shape["direction"] == words[0]:
            if names[1] == "formula":
                return digits(row.extra["bytes"] / 1e9)
            if "bytes_read" in row.extra:
                return digits((row.extra["bytes_read"] + row.extra["bytes_written"]) / 1e9)
    return NONE


def speedup(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Times as fast as standard attention, least to most over lengths."""
    rows = newest(evidence, "speedup", case=" ".join(words[1:]))
    found = [
        row.extra["speedup"]
        for row in rows
        if row.provider == "standard" and row.shape["direction"] == words[0]
    ]
    return span(found)


def matmul(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Time of cuBLAS over ours: `{matmul: bf16 4096}`."""
    kind, size = words[0], int(words[1])
    rows = {
        row.provider: row
        for row in newest(evidence, "matmul")
        if row.shape["kind"] == kind and {row.shape[x] for x in "mnk"} == {size}
    }
    if not {OURS, "cublas"} <= rows.keys():
        return NONE
    return times(ratio(rows[OURS].rounds_ms, rows["cublas"].rounds_ms).median)


def distributed(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """The share of one GPU's rate that each of several keeps on one causal sequence:
    `{distributed: stream 2 8Ki fwd}` is that of the method on 2 of them, of 8Ki tokens each, also
    with `window`, `documents` or `MHA`, as many key heads as query heads, and with a card;
    `{distributed heads: stream 2 8Ki fwd}` the other's time over its.
    """
    name, ranks, tokens, direction, *more = [word for word in words if word not in CARDS]
    shares: dict[str, tuple[float, float]] = {}
    for row in newest(evidence, "distributed", words):
        shape = row.shape
        if shape["direction"] == "decode":  # of a cache
            continue
        kind = [x for x in ("window", "documents") if shape[x]]
        kind += ["MHA"] * (shape["nheads"] == shape["nheads_k"])
        said = str(shape["ranks"]), length(shape["tokens"]), shape["direction"]
        if shape["causal"] and said == (ranks, tokens, direction) and kind == more:
            share = row.extra.get("of_ideal", 1.0)  # one process has none
            shares[row.provider.split(":")[-1]] = row.median_ms, share
    if not {name, *names} <= shares.keys():
        return NONE
    return times(shares[names[0]][0] / shares[name][0] if names else shares[name][1])


def serving(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """A provider's run of a server's load: `{serving fa3: attention page16 H100}` is four cells:
    tokens per second, p50 and p99 of decodes and of mixed steps in ms, and its time over ours.
    """
    part, page = words[0], int(words[1].removeprefix("page"))
    asked = dict(part=part, page_size=page)
    found = {
        row.provider: row
        for row in newest(evidence, "serving", words)
        if asked.items() <= row.shape.items()
    }
    if not {OURS, *names} <= found.keys():
        return " | ".join([NONE] * 4)
    row = found[names[0] if names else OURS]
    steps = [
        f"{digits(row.extra[f'{kind}_p50_ms'])}; {digits(row.extra[f'{kind}_p99_ms'])}"
        for kind in ("decode", "mixed")
    ]
    over = times(ratio(found[OURS].rounds_ms, row.rounds_ms).median) if names else "1"
    return " | ".join([f"{row.extra['tokens_per_s']:,.0f}", *steps, over])


def first(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Seconds of the first call of a process: `{first: fwd empty}`, `{first: fwd empty H100}`."""
    direction, cache, *card = words
    rows = newest(evidence, "cold", card, cache=cache)
    found = [row for row in rows if row.shape["direction"] == direction]
    return f"{found[-1].median_ms / 1e3:.1f}" if found else NONE


def modifier(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Our rate over that of a baseline: `{modifier flex: fwd window 16Ki}`."""
    place = where(evidence)
    for entry in reversed(evidence.calls):
        over = entry.row.extra.get("rate_over", {})
        if entry.environment == place and is_ours(entry.row.provider) and names[0] in over:
            shape = entry.shape
            said = shape.direction, entry.row.extra.get("modifier"), length(shape.seqlen_q)
            if said == tuple(words):
                return times(over[names[0]])
    return NONE


def host_alone(evidence: Evidence) -> Environment | None:
    """The CPU, torch and Triton of the newest row of a CPU."""
    found = (entry.environment for entry in reversed(evidence.calls))
    return next((one for one in found if not one.on_gpu), None)


def cpu(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """Time of torch's SDPA over ours on a CPU: `{cpu: fwd fp32}`."""
    place = host_alone(evidence)
    timings = [
        t for t in evidence.timings if t.environment == place and set(words) <= words_of(t.shape)
    ]
    return span([timing.ratios["sdpa"].median for timing in timings if "sdpa" in timing.ratios])


def processor(evidence: Evidence, names: list[str], words: list[str]) -> str:
    """That CPU."""
    place = host_alone(evidence)
    return place.device if place else NONE


ANSWERS = {
    "host": host,
    "peak": peak,
    "growth": growth,
    "moved": moved,
    "speedup": speedup,
    "matmul": matmul,
    "distributed": distributed,
    "serving": serving,
    "first": first,
    "modifier": modifier,
    "cpu": cpu,
    "processor": processor,
}
