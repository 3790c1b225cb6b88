"""The classes: of transformers' mappings, each once, with what it is for."""

from __future__ import annotations

from typing import NamedTuple

MAPPINGS = {
    "encoder-decoder": ["SEQ_TO_SEQ_CAUSAL_LM"],
    "causal": ["CAUSAL_LM"],
    "masked": ["MASKED_LM"],
    "vision": ["IMAGE_CLASSIFICATION", "IMAGE"],
}


class Subject(NamedTuple):
    """A class of a model."""

    name: str
    task: str


def subjects() -> dict[str, Subject]:
    """By the name of the class. Of a vision model the classifier, or else the bare model."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Subject] = {}
    for task, mappings in MAPPINGS.items():
        types: set[str] = set()
        for mapping in mappings:
            names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
            new = {kind: name for kind, name in names.items() if kind not in types}
            types |= new.keys()
            for name in new.values():
                name = name if isinstance(name, str) else name[0]
                found.setdefault(name, Subject(name, task))
    return found
