"""What an explanation is made of: the backends' answers, launches, and work with its roof."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .. import dispatch
from ..errors import Avoidable, Slower
from .cards import Card, Roof
from .launches import Launch, at_once, built_of
from .shapes import Shape
from .steps import Decode, Pieces
from .traffic import Moved

CPU = "cpu"


class Answer(NamedTuple):
    """What a backend says to a problem; no reason: it serves it."""

    backend: str
    reason: str
    kind: str  # "serves", "slower", "avoidable" or "refuses"


class Work(NamedTuple):
    """How much is to be done, and what it takes at least."""

    pairs: float  # of query and key that the mask keeps, over all heads
    flops: float  # of those: 4 D a pair forward, 2.5 times that backward
    done: float | None  # of the matmuls of the tiles that are visited, with what is recomputed
    moved: Moved
    roof: Roof

    @property
    def intensity(self) -> float:
        """FLOPs a byte, each tensor moved once."""
        return self.flops / self.moved.once

    @property
    def side(self) -> str:
        """Which roof is nearer."""
        return "compute" if self.intensity >= self.roof.ridge else "memory"

    @property
    def least_ms(self) -> float:
        """The time of that work at the roof."""
        return self.roof.milliseconds(self.flops, self.moved.once)


class Explanation(NamedTuple):
    """All of it. `backend` is "" where nothing serves the call."""

    shape: Shape | Decode
    target: str
    card: Card | None  # None: the CPU
    backend: str
    forced: bool
    answers: list[Answer]
    launches: list[Launch]
    how: str  # on the CPU, or with few queries: in which way; of a cache, why keys are in pieces
    work: Work | None = None  # None: of 8 bits
    pieces: Pieces | None = None  # of a cache


def answers_of(target: str, ask: Callable[[str, torch.device], str | None]) -> list[Answer]:
    """Each backend's, in the order in which they are asked; no reason: it serves."""
    device = torch.device("cpu" if target == CPU else "cuda")
    with standing_in(target):
        reasons = {name: ask(name, device) for name in dispatch.BACKENDS}
    return [Answer(name, str(reason or ""), kind_of(reason)) for name, reason in reasons.items()]


def chosen_of(answers: list[Answer], backend: str | None) -> str:
    """The backend that is forced, or the first that serves; "" where it does not."""
    chosen = backend or next((x.backend for x in answers if x.kind == "serves"), "")
    is_refused = any(x.backend == chosen and x.kind in ("avoidable", "refuses") for x in answers)
    return "" if is_refused else chosen


def kind_of(reason: str | None) -> str:
    """What an answer amounts to."""
    kinds = {type(None): "serves", Slower: "slower", Avoidable: "avoidable"}
    return kinds.get(type(reason), "refuses")


@contextlib.contextmanager
def standing_in(target: str) -> Iterator[None]:
    """Backends answer as if such a GPU were there: the Hopper one asks the driver which it is."""
    from ..kernels import hopper

    real, hopper._is_hopper = hopper._is_hopper, lambda device: target == "sm90"
    try:
        yield
    finally:
        hopper._is_hopper = real


def compiled(launch: Launch, target: str, card: Card | None, with_compiler: bool) -> Launch:
    """A launch with what the compiler made of it, or why it made nothing."""
    if with_compiler:
        try:
            launch = launch._replace(built=built_of(launch.build(), target))
        except Exception as error:  # whatever the compiler raises is why there are no figures
            failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            launch = launch._replace(failed=failed)
    else:
        launch = launch._replace(failed="not asked")
    return launch._replace(at_once=at_once(launch, card))
