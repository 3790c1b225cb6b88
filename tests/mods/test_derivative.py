"""Derivatives of score functions against torch's autograd, in fp64."""

import functools
import math

import pytest
import torch
from helpers import random_scores as scores
from helpers.work import at_most
from hypothesis import given, settings

from tilewise import ArgumentError
from tilewise.mods import alibi, causal, codegen, derivative, flat, score, serialize, softcapped
from tilewise.mods.expressions import FLOAT, OPERATORS, SCORE, Node, nodes_of
from tilewise.mods.trace import MAX_NODES
from tilewise.problem import Mods

BIAS = torch.linspace(0.5, 2, 5)
# One for each operator that gives floats, with the score on each side.
BY_OPERATOR = {
    "+": lambda s, b, h, q, k: s + k + s + BIAS[k],
    "-": lambda s, b, h, q, k: (k - s) - (s - q),
    "*": lambda s, b, h, q, k: (q * s) * (s * BIAS[k]),
    "/": lambda s, b, h, q, k: (s / (q + 1)) / (1 + s * s) + (1 + q) / (3 + s),
    "neg": lambda s, b, h, q, k: -s,
    "abs": lambda s, b, h, q, k: abs(s) * 3,
    "minimum": lambda s, b, h, q, k: torch.minimum(s * s, s + q) + torch.minimum(q, s),
    "maximum": lambda s, b, h, q, k: torch.maximum(s, BIAS[k]) + torch.maximum(2 * s, s * s),
    "where": lambda s, b, h, q, k: torch.where(s < BIAS[k], torch.where(q < k, s, 1), -2 * s),
    "exp": lambda s, b, h, q, k: torch.exp(s / 2),
    "exp2": lambda s, b, h, q, k: torch.exp2(-s * q),
    "expm1": lambda s, b, h, q, k: torch.expm1(s / 2),
    "log1p": lambda s, b, h, q, k: torch.log1p(s * s),
    "pow": lambda s, b, h, q, k: (s + 9) ** (s / 2) + s**q + 2.5**s + (s * s) ** 1.5,
    "sin": lambda s, b, h, q, k: torch.sin(s * q),
    "cos": lambda s, b, h, q, k: torch.cos(s * q),
    "erf": lambda s, b, h, q, k: torch.erf(s),
    "floor": lambda s, b, h, q, k: s * torch.floor(s),
    "log": lambda s, b, h, q, k: torch.log(s + 9),
    "log2": lambda s, b, h, q, k: torch.log2(9 - s),
    "sqrt": lambda s, b, h, q, k: torch.sqrt(s + 9),
    "rsqrt": lambda s, b, h, q, k: torch.rsqrt(9 - 2 * s),
    "tanh": lambda s, b, h, q, k: torch.tanh(s - 1),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(2 * s),
}


def of_torch(made, s, *indices):
    s = s.clone().requires_grad_()
    out = made(s, *indices).expand(s.shape)
    if not out.requires_grad:
        return torch.zeros_like(s)
    return torch.autograd.grad(out.sum(), s)[0]


def check(made, s, *indices):
    found = made.derivative(s, *indices).expand(s.shape)
    torch.testing.assert_close(found, of_torch(made, s, *indices), rtol=1e-9, atol=1e-9)


def test_every_operator_of_floats_has_a_rule():
    of_floats = {op for op, rule in OPERATORS.items() if FLOAT in _kinds(rule)}
    with_slopes = {op for op, rule in OPERATORS.items() if rule.slope is not None}
    assert BY_OPERATOR.keys() == with_slopes == of_floats


def _kinds(rule):
    for kinds in ([FLOAT], [FLOAT, FLOAT], ["bool", FLOAT, FLOAT]):
        if len(kinds) == rule.arity:
            yield rule.kind(kinds)


@pytest.mark.parametrize("op", BY_OPERATOR)
def test_rules(op):
    s = torch.linspace(-4, 4, 4 * 5 * 9, dtype=torch.float64).view(9, 4, 5)
    s[4] = 0.0
    made = score(BY_OPERATOR[op])
    assert op in {node.op for node in nodes_of(made.expr)}
    check(made, s, 0, 0, torch.arange(4)[:, None], torch.arange(5))


@given(text=scores.functions(leaves=8))
@settings(max_examples=200, deadline=None, database=None)
def test_compositions(text):
    check(scores.traced(text), torch.randn(scores.SHAPE, dtype=torch.float64), *scores.grid())


TIDY = {
    "bias": (lambda s, b, h, q, k: s + BIAS[k], "1.0"),
    "alibi": (alibi(BIAS), "1.0"),
    "no score": (lambda s, b, h, q, k: BIAS[k] + 1, "0.0"),
    "scaled": (lambda s, b, h, q, k: 3 * (s * 2) / 4, "1.5"),
    "minus": (lambda s, b, h, q, k: q - s, "(-1.0)"),
    "masked": (
        lambda s, b, h, q, k: torch.where(q < k, s, -math.inf),
        "where((q_idx < k_idx), 1.0, 0.0)",
    ),
    "one either way": (lambda s, b, h, q, k: torch.where(q < k, s, s + 1), "1.0"),
    "index": (lambda s, b, h, q, k: BIAS[torch.where(s < 0, q, k)], "0.0"),
    "by an index": (lambda s, b, h, q, k: s * (q - k), "(1.0 * (q_idx - k_idx))"),
    "softcap": (softcapped(30), "(1.0 - (tanh((score / 30)) * tanh((score / 30))))"),
}


@pytest.mark.parametrize("name", TIDY)
def test_derivatives_are_tidy(name):
    function, expected = TIDY[name]
    made = score(function).derivative
    assert repr(made) == f"ScoreMod({expected})" and made.expr.kind == FLOAT


UNSEEN = {
    "plain": lambda s, x: x,
    "scaled": lambda s, x: 2 * x / 3,
    "capped": lambda s, x: 5 * torch.tanh(x / 5),
    "biased": lambda s, x: x + BIAS[2],
    "times a score": lambda s, x: x * torch.sigmoid(s),
    "squared": lambda s, x: -abs(x) * abs(x),
    "divided": lambda s, x: x / torch.exp(s),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_scores_of_minus_infinity_move_nothing(name):
    def masked(s, b, h, q, k):
        return UNSEEN[name](s, torch.where(causal()(b, h, q, k), s, -math.inf))

    def plain(s, b, h, q, k):
        return UNSEEN[name](s, s)

    q, k = torch.arange(4)[:, None], torch.arange(5)
    s = torch.linspace(-3, 3, 20, dtype=torch.float64).view(4, 5) + 0.01
    found = score(masked).derivative(s, 0, 0, q, k).expand(4, 5)
    expected = torch.where(q >= k, score(plain).derivative(s, 0, 0, q, k), 0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_long_chains_stay_small():
    depth = MAX_NODES - 1
    made = score(
        lambda s, b, h, q, k: functools.reduce(lambda x, _: torch.tanh(x), range(depth), s)
    )
    assert len(nodes_of(made.derivative.expr)) < 5 * depth
    check(made, torch.linspace(-1, 1, 3, dtype=torch.float64), 0, 0, 0, 0)
    assert made.derivative.key.startswith("score_")


@pytest.mark.parametrize("small", [1e-45, -1e-39, 5e-324, 0.0])
def test_slopes_have_no_constants_past_fp32(small):
    """A text of one is refused."""
    made = score(lambda s, b, h, q, k: torch.tanh(s / small) + s * 3e38 * 3e38)
    text = serialize.serialize(made.derivative.key)
    assert serialize.tree_of_text(text, serialize.SCORE_FUNCTION) is made.derivative.expr


def nested(n):
    """abs of abs of ..., whose derivative uses each slope twice."""
    return score(lambda s, b, h, q, k: functools.reduce(lambda x, i: abs(x) - i, range(n), s))


def test_work_grows_with_distinct_steps():
    """And not with the tree, which is of 2^n: forward, derivative, text, kernel, questions."""
    with at_most(calls=10**6):
        mod = nested(64)
        names = Mods(score=mod.key, derivative=mod.derivative.key)
        assert flat.indices_used(names) >= {"abs", "where"}
        assert not flat.loads_per_pair(names)
        assert flat.count_tensors(names.derivative) == 0
        text = serialize.serialize(names.derivative)
        assert serialize.tree_of_text(text, serialize.SCORE_FUNCTION) is mod.derivative.expr
        assert len(repr(mod.derivative)) < 2000 and hash(mod.derivative.expr)
        lines = [codegen.source_of(nested(n).derivative.expr).count("\n") for n in (16, 32, 64)]
        assert lines[2] - lines[1] == 2 * (lines[1] - lines[0])
        x = torch.linspace(-3, 3, 5, dtype=torch.float64)
        check(mod, x + 0.1, 0, 0, 0, 0)


def test_what_cannot_be_derived_is_named():
    floored = Node("+", (Node(SCORE), Node("//", (Node(SCORE), Node(FLOAT, (), 2.0)))))
    with pytest.raises(ArgumentError, match=r"\(score // 2.0\) has no known.*derivative=g"):
        derivative.derivative(floored)
