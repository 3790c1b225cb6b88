"""Answers to the exercises of lesson 07, and their checks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import Exercises
from . import hopper_parts as parts
from .hopper_steps import compute_ahead, compute_in_order, specialised
from .pictures_07 import outcome

exercises = Exercises("07")

compute_with_waits = compute_in_order


@exercises.check(1, compute_with_waits)
def check_race(compute):
    """Emulates `compute` as the consumer of step 3, in twenty orders of events."""
    for seed in range(20):
        word, error = outcome(specialised(compute), seed)
        lines = (
            str(error).splitlines()
            if error
            else ["compare with the softmax in fp64"]
        )
        assert word == "right", f"seed {seed}: {word}. {lines[0]}"
    return "20 orders of events give the right output"


@gluon.jit
def load_v_first(q, q_full, keys, values, descs, row, first, seqlen):
    """The producer, with V's stage before K's.

    With one stage, V of block 1 has to wait until V of block 0 is read. That
    happens in the iteration that starts with S of block 1, whose K the producer has
    not loaded: it waits for V.
    """
    N: gl.constexpr = keys.tiles.shape[1]
    parts.load_tile(descs[0], row, q_full.index(0), q.index(0))
    for i in range(seqlen // N):
        parts.wait_empty(values, i)
        parts.fill(values, i, descs[2], first + i * N)
        parts.wait_empty(keys, i)
        parts.fill(keys, i, descs[1], first + i * N)


@exercises.check(2, load_v_first)
def check_load(load):
    """Runs `load` as the producer of step 4, with two stages and with one."""
    (two, _), (one, error) = (
        outcome(specialised(compute_ahead, load=load, stages=stages), 0)
        for stages in (2, 1)
    )
    assert two == "right", f"two stages: {two}, expected right"
    assert one == "Deadlock", f"one stage: {one}, expected Deadlock"
    lines = [
        x for x in str(error).splitlines() if "CTA" not in x or "(0, 0, 0)" in x
    ]
    said = "Two stages give the right output; one stage ends in a deadlock:"
    return "\n".join([said, *lines])
