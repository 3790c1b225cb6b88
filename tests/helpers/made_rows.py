"""Invented result rows, for tests of what is made of rows."""

from benchmarks.bench.row import Row
from benchmarks.bench.shapes import square

COMMON = dict(
    date="2026-01-01T00:00:00+00:00",
    run="one",
    suite="adhoc",
    p20_ms=1.0,
    p80_ms=1.0,
    max_error=0.001,
    bound=0.002,
    device="NVIDIA H200",
    torch="2.11.0",
    triton="3.6.0",
    cuda="13.0",
    driver="580",
    tilewise="0.1.0",
    commit="abc",
)


def made(**changed):
    """A row whose other fields say nothing."""
    return Row(**(COMMON | changed))


def row(provider="tilewise", ms=1.0, seqlen=1024, **changed):
    shape = square("fwd", seqlen, 128, False)
    times = dict(median_ms=ms, rounds_ms=[ms, ms, ms], tflops=shape.flops / ms / 1e9)
    return made(**(dict(shape=shape._asdict(), provider=provider) | times | changed))


def small(**changes):
    """A row of tilewise at a small shape."""
    shape = square("fwd", 32, 16, True, dtype="float32", tokens=64, hidden=32)
    fields = dict(shape=shape._asdict(), provider="tilewise", tflops=3.0)
    fields |= dict(median_ms=1.0, p20_ms=0.9, p80_ms=1.1, rounds_ms=[1.0, 1.1, 0.9])
    return made(**(fields | changes))


def pair(ours, theirs, **changed):
    return [row(ms=ours, **changed), row("fa3", theirs, **changed)]
