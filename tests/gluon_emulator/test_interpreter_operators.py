"""Operators that go to numpy at once give what Triton's own code gives."""

import operator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from gluon_emulator.triton import interpreter, known_types, operators
from tilewise.testing import interpret

pytestmark = pytest.mark.emulator

NAMES = "add sub mul truediv floordiv mod lshift lt le gt ge eq ne and_ or_ xor".split()
KINDS = "float32 int32 int64 int1 bfloat16 float16 uint32".split()
SHAPES = (), (8,), (1,), (4, 1), (1, 8), (4, 8)
MEMORY = torch.zeros(9, dtype=torch.bfloat16)
OTHERS = 3, -2, 0.5, True, 2**31, 2**32, float("nan"), tl.constexpr(5)


def tensors(kind):
    """One of each shape, drawn again for each kind."""
    for shape in SHAPES:
        value: Any = tl.full(shape, 0, tl.int32) if shape else interpreter._semantic.to_tensor(0)
        value.handle.data[...] = torch.randint(-9, 9, value.handle.data.shape).numpy()
        yield value.to(getattr(tl, kind))


def pairs():
    for kind in KINDS:
        yield from ((x, y) for x in tensors(kind) for y in tensors(kind))
        yield from ((x, y) for x in tensors(kind) for y in OTHERS)
    for kind in KINDS[:4]:
        yield from ((x, y) for x in tensors(kind) for y in tensors("int32"))
    for kind in ("pointer", "pointers"):
        base = interpreter._as_argument(MEMORY)
        base = base if kind == "pointer" else base + tl.full((8,), 1, tl.int32)
        for offsets in ("int32", "int64", "uint32"):
            yield from ((base, y) for y in (*tensors(offsets), 3))


def outcome(function, *operands):
    try:
        result = function(*operands)
    except Exception as error:
        return type(error).__name__, str(error).split("(")[0]
    handle = result.handle
    # Triton keeps a truth value as a bool or a 1 of the type that was compared
    data = handle.data.astype(bool) if result.dtype == tl.int1 else handle.data
    return (
        *(str(result.type), str(result.dtype), [int(n) for n in result.shape], int(result.numel)),
        *(str(handle.dtype), data.dtype, data.tobytes(), data.shape),
    )


@pytest.fixture
def without_ours(monkeypatch):
    """Leaves what modules of ours do to Triton's own code."""

    def leave(*modules):
        interpreter._language.cache_clear()
        for module in modules:
            monkeypatch.setattr(module, "patches", lambda: ())

    yield leave
    interpreter._language.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_results_and_types_are_tritons(name, without_ours):
    def results():
        torch.manual_seed(0)
        with interpreter.interpreting({}):
            found = [outcome(getattr(operator, name), x, y) for x, y in pairs()]
            return found + [outcome(getattr(operator, name), y, x) for x, y in pairs()]

    found = results()
    without_ours(operators)
    expected = results()
    different = [(a, b) for a, b in zip(found, expected) if a != b]
    assert len(found) == len(expected) and not different, different[:3]


def test_new_dimensions_and_conversions_are_tritons(without_ours):
    indices = [(None,), (slice(None), None), (None, slice(None)), None, slice(None)]
    indices += [(slice(None), None, slice(None)), (slice(None),) * 3, (0, None), (slice(2), None)]

    def results():
        torch.manual_seed(0)
        with interpreter.interpreting({}):
            made = [x for kind in KINDS for x in tensors(kind)]
            base = interpreter._as_argument(MEMORY)
            pointers = [base, base + tl.full((8,), 1, tl.int32)]
            found = [outcome(operator.getitem, x, y) for x in (*made, *pointers) for y in indices]
            kinds = [getattr(tl, kind) for kind in KINDS]
            return found + [outcome(lambda x, to: x.to(to), x, to) for x in made for to in kinds]

    found = results()
    without_ours(known_types, operators)
    expected = results()
    different = [(a, b) for a, b in zip(found, expected) if a != b]
    assert len(found) == len(expected) and not different, different[:3]


@triton.jit
def overflowing_kernel(first, HOW: tl.constexpr):
    most = tl.full((4,), first, tl.int32)
    if HOW == "add":
        most += most
    if HOW == "number":
        most += 1
    if HOW == "mul":
        most *= 2


@pytest.mark.parametrize("how", ["add", "number", "mul"])
def test_int32_that_overflows_is_an_error(how):
    interpret(overflowing_kernel)[(1,)](2**30 - 1, HOW=how)
    with pytest.raises(OverflowError, match="cast to int64"):
        interpret(overflowing_kernel)[(1,)](2**31 - 1, HOW=how)
    interpret(overflowing_kernel, check=False)[(1,)](2**31 - 1, HOW=how)
