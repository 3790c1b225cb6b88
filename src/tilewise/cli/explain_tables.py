"""What the tables of `tilewise explain` share: answers of backends, launches, numbers."""

from __future__ import annotations

from .tables import digits


def said(answer, chosen: str, is_forced: bool) -> str:
    """An answer in words; the chosen one is named."""
    if answer.backend == chosen:
        why = "forced" if is_forced else "the first that serves"
        return f"chosen: {why}{f' ({answer.reason})' if answer.reason else ''}"
    return answer.reason or "would serve, and comes later"


def launch_column(one) -> list[str]:
    """What LAUNCH asks of a launch."""
    launch, built = one.launch, one.built
    needs = ["-"] * 5
    if built is not None:
        fits = "-"
        if built.occupancy is not None:
            share = f"{100 * built.occupancy.share:.0f} % of its warps"
            fits = f"{built.occupancy.programs}, {share}; no more {built.occupancy.limit}"
        spills = f"{built.spills} bytes a thread" if built.spills else "none"
        needs = [built.warps, built.registers, spills, f"{built.shared_memory:,} bytes", fits]
    spread = f"{one.waves.waves:.2f} of {one.waves.at_once}"
    busy = f"{100 * one.waves.tail:.0f} % of the SMs, over all waves"
    tile = f"{launch.block_m} queries x {launch.block_n} keys"
    programs = "one an SM, tile after tile" if launch.is_persistent else "one a tile"
    return [tile, launch.stages, *needs, f"{launch.tiles:,}", programs, spread, busy]


LAUNCH = (
    *("tile", "slots for tiles in flight", "warps", "registers a thread", "spilled"),
    *("shared memory", "programs on an SM", "tiles", "programs", "waves", "busy"),
)


def plain(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else digits(value)


def launches_record(launches) -> list[dict]:
    """Launches as JSON takes them."""
    found = []
    for one in launches:
        built = one.built.record if one.built else None
        named = {name: x for name, x in one.launch._asdict().items() if name != "build"}
        found.append({**named, "built": built, "failed": one.failed, **one.waves._asdict()})
    return found
