"""Score functions: what they give against torch's own answer, their keys, their errors."""

import math
import re

import pytest
import torch
from helpers import random_scores as scores
from hypothesis import given, settings

from tilewise import ArgumentError
from tilewise.mods import (
    alibi,
    causal,
    document,
    evaluate,
    expressions,
    mask,
    relative_bias,
    score,
    softcapped,
)
from tilewise.mods.function import check_sizes

NHEADS, S = 3, 6
Q, K = torch.arange(S)[:, None], torch.arange(S)
SLOPES = torch.tensor([0.5, 0.25, 0.125])
BIAS = torch.linspace(-2, 2, NHEADS * S * S).view(NHEADS, S, S)
DOC = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32)
CAP = torch.tensor(2.0)


def tile(dtype=torch.float32):
    return torch.linspace(-5, 5, S * S, dtype=dtype).view(S, S)


FUNCTIONS = {
    "itself": (lambda s, b, h, q, k: s, lambda s, h: s),
    "not at all": (lambda s, b, h, q, k: 1.5, lambda s, h: torch.full_like(s, 1.5)),
    "bias": (lambda s, b, h, q, k: s + BIAS[h, q, k], lambda s, h: s + BIAS[h]),
    "bias of one head": (lambda s, b, h, q, k: BIAS[1, q, k], lambda s, h: BIAS[1].to(s.dtype)),
    "masked": (
        lambda s, b, h, q, k: torch.where(DOC[q] == DOC[k], s, -float("inf")),
        lambda s, h: s.masked_fill(DOC[:, None] != DOC, -math.inf),
    ),
    "softcap": (
        lambda s, b, h, q, k: CAP * torch.tanh(s / CAP),
        lambda s, h: 2 * torch.tanh(s / 2),
    ),
    "integers divide": (
        lambda s, b, h, q, k: s * (1 + q) / (k + 1),
        lambda s, h: s * (Q + 1) / (K + 1),
    ),
    "only integers divide": (
        lambda s, b, h, q, k: q / (k + 1),
        lambda s, h: Q / (K + 1).to(s.dtype),
    ),
    "reflected": (
        lambda s, b, h, q, k: 1 / (s * s + 1) - 2 - s,
        lambda s, h: 1 / (s * s + 1) - 2 - s,
    ),
    "of integers": (
        lambda s, b, h, q, k: torch.exp2(k - q) + torch.sqrt(q),
        lambda s, h: torch.exp2((K - Q).to(s.dtype)) + torch.sqrt(Q.to(s.dtype)),
    ),
    "torch's names": (
        lambda s, b, h, q, k: torch.div(torch.multiply(s, 3), torch.subtract(torch.abs(s), -1)),
        lambda s, h: 3 * s / (s.abs() + 1),
    ),
    "chosen": (
        lambda s, b, h, q, k: torch.where(s < 0, torch.sigmoid(s), torch.maximum(s, q)),
        lambda s, h: torch.where(s < 0, torch.sigmoid(s), torch.maximum(s, Q.to(s.dtype))),
    ),
    "alibi": (alibi(SLOPES), lambda s, h: s + SLOPES[h] * (K - Q)),
    "softcapped": (softcapped(3), lambda s, h: 3 * torch.tanh(s / 3)),
    "relative": (
        relative_bias(BIAS[:, 0, :5]),
        lambda s, h: s + BIAS[h, 0][(K - Q).clamp(-2, 2) + 2],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_scores_become(name, dtype):
    function, expected = FUNCTIONS[name]
    made, s = score(function), tile(dtype)
    for h in range(NHEADS):
        found = made(s, 0, h, Q, K)
        assert found.dtype == dtype
        torch.testing.assert_close(found.expand(S, S), expected(s, h), rtol=1e-6, atol=1e-6)


@given(text=scores.functions())
@settings(max_examples=150, deadline=None, database=None)
def test_any_expression_is_what_torch_says(text):
    s = torch.randn(scores.SHAPE, dtype=torch.float64)
    found = scores.traced(text)(s, *scores.grid()).expand(scores.SHAPE)
    torch.testing.assert_close(found, scores.truth(text, s), rtol=1e-10, atol=1e-10)


def test_precision_is_that_of_kernels_or_better():
    half = torch.full((1,), 1.001, dtype=torch.bfloat16)
    made = score(lambda s, b, h, q, k: s + half[0] * half[0])
    found = made(torch.zeros(1, dtype=torch.bfloat16), 0, 0, 0, 0)
    assert found.dtype == torch.float32 and found.item() == float(half) ** 2
    third = score(lambda s, b, h, q, k: s + 1 / (k + 3) + 0.1)
    exact = third(torch.zeros(1, dtype=torch.float64), 0, 0, 0, torch.arange(1))
    assert exact.item() == 1 / 3 + 0.1


def test_equal_functions_have_one_key():
    def capped(cap):
        return score(lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap))

    assert capped(30.0).key == capped(30.0).key != capped(31.0).key
    assert alibi(SLOPES).key == alibi(SLOPES.clone()).key != alibi(SLOPES.half()).key
    zeros = [score(lambda s, b, h, q, k, z=z: s * z).key for z in (0.0, -0.0)]
    assert zeros[0] != zeros[1]
    assert re.fullmatch("score_[0-9a-f]{24}", capped(30.0).key)
    assert expressions.lookup(alibi(SLOPES).key) == alibi(SLOPES).expr


def test_score_functions_inside_score_functions():
    base = score(lambda s, b, h, q, k: BIAS[h, q, k] - s)
    both = score(lambda s, b, h, q, k: alibi(SLOPES)(softcapped(2)(s, b, h, q, k), b, 1, q, k))
    masked = score(
        lambda s, b, h, q, k: torch.where(
            (causal() & document(DOC))(b, h, q, k), base(s, b, h, k, q), -math.inf
        )
    )
    s, h = tile(), 2
    expected = 2 * torch.tanh(s / 2) + SLOPES[1] * (K - Q)
    torch.testing.assert_close(both(s, 0, h, Q, K), expected)
    seen = (Q >= K) & (DOC[:, None] == DOC)
    expected = torch.where(seen, BIAS[h].T - s, -math.inf)
    torch.testing.assert_close(masked(s, 0, h, Q, K), expected)
    assert [x is y for x, y in zip(masked.tensors, (DOC, BIAS), strict=True)] == [True, True]


def test_gradients_reach_captured_tensors():
    bias = BIAS.clone().requires_grad_()
    made = score(lambda s, b, h, q, k: s * bias[h, q, k])
    made(tile(), 0, 1, Q, K).sum().backward()
    assert torch.equal(bias.grad[1], tile()) and not bias.grad[[0, 2]].any()


def test_a_derivative_that_was_given():
    table = torch.tensor(3.0)
    made = score(
        lambda s, b, h, q, k: s + BIAS[h, q, k],
        derivative=lambda s, b, h, q, k: table * BIAS[h, q, k],
    )
    assert [x is y for x, y in zip(made.tensors, (BIAS, table), strict=True)] == [True, True]
    assert made.derivative.tensors == made.tensors
    assert torch.equal(made.derivative(tile(), 0, 1, Q, K), 3 * BIAS[1])
    moved = made.to("meta")
    assert moved.derivative.key == made.derivative.key and moved.device().type == "meta"
    given = score(made, derivative=lambda s, b, h, q, k: 0 * s)
    assert given.key == made.key and given.derivative.key != made.derivative.key
    assert score(made) is made


def test_tensors_that_are_too_short():
    with pytest.raises(ArgumentError, match=r"score function reads t0\[h\].*nheads is 4"):
        check_sizes(alibi(SLOPES), (1, 4, 8, 8))
    check_sizes(relative_bias(BIAS[:, 0, :5]), (1, 3, 99, 99))
    given = score(lambda s, b, h, q, k: s, derivative=lambda s, b, h, q, k: 1.0 + SLOPES[q])
    with pytest.raises(ArgumentError, match=r"t0\[q_idx\].*seqlen_q is 4"):
        check_sizes(given, (1, 1, 4, 4))


UNTRACEABLE = {
    "and": (lambda s, b, h, q, k: s > 1 and q > 2, "truth of (1 < score)", "&, | and ~"),
    "int": (lambda s, b, h, q, k: q - k, "which is int: it must return a float", "multiply it by"),
    "bool": (lambda s, b, h, q, k: q < k, "which is bool: it must return a float", "choose with"),
    "//": (lambda s, b, h, q, k: s // 2, "`//` does not take score (float) and 2", "floats out of"),
    "%": (lambda s, b, h, q, k: s % 2, "`%` does not take score", "in a score function"),
    "**": (lambda s, b, h, q, k: s + 3**q, "torch's `pow` of q_idx", "one of them a float"),
    "index": (lambda s, b, h, q, k: SLOPES[s], "indexed by score", "use integers"),
    "method": (lambda s, b, h, q, k: s.lgamma(), "`.lgamma` of score", "a score function may use"),
    "in place": (lambda s, b, h, q, k: s.relu_(), "`.relu_` of score", "a score function may use"),
    "half": (lambda s, b, h, q, k: s.to(torch.half), "`to` of score", "use .float() or .long()"),
    "torch": (lambda s, b, h, q, k: torch.lgamma(s), "torch's `lgamma` of score", "gelu and"),
    "part": (lambda s, b, h, q, k: s + BIAS[h], "is indexed by 1", "one index for each dimension"),
    "keyword": (lambda s, b, h, q, k: torch.round(s, decimals=2), "torch's `round`", "scale what"),
    "bool as a number": (lambda s, b, h, q, k: s - (q < k), "`-` does not take", "where(x, 1, 0)"),
    "arguments": (
        lambda b, h, q, k: 1.0,
        "score function <lambda> cannot",
        "(score, b, h, q_idx, k",
    ),
    "whole": (lambda s, b, h, q, k: s + SLOPES, "operand in a score function", "like doc[q_idx]"),
    "text": (lambda s, b, h, q, k: s + "a", "'a' (str)", "a score function may use"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_is_refused_is_named_with_a_remedy(name):
    function, named, remedy = UNTRACEABLE[name]
    with pytest.raises(ArgumentError) as raised:
        score(function)
    assert named in str(raised.value) and remedy in str(raised.value), raised.value
    assert "mask" not in str(raised.value)


BAD = {
    "not a function": (lambda: score(3), "score_mod is an int: it must be a function of"),
    "derivative": (lambda: score(alibi(SLOPES), 3), "derivative is an int: it must be a function"),
    "slopes": (lambda: alibi([1.0]), "slopes is a list: it must be a float torch.Tensor"),
    "slopes dtype": (lambda: alibi(DOC), r"slopes.dtype is torch.int32.*slopes.float\(\)"),
    "slopes shape": (lambda: alibi(BIAS), r"slopes has shape \(3, 6, 6\): it must be \(nheads,\)"),
    "cap": (lambda: softcapped("1"), "cap is a str: it must be a number"),
    "cap below": (lambda: softcapped(0), "cap=0: it must be positive"),
    "table": (lambda: relative_bias(BIAS[0]), r"table has shape \(6, 6\).*as many"),
    "devices": (
        lambda: score(lambda s, b, h, q, k: s + SLOPES[h] + CAP.to("meta")).device(),
        "cpu, meta",
    ),
    "asked": (lambda: alibi(SLOPES).device("cuda"), r'score function captured.*score.to\("cuda"\)'),
    "in a mask": (
        lambda: mask(lambda b, h, q, k: softcapped(3)(q, b, h, q, k) > 1),
        "has no meaning in a mask: divide with //",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    make, message = BAD[name]
    with pytest.raises(ArgumentError, match=message):
        make()


def test_what_is_computed_twice_is_one_step():
    made = score(lambda s, b, h, q, k: torch.tanh(s + q) * torch.tanh(s + q) + (s + q))
    assert [node.op for node in expressions.nodes_of(made.expr)] == [
        *("score", "q_idx", "+", "tanh", "*", "+")
    ]
    found = evaluate(made.expr, 0, 0, Q, K, (), tile())
    torch.testing.assert_close(found, torch.tanh(tile() + Q) ** 2 + tile() + Q)
