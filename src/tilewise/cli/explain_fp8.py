"""The page of `tilewise explain --dtype fp8`: answers, and whether products run in 8 bits."""

from __future__ import annotations

from .explain_tables import show_answers


def show(screen, found) -> None:
    """The backends, and a sentence."""
    show_answers(screen, found, what=str(found.shape), how=found.how)


def as_record(found) -> dict:
    """The explanation as JSON takes it."""
    return {
        "shape": found.shape._asdict(),
        "target": found.target,
        "card": found.card.name if found.card else None,
        "backend": found.backend,
        "answers": [answer._asdict() for answer in found.answers],
        "products": found.how,
    }
