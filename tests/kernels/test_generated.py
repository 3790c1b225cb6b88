"""Generated masks and score functions in kernels: the interpreter, the emulator and the compiler
take them, and they compute what `evaluate` says.
"""

import gc
import inspect
import linecache
import math
from functools import partial

import pytest
import torch
import triton
from helpers import random_masks as masks
from helpers import random_scores as scores
from helpers.modified_tiles import (
    arguments,
    check,
    emulated,
    expected_of,
    features_of,
    gluon_kernel,
    interpreted,
    triton_kernel,
)
from helpers.tiers import sample
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.mods import (
    Mask,
    alibi,
    causal,
    codegen,
    document,
    mask,
    maximum,
    score,
    sliding_window,
)
from tilewise.mods.codegen import function_of
from tilewise.mods.expressions import OPERATORS, nodes_of
from tilewise.testing import build

DOC = torch.arange(64, dtype=torch.int32) // 7
FLOATS = torch.linspace(-9, 9, 64).sin()
# One for each operator, with operands below zero where it takes them.
BY_OPERATOR = {
    "+": score(lambda s, b, h, q, k: s + k + (q + h)),
    "-": score(lambda s, b, h, q, k: (b - s) - (k - q)),
    "*": score(lambda s, b, h, q, k: s * (q * k)),
    "/": score(lambda s, b, h, q, k: s / (k + 1) + (q - k) / (h + 2) + s / 3),
    "//": mask(lambda b, h, q, k: ((q - k) // 3 + (k - q) // (-4) + k // (2 - k * 4)) % 2 == 0),
    "%": mask(lambda b, h, q, k: ((q - k) % 5 + (k - 9) % (-3) + q % (q - 99)) > 0),
    "<<": mask(lambda b, h, q, k: (q - k) << (k % 4) < 3),
    ">>": mask(lambda b, h, q, k: (q - k) >> (k % 4) == -2),
    "<": score(lambda s, b, h, q, k: torch.where((q < k) ^ (s < 0.5), s, 1)),
    "<=": score(lambda s, b, h, q, k: torch.where((k <= q) ^ (s <= h), s, 1)),
    "==": mask(lambda b, h, q, k: ((q % 2 == k % 3) == (DOC[q] == k)) | (q * 0.5 == k)),
    "!=": mask(lambda b, h, q, k: (q % 2 != k % 3) != (DOC[q] != k)),
    "&": mask(lambda b, h, q, k: (q > 2) & ((q - k) & 6 == 2)),
    "|": mask(lambda b, h, q, k: (q > 9) | ((q - k) | 6 == -1)),
    "^": mask(lambda b, h, q, k: (q > 9) ^ ((q - k) ^ 6 == -3)),
    "~": mask(lambda b, h, q, k: ~(q > 9) & (~(q - k) > 2)),
    "neg": score(lambda s, b, h, q, k: -s + -q),
    "abs": score(lambda s, b, h, q, k: abs(s) + abs(q - k)),
    "minimum": score(lambda s, b, h, q, k: torch.minimum(s, q - k) + torch.minimum(q, k)),
    "maximum": score(lambda s, b, h, q, k: torch.maximum(q - k, s) + maximum(q - k, -3)),
    "where": score(lambda s, b, h, q, k: torch.where(q > k, s, torch.where(k > 9, q - k, -2))),
    "exp": score(lambda s, b, h, q, k: torch.exp(s) + torch.exp(k - q - 20)),
    "exp2": score(lambda s, b, h, q, k: torch.exp2(s) + torch.exp2(-k)),
    "log": score(lambda s, b, h, q, k: torch.log(abs(s) + 1) + torch.log(k + 1)),
    "log2": score(lambda s, b, h, q, k: torch.log2(abs(s) + 1) + torch.log2(q + 1)),
    "sqrt": score(lambda s, b, h, q, k: torch.sqrt(abs(s)) + torch.sqrt(k)),
    "rsqrt": score(lambda s, b, h, q, k: torch.rsqrt(abs(s) + 1) + torch.rsqrt(k + 1)),
    "tanh": score(lambda s, b, h, q, k: torch.tanh(s) + torch.tanh(k - q)),
    "sigmoid": score(lambda s, b, h, q, k: torch.sigmoid(s) + torch.sigmoid(q - k)),
    "expm1": score(lambda s, b, h, q, k: torch.expm1(s) + torch.expm1((q - k) / 64)),
    "log1p": score(lambda s, b, h, q, k: torch.log1p(abs(s) / 99) + torch.log1p(k)),
    "pow": score(lambda s, b, h, q, k: abs(s) ** 1.5 + s ** (q - k) * 1e-9 + 0.5**k + 2.0**s),
    "sin": score(lambda s, b, h, q, k: torch.sin(s) + torch.sin(q - k)),
    "cos": score(lambda s, b, h, q, k: torch.cos(s) + torch.cos(q - k)),
    "erf": score(lambda s, b, h, q, k: torch.erf(s) + torch.erf((q - k) / 9)),
    "floor": score(lambda s, b, h, q, k: torch.floor(s) + torch.floor((q - k) / 3.5)),
    "whole": mask(lambda b, h, q, k: (FLOATS[q] * 9).long() >= (FLOATS[k] * 9).int()),
}


@pytest.mark.parametrize("op", BY_OPERATOR)
@pytest.mark.parametrize("run", [interpreted, emulated])
def test_every_operator(op, run):
    mod = BY_OPERATOR[op]
    assert op in {node.op for node in nodes_of(mod.expr)}
    check(mod, run)
    check(mod, run, b=0, h=0, q_start=16, k_start=3, turned=True)


def test_no_operator_is_missing():
    assert BY_OPERATOR.keys() == OPERATORS.keys()


PAIRS = torch.linspace(-90, 90, 32 * 32).sin().view(32, 32)
TALL = torch.linspace(-90, 90, 40 * 9).cos().view(40, 9)[:, ::2].T[1:]  # (4, 40), all strided
CAPTURED = {
    "0-d": score(partial(lambda x, s, b, h, q, k: s * x, torch.tensor(2.5))),
    "0-d int": mask(partial(lambda x, b, h, q, k: q - k < x, torch.tensor(7))),
    "a head's": alibi(FLOATS[:4]),
    "1-d": mask(lambda b, h, q, k: DOC[q] == DOC[k]),
    "2-d": score(lambda s, b, h, q, k: s + PAIRS[q, k] - PAIRS[k // 2, q]),
    "strided": score(lambda s, b, h, q, k: s + TALL[h, k] - TALL[1, q]),
    "repeated": score(
        partial(lambda x, s, b, h, q, k: s + x[h, k], FLOATS[:3, None].expand(3, 64))
    ),
    "bool": mask(partial(lambda x, b, h, q, k: x[q] ^ x[k], FLOATS > 0)),
    "uint8": mask(partial(lambda x, b, h, q, k: x[q] - x[k] > -30, (DOC * 28).byte())),
    "int8": mask(partial(lambda x, b, h, q, k: x[q] * 100 < x[k], (DOC - 4).char())),
    "int64": score(partial(lambda x, s, b, h, q, k: s * x[q] + FLOATS[x[k]], DOC.long() - 3)),
    "half": score(partial(lambda x, s, b, h, q, k: s + x[q] * x[k], FLOATS.half())),
    "bfloat16": score(partial(lambda x, s, b, h, q, k: s + x[q] * x[k], FLOATS.bfloat16())),
    "double": score(partial(lambda x, s, b, h, q, k: s + x[q] * x[k], FLOATS.double())),
    "two": causal() & document(DOC) & mask(lambda b, h, q, k: FLOATS[q] < FLOATS[k]),
    "a batch's": mask(partial(lambda x, b, h, q, k: x[b, k] == x[b, q + b], DOC.view(2, 32))),
}


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.parametrize("run", [interpreted, emulated])
def test_captured_tensors(name, run):
    check(CAPTURED[name], run)
    check(CAPTURED[name], run, turned=True, b=0)


SHAPELESS = {
    "everything": sliding_window(None),
    "nothing": ~sliding_window(None),
    "one head": mask(lambda b, h, q, k: h == 1),
    "a batch": mask(lambda b, h, q, k: causal()(b, h, 3, 2) ^ (b == 0)),
    "rows": mask(lambda b, h, q, k: q > 3),
    "columns": mask(lambda b, h, q, k: k > 3),
    "a number": score(lambda s, b, h, q, k: 1.5),
    "infinity": score(lambda s, b, h, q, k: -math.inf),
    "a head's number": alibi(FLOATS[:3]).derivative,
    "constants": mask(lambda b, h, q, k: mask(BY_OPERATOR["//"])(0, 0, 5, 9)),
    "constant floats": score(lambda s, b, h, q, k: BY_OPERATOR["exp"](-0.5, 0, 0, 2, 3)),
    "a constant choice": score(
        lambda s, b, h, q, k: torch.where(sliding_window(None)(b, h, q, k), 1.0, 2)
    ),
    "wide": mask(lambda b, h, q, k: (q < 2**40) & ~mask(lambda b, h, q, k: q == k)(0, 0, 2**40, 1)),
}


@pytest.mark.parametrize("name", SHAPELESS)
@pytest.mark.parametrize("run", [interpreted, emulated])
def test_answers_broadcast_over_the_tile(name, run):
    for h in (0, 1):
        check(SHAPELESS[name], run, b=h, h=h)
        check(SHAPELESS[name], run, h=h, turned=True)


@pytest.mark.parametrize("run", [interpreted, emulated])
@pytest.mark.parametrize("turned", [False, True])
def test_ragged_tiles_read_within_captured_tensors(run, turned):
    """Both runs check every address against the tensors' memory; 9 queries and 9 keys are real."""
    doc, bias, table = DOC[:9].clone(), PAIRS[:9, :9].clone(), PAIRS[:3, :7].clone()

    def held(i, n):
        return torch.clamp(torch.where(i < 0, i + n, i), 0, n - 1)

    for mod, as_read in (
        (document(doc), document(doc)),
        (flags := mask(partial(lambda x, b, h, q, k: x[q] ^ x[k], doc == 0)), flags),
        (
            score(lambda s, b, h, q, k: s + bias[q, k] + bias[8, k] - bias[q + 1, k]),
            score(lambda s, b, h, q, k: s + bias[q, k] + bias[8, k] - bias[held(q + 1, 9), k]),
        ),
        (
            score(lambda s, b, h, q, k: s + table[h, k - q + 3] + table[0, k - 20]),
            score(
                lambda s, b, h, q, k: s + table[h, held(k - q + 3, 7)] + table[0, held(k - 20, 7)]
            ),
        ),
        (
            score(lambda s, b, h, q, k: s + doc[doc[q] - k] * 0.5),
            score(lambda s, b, h, q, k: s + doc[held(doc[q] - k, 9)] * 0.5),
        ),
    ):
        given, constants = arguments(mod, q_start=5, k_start=2, turned=turned)
        run(given, constants)
        x, out, *at, _ = given
        expected = expected_of(as_read, x, *at, turned)
        real = (slice(9 - 2), slice(9 - 5)) if turned else (slice(9 - 5), slice(9 - 2))
        torch.testing.assert_close(out[real], expected[real], rtol=1e-5, atol=1e-5)
        assert not out.isnan().any()


@given(text=masks.predicates(), turned=st.booleans())
@settings(max_examples=40, deadline=None, database=None)
def test_any_mask(text, turned):
    check(masks.traced(text), q_start=16, k_start=8, turned=turned)


@given(text=scores.functions(smooth=True), derived=st.booleans())
@settings(max_examples=40, deadline=None, database=None)
def test_any_score_function(text, derived):
    mod = scores.traced(text)
    mod = mod.derivative if derived else mod
    given, constants = arguments(mod)
    interpreted(given, constants)
    x, out, *at, _ = given
    real = slice(scores.SEQLEN_Q), slice(scores.SEQLEN_K)  # the tensors that it captures end there
    expected, exact = (expected_of(mod, y, *at, False)[real] for y in (x, x.double()))
    # Not where fp32 decides: at a tie, and where numbers cancel
    stable = (expected - exact).abs() < 1e-4 * (1 + exact.abs())
    torch.testing.assert_close(out[real][stable], expected[stable], rtol=1e-3, atol=1e-3)


def test_offsets_pass_32_bits():
    """In untouched memory, of which a page or two are read."""
    rows = torch.empty(5 * 2**29, dtype=torch.uint8).as_strided((5, 64), (2**29, 1))
    rows[4] = torch.arange(64)
    check(mask(lambda b, h, q, k: rows[h + 2, k] % 3 == 1))
    check(mask(lambda b, h, q, k: rows[k - k + 4, q] % 3 == 1), emulated)


def test_equal_functions_are_one():
    def window(size):
        return mask(lambda b, h, q, k: q - k < size)

    assert function_of(window(8).key) is function_of(window(8).key)
    assert function_of(window(8).key) is not function_of(window(9).key)
    # What Triton's cache on disk sees of a constant within a NamedTuple
    seen = {repr(features_of(window(size))) for size in (8, 8, 9)}
    assert len(seen) == 2 and all("mask_mod_" in text for text in seen)


def test_kernels_are_compiled_once_for_equal_functions():
    def capped(cap):
        return score(lambda s, b, h, q, k: cap * torch.tanh(s / cap))

    def compiled(mod):
        given, constants = arguments(mod)
        return build(triton_kernel, *given, **constants, on="sm90")

    first, again, other = compiled(capped(20.0)), compiled(capped(20.0)), compiled(capped(21.0))
    assert first is again and first is not other
    assert first.hash != other.hash  # the name on disk
    codegen.function_of.cache_clear()
    triton_kernel.device_caches.clear()
    assert compiled(capped(20.0)).hash == first.hash


def test_source_is_there_as_long_as_the_function():
    mod = score(lambda s, b, h, q, k: s + 0.123456789)
    function = function_of(mod.key)
    file = function.fn.__code__.co_filename
    assert "0.123456789" in inspect.getsource(function.fn) and file in linecache.cache
    assert inspect.getsource(function.fn).startswith("def score_mod_")
    codegen.function_of.cache_clear()
    # Where newer releases keep every function
    kept = getattr(triton.runtime.jit, "_triton_jit_function_registry", {})
    kept.pop(f"{function.module}:{function.__name__}", None)
    del function
    gc.collect()
    assert file not in linecache.cache


def test_what_is_computed_twice_is_one_line():
    mod = score(lambda s, b, h, q, k: torch.tanh(s + q) * torch.tanh(s + q) + (s + q))
    text = inspect.getsource(function_of(mod.key).fn)
    assert text.count("tanh(") == 1 and text.count("+ ") == 2 and len(text.splitlines()) == 6


def sum_of(mods):
    return score(
        lambda s, b, h, q, k: sum(
            (
                torch.where(mod(b, h, q, k), s, 0.5)
                if isinstance(mod, Mask)
                else mod(s, b, h, q, k)
                for mod in mods
            ),
            0.0,
        )
    )


ELEMENTARY = "expm1 log1p pow erf floor whole".split()
EVERYTHING = sum_of(
    [
        *[mod for op, mod in BY_OPERATOR.items() if op not in (*ELEMENTARY, "sin", "cos")][::3],
        *list(CAPTURED.values())[::2],
    ]
)
COMPILED = EVERYTHING, EVERYTHING.derivative, *SHAPELESS.values()
COMPILED += sum_of([BY_OPERATOR[op] for op in ELEMENTARY]), BY_OPERATOR["sin"], BY_OPERATOR["cos"]


@pytest.mark.compile
@pytest.mark.parametrize("kernel", [triton_kernel, gluon_kernel], ids=["triton", "gluon"])
@pytest.mark.parametrize("turned", sample([False, True], True))
def test_they_compile(kernel, turned):
    for mod in COMPILED:
        given, constants = arguments(mod, turned=turned)
        compiled = build(kernel, *given, **constants, num_warps=4, on="sm90")
        assert " 0 bytes spill stores" in compiled.ptxas_log, mod


@pytest.mark.parametrize("run", [interpreted, emulated])
def test_together(run):
    check(EVERYTHING, run, h=1)
    check(EVERYTHING.derivative, run, h=1)
