"""Lengths that are wrong, where only a GPU knows them: kernels stay inside their own tensors, write
to nothing that they were given to read, and end.

The interpreter and the emulator raise at an address outside the tensors of a launch, and the
emulator at a deadlock. Each tensor has memory of its own, with NaN before and behind it.
"""

from unittest import mock

import pytest
import torch
from helpers.tiers import sample

from tilewise.kernels.hopper import tile_counter
from tilewise.kernels.hopper.bwd import launch as hopper_backward
from tilewise.kernels.hopper.fwd import launch as hopper
from tilewise.kernels.portable import launch as portable
from tilewise.problem import Extras, Saved, Scalars, describe
from tilewise.testing import use_emulator, use_interpreter
from tilewise.testing.inputs import guarded, poisoned

ROWS_Q, ROWS_K = 300, 260  # of all packed sequences, or of each row of a batch
NHEADS = {"portable": 2, "hopper": 1}
LARGEST = 2**31 - 1
RIGHT_Q, RIGHT_K = (0, 100, 130, 300), (0, 70, 250, 260)
WRONG_STARTS = {
    "past the end": (0, 100, 130, 350),
    "far past it": (0, 100, 10**6, LARGEST),
    "negative": (-50, 100, 200, 300),
    "least": (-LARGEST - 1, LARGEST, -LARGEST - 1, 300),
    "decreasing": (0, 250, 100, 300),
    "all over again": (0, 260, 0, 260),  # more blocks than a right call of these rows has
}
WRONG_USED = {
    "past the room": (10**6, 3, 40),
    "largest": (LARGEST, LARGEST, 0),
    "negative": (-5, 50, -LARGEST - 1),
}
HOW = {
    "plain": {},
    "causal": dict(causal=True),
    "deterministic": dict(deterministic=True),
    "causal-deterministic": dict(causal=True, deterministic=True),
}
SIDES = {"both": "qk", "queries": "q", "keys": "k"}


def on(backend, how, *marks):
    marks = [*marks, pytest.mark.emulator] if backend == "hopper" else marks
    return pytest.param(backend, how, marks=marks, id=f"{backend}-{how}")


# The portable backward is deterministic, asked or not
CALLS = pytest.mark.parametrize(
    ("backend", "how"),
    [
        on("portable", "plain"),
        on("portable", "causal", pytest.mark.slow),
        on("hopper", "plain", pytest.mark.slow),
        on("hopper", "causal", pytest.mark.slow),
        on("hopper", "deterministic", pytest.mark.slow),
        on("hopper", "causal-deterministic"),
    ],
)
SIDE = pytest.mark.parametrize("side", sample(SIDES, "both"))


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def call(backend, extras, batch=1, causal=False, deterministic=False):
    """out, lse and the gradients of a call that no check has looked at."""
    dtype, headdim = (torch.float32, 16) if backend == "portable" else (torch.bfloat16, 64)
    nheads = NHEADS[backend]
    sides = (ROWS_Q, nheads), (ROWS_K, 1), (ROWS_K, 1), (ROWS_Q, nheads)
    shapes = [(batch, rows, heads, headdim) for rows, heads in sides]
    q, k, v, dout = (guarded(torch.randn(shape).to(dtype)) for shape in shapes)
    given = q, k, v, dout, *(x for x in extras[:6] if x is not None)
    before = [memory_of(x).clone() for x in given]
    scalars = Scalars(headdim**-0.5, 0.0, -1, 0 if causal else -1)
    problem = describe(q, k, v, extras, scalars, "bottom_right", deterministic)
    forward, backward = portable, portable
    context, counter = use_interpreter(), torch.zeros(1, dtype=torch.int32)
    if backend == "hopper":
        forward, backward, context = hopper, hopper_backward, use_emulator(1)
    counters = mock.patch.object(tile_counter, "counters", lambda *_, count: counter)
    with context, poisoned(), counters:
        out, lse = forward.prepare(problem, scalars, q, k)(q, k, v, extras)
        assert counter.item() == 0
        saved = Saved(dout, None, q, k, v, out, lse)
        grads = backward.prepare_backward(problem, scalars)(saved, extras)
        assert counter.item() == 0  # or the next call would not find its tiles
    for x, held in zip(given, before, strict=True):
        assert torch.equal(memory_of(x).view(torch.uint8), held.view(torch.uint8))
    return out, lse, *grads[:4]


def memory_of(x):
    return x.new_empty(0).set_(x.untyped_storage())


def packed_extras(starts_q=RIGHT_Q, starts_k=RIGHT_K, used_q=None, used_k=None, sinks=0):
    used_q, used_k = (None if x is None else int32(x) for x in (used_q, used_k))
    sinks = torch.ones(sinks) if sinks else None
    return Extras(None, sinks, used_k, used_q, int32(starts_q), int32(starts_k))


@CALLS
@SIDE
@pytest.mark.parametrize("name", sample(WRONG_STARTS, "far past it"))
def test_wrong_starts(name, side, backend, how):
    wrong = {f"starts_{x}": WRONG_STARTS[name] for x in SIDES[side]}
    call(backend, packed_extras(**wrong), **HOW[how])


@CALLS
@pytest.mark.parametrize("name", sample(WRONG_USED, "largest"))
def test_wrong_used_lengths_of_packed_sequences(name, backend, how):
    used = WRONG_USED[name]
    call(backend, packed_extras(used_q=used, used_k=used, sinks=NHEADS[backend]), **HOW[how])


@CALLS
@pytest.mark.parametrize("name", sample(WRONG_USED, "negative"))
def test_wrong_used_keys_of_a_batch(name, backend, how):
    """A length past the room is the room, and one below 0 is 0."""
    used = int32(WRONG_USED[name])
    torch.manual_seed(0)
    found = call(backend, Extras(seqused_k=used), 3, **HOW[how])
    torch.manual_seed(0)
    right = call(backend, Extras(seqused_k=used.clamp(0, ROWS_K)), 3, **HOW[how])
    for mine, theirs in zip(found[:5], right[:5], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "backend", ["portable", pytest.param("hopper", marks=pytest.mark.emulator)]
)
def test_right_lengths_leave_nothing_unwritten(backend):
    """By which the call above is known to look at what a call writes."""
    for x in call(backend, packed_extras(sinks=NHEADS[backend])):
        assert x is None or not x.isnan().any()
