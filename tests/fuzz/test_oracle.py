"""The oracle: that it shares nothing with the library, and that it is right where others say so."""

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from . import philox
from .reference import Span, Terms, attention

HERE = Path(__file__).parent
OURS = {"reference", "philox", "formulas", "budget"}
F64 = torch.float64


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_oracle_imports_nothing_of_the_library(name):
    """Nor anything else of these tests that could lead there."""
    tree = ast.parse((HERE / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {x.name.split(".")[0] for x in node.names} <= {"math", "torch"}
        elif isinstance(node, ast.ImportFrom):
            allowed = {"__future__", "collections", "typing"} if not node.level else OURS
            assert node.level < 2 and (node.module or "").split(".")[0] in allowed, node.module
        elif isinstance(node, ast.Name):
            assert node.id not in ("__import__", "importlib", "exec", "eval")


# Random123's known answers of Philox4x32, and its first test vector with 7 rounds.
ANSWERS = [
    (10, (0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (7, (0, 0, 0, 0), (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), ANSWERS)
def test_philox_is_philox(rounds, counter, key, expected):
    words = ((torch.tensor(x) for x in y) for y in (counter, key))
    found = philox.philox(*map(tuple, words), rounds=rounds)
    assert " ".join(f"{x.item():08x}" for x in found) == expected


def tensors(queries=9, keys=13, nheads=4, nheads_k=2):
    return {
        "q": torch.randn(queries, nheads, 8, dtype=F64),
        "k": torch.randn(keys, nheads_k, 8, dtype=F64),
        "v": torch.randn(keys, nheads_k, 6, dtype=F64),
    }


def by_torch(given, **how):
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in given.values())
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("top_left", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_it_is_torchs_attention(top_left, is_causal):
    given = tensors(13 if is_causal and not top_left else 9)
    terms = Terms(0.3, top_left, right=0 if is_causal else None)
    found = attention(given, [Span(0, 0, given["q"].shape[0], 0, 13)], terms)
    expected = by_torch(given, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(found.out, expected, rtol=1e-12, atol=1e-12)


def test_it_is_the_formula_pair_by_pair():
    """Everything at once, in Python's own numbers."""
    given = tensors() | {
        "slopes": torch.rand(4, dtype=F64),
        "sinks": torch.randn(4, dtype=F64),
        "bias": torch.randn(1, 4, 9, 13, dtype=F64),
    }
    terms = Terms(0.3, False, 6, 2, 1.5, dropout_p=0.3, rng=torch.tensor([5, 6]))
    terms = terms._replace(
        score=lambda t, s, b, h, i, j: s * 2 + h, mask=lambda t, b, h, i, j: (i + j) % 3 != 0
    )
    found = attention(given, [Span(0, 0, 9, 0, 13)], terms)
    h, i = 3, 4
    scores = {}
    for j in range(13):
        at = i + 13 - 9
        if at - 6 <= j <= at + 2 and (i + j) % 3 != 0:
            s = 0.3 * (given["q"][i, h] @ given["k"][j, 1])
            s = 2 * (1.5 * torch.tanh(s / 1.5)) + h
            scores[j] = s - given["slopes"][h] * abs(at - j) + given["bias"][0, h, i, j]
    total = torch.exp(given["sinks"][h]) + sum(map(torch.exp, scores.values()))
    torch.testing.assert_close(found.lse[h, i], total.log())
    kept = philox.kept(terms.rng, 0, torch.arange(4), torch.arange(9), torch.arange(13), 0.3)[h, i]
    weights = {j: (s.exp() / total * 256 / (256 - 77)) * kept[j] for j, s in scores.items()}
    out = sum(p * given["v"][j, 1] for j, p in weights.items())
    assert 0 < sum(kept[j] for j in scores) < len(scores)
    torch.testing.assert_close(found.out[i, h], out)


def test_gradients_are_those_of_differences():
    given = {name: x.requires_grad_() for name, x in tensors(4, 5).items()}
    given["sinks"] = torch.randn(4, dtype=F64, requires_grad=True)

    def both(*inputs):
        spans = [Span(0, 0, 2, 0, 0), Span(1, 2, 2, 1, 4)]
        result = attention(dict(zip(given, inputs)), spans, Terms(0.5, right=0))
        return result.out, result.lse

    assert torch.autograd.gradcheck(both, tuple(given.values()))
