"""One class, in a process of its own with a limit: its row."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

import tilewise
from tilewise.errors import ArgumentError
from tilewise.integrations.transformers import check

from .cells import TASKS, NotTheirsError, Pair, compare, pair_of
from .changes import CHANGES
from .outcomes import BARE, EQUAL, NONE, OWN, REFUSED, THEIRS, WRONG
from .shrink import shrunk
from .subjects import Subject

OURS = str(Path(tilewise.__file__).parent)
SECONDS, BYTES, PARAMETERS = 30, 10 << 30, 80_000_000
LONGEST = 400  # characters of a reason


def row_of(subject: Subject, asked: Sequence[str] | None = None) -> dict:
    """Its outcomes by cell, of those that are asked for, or why it was not built."""
    names = asked or TASKS[subject.task]
    row = dict(subject._asdict(), transformers=transformers.__version__)
    warnings.simplefilter("ignore")
    try:
        eager_of, ours_of, config = makers(subject)
        if sum(x.numel() for x in eager_of(config).parameters()) > PARAMETERS:
            raise ValueError("it has too many parameters when its config is shrunk")
    except Exception as error:
        return row | dict(not_built=said(error))
    try:
        pair = pair_of(subject, config, eager_of, ours_of)
    except Exception as error:
        made = outcome_of(error)
        return row | dict(cells=dict.fromkeys(names, made))
    cells = {cell: cell_of(pair, cell) for cell in names}
    full = cells.get("full", {})
    if full.get("outcome") == THEIRS:  # as tiny, or without a sound, or with a text
        return row | dict(not_built=f"eager: {full['reason']}")
    return row | dict(cells=cells)


def makers(subject: Subject):
    """What makes the model with either attention, and its tiny config."""
    kind = getattr(transformers, subject.name)
    config = shrunk(kind.config_class(), CHANGES.get(kind.config_class.model_type, {}))
    if subject.task == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True

    def make(name: str):
        return lambda config: kind._from_config(config, attn_implementation=name)

    return make("eager"), make("tilewise"), config


def cell_of(pair: Pair, cell: str) -> dict:
    try:
        found = compare(pair, cell)
    except NotTheirsError as theirs:
        return dict(outcome=THEIRS, reason=cut(str(theirs)))
    except Exception as error:
        return outcome_of(error)
    row = {
        name: float(f"{x:.1e}") if isinstance(x, float) else x
        for name, x in found._asdict().items()
        if x is not None
    }
    if not found.is_equal(cell):
        return dict(outcome=WRONG) | row
    outcome = EQUAL if found.calls else OWN if check(pair.ours).layers else NONE
    return dict(outcome=outcome) | row


def outcome_of(error: Exception) -> dict:
    """Refused is what tilewise raises on purpose; all else is a bare error."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    on_purpose = isinstance(error, (NotImplementedError, ArgumentError)) and last.startswith(OURS)
    return dict(outcome=REFUSED if on_purpose else BARE, reason=said(error))


def said(error: BaseException) -> str:
    return cut(f"{type(error).__name__}: {error}")


def cut(text: str) -> str:
    return " ".join(text.split())[:LONGEST]


def apart(subject: Subject, asked: Sequence[str] | None = None) -> dict:
    """`row_of` in a fork of this process, which has imported what all need."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        _child(subject, asked, sender)
    sender.close()
    try:
        row = json.loads(receiver.recv())
    except EOFError:  # it was ended
        row = dict(subject._asdict(), transformers=transformers.__version__)
        row["not_built"] = f"it took more than {SECONDS} s of a CPU"
    os.waitpid(pid, 0)
    return row


def _child(subject: Subject, asked: Sequence[str] | None, sender) -> None:
    """Never returns."""
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        sender.send(json.dumps(row_of(subject, asked)))
    finally:
        os._exit(0)


def warm() -> None:
    """Imports what every class needs, so that forks need not."""
    from transformers.models.llama import modeling_llama  # noqa: F401

    from tilewise.integrations import transformers as integration

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    integration.register()
