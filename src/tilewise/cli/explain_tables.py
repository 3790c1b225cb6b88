"""What the tables of `tilewise explain` share: answers of backends, launches, numbers."""

from __future__ import annotations

from .tables import NO, OK, digits, table


def said(answer, explanation) -> str:
    """An answer in words; the chosen one is named."""
    if answer.backend == explanation.backend:
        why = "forced" if explanation.forced else "the first that serves"
        return f"chosen: {why}{f' ({answer.reason})' if answer.reason else ''}"
    return answer.reason or "would serve, and comes later"


def launch_column(one) -> list[str]:
    """What LAUNCH asks of a launch."""
    built = one.built
    needs = ["-"] * 5
    if built is not None:
        fits = "-"
        if built.occupancy is not None:
            share = f"{100 * built.occupancy.share:.0f} % of its warps"
            fits = f"{built.occupancy.programs}, {share}; no more {built.occupancy.limit}"
        spills = f"{built.spills} bytes a thread" if built.spills else "none"
        needs = [built.warps, built.registers, spills, f"{built.shared_memory:,} bytes", fits]
    spread = f"{one.waves:.2f} of {one.at_once}"
    busy = f"{100 * one.tail:.0f} % of the SMs, over all waves"
    tile = f"{one.block_m} queries x {one.block_n} keys"
    programs = "one an SM, tile after tile" if one.is_persistent else "one a tile"
    return [tile, one.stages, *needs, f"{one.tiles:,}", programs, spread, busy]


LAUNCH = (
    "tile, slots for tiles in flight, warps, registers a thread, spilled, shared memory, "
    "programs on an SM, tiles, programs, waves, busy"
).split(", ")


def plain(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else digits(value)


def on_card(explanation) -> str:
    """Where."""
    return explanation.card.name if explanation.card else "this CPU"


def show_answers(screen, explanation, what: str, how: str = "") -> bool:
    """Each backend's answer, and in which way the chosen one serves; whether one does."""
    target = f" ({explanation.target})" if explanation.card else ""
    screen.print(f"{what} on {on_card(explanation)}{target}")
    rows = [
        (x.backend, OK if x.kind == "serves" else NO, said(x, explanation))
        for x in explanation.answers
    ]
    screen.print(table(["backend", "", ""], rows))
    if how:
        screen.print(how)
    if not explanation.backend:
        screen.print("nothing serves this call.")
    return bool(explanation.backend)


def show_launches(screen, explanation, columns: list[list[str]]) -> None:
    """A column a launch, and what the compiler did not do."""
    if explanation.launches:
        kernels = [one.kernel for one in explanation.launches]
        rows = [(name, *(column[n] for column in columns)) for n, name in enumerate(LAUNCH)]
        screen.print(table(["launch", *kernels], rows))
        for failed in {x.failed for x in explanation.launches if x.failed}:
            screen.print(f"the compiler's part is missing: {failed}")


def roof_rows(roof) -> list[tuple[str, str]]:
    """What the device can do, and the source of these figures."""
    bandwidth = f"{digits(roof.bandwidth)} TB/s"
    if roof.bandwidth < 0.1:
        bandwidth = f"{digits(1000 * roof.bandwidth)} GB/s"
    return [("roof", f"{plain(roof.tflops)} TFLOP/s, {bandwidth}"), ("", roof.source)]


def verdict(explanation, least: str) -> str:
    """One sentence."""
    intensity, roof = explanation.work.intensity, explanation.work.roof
    is_memory = intensity < roof.ridge
    limit, sign = ("memory", "under") if is_memory else ("arithmetic", "at least")
    return (
        f"{explanation.backend} serves it. Limit: {limit}, with {plain(intensity)} FLOPs a byte, "
        f"{sign} the {plain(roof.ridge)} of the ridge; {least} at the roof."
    )


def title_of(explanation) -> str:
    """The title of a picture."""
    return f"{explanation.shape} on {on_card(explanation)}"


def common_record(explanation) -> dict:
    """Whose answers, as JSON takes them."""
    return {
        "shape": explanation.shape._asdict(),
        "target": explanation.target,
        "card": explanation.card.name if explanation.card else None,
        "backend": explanation.backend,
        "answers": [answer._asdict() for answer in explanation.answers],
    }
