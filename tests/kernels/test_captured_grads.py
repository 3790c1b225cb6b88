"""Gradients of what score functions captured, against torch's autograd in fp64."""

import itertools

import pytest
import torch
from helpers.tiers import sample_rows
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import mods, scores
from tilewise.mods import maximum, minimum
from tilewise.sparse import create_block_mask
from tilewise.testing import use_emulator, use_interpreter

SEQLEN_Q, SEQLEN_K = 70, 90
DOCUMENTS = torch.arange(128).div(30, rounding_mode="floor").int()


def tensor(*shape):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator) / 2


# What is learned, and the function of it.
LEARNED = {
    "slope of a head": (
        tensor(4),
        lambda t: lambda s, b, h, q, k: s + t[h] * (k - q) * 0.1,
    ),
    "table of distances": (
        tensor(4, 33),
        lambda t: lambda s, b, h, q, k: s + t[h, minimum(maximum(k - q + 16, 0), 32)],
    ),
    "from the end": (tensor(90), lambda t: lambda s, b, h, q, k: s + t[k - q]),
    "pairs": (tensor(70, 90), lambda t: lambda s, b, h, q, k: s * (1 + t[q, k])),
    "queries": (tensor(2, 70), lambda t: lambda s, b, h, q, k: s + t[b, q] * s),
    "keys": (tensor(4, 90), lambda t: lambda s, b, h, q, k: torch.tanh(s + t[h, k])),
    "one number": (tensor(1)[0], lambda t: lambda s, b, h, q, k: s * torch.exp(t)),
    "twice": (tensor(90), lambda t: lambda s, b, h, q, k: s + t[k] * t[q] + t[k] * 0.5),
    "documents": (
        tensor(9),
        lambda t: (
            lambda s, b, h, q, k: torch.where(DOCUMENTS[q] == DOCUMENTS[k], s, t[DOCUMENTS[k]])
        ),
    ),
    "hiding": (
        tensor(90),
        lambda t: lambda s, b, h, q, k: torch.where(k <= q + 25, s + t[k], -float("inf")),
    ),
}


def inputs(seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K, batch=2, headdim=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, seqlen_q, 4, headdim, generator=generator).to(dtype)
    k, v = torch.randn(2, batch, seqlen_k, 2, headdim, generator=generator).to(dtype)
    return q, k, v


def run(attend, given, learned, make, dtype, **asked):
    """Gradients of q and of what is learned."""
    q, k, v = (x.detach().to(dtype) for x in given)
    leaf = learned.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    q.requires_grad_()
    out, lse = attend(q, k, v, score_mod=make(leaf), return_lse=True, **asked)
    generator = torch.Generator().manual_seed(1)
    douts = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, lse)]
    lse = lse.masked_fill(lse == -float("inf"), 0)
    return torch.autograd.grad((out, lse), (q, leaf), douts)


def check(backend, given, learned, make, tolerance=2e-5, dtype=torch.float32, **asked):
    exact = run(tilewise.attention_reference, given, learned, make, torch.float64, **asked)
    with use_interpreter(), use_emulator():
        got = run(tilewise.attention, given, learned, make, dtype, backend=backend, **asked)
    for x, y in zip(got, exact):
        assert x.shape == y.shape
        scale = y.abs().max()
        torch.testing.assert_close(x.double() / scale, y / scale, rtol=0, atol=tolerance)


def on_backends(names, *fast):
    """Every name on the CPU; in the interpreter, which takes seconds, only the fast ones."""
    rows = itertools.product(names, ("cpu", "portable"))
    quick = [(name, "cpu") for name in names] + [(name, "portable") for name in fast]
    return pytest.mark.parametrize(("name", "backend"), sample_rows(rows, *quick))


@on_backends(LEARNED, "table of distances", "one number", "hiding", "from the end")
def test_gradients(name, backend):
    check(backend, inputs(), *LEARNED[name])


ASKED = {
    "causal": dict(causal=True),
    "window": dict(window=(20, 3)),
    "softcap": dict(softcap=2.0),
    "seqused_k": dict(seqused_k=torch.tensor([90, 41], dtype=torch.int32)),
    "dropout": dict(dropout_p=0.25, dropout_rng=torch.tensor([5, 9])),
    "mask": dict(mask_mod=lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k]),
    "bias": dict(bias=torch.linspace(-1, 1, 90).view(1, 1, 1, 90)),
    "bhsd": dict(layout="bhsd"),
}


@on_backends(ASKED, "window", "softcap")
def test_beside_other_features(name, backend):
    given, asked = inputs(), ASKED[name]
    if "layout" in asked:
        given = [x.transpose(1, 2) for x in given]
    learned, make = LEARNED["table of distances"]

    def run_with_bias(attend):
        def attend_as(q, *rest, **how):
            if "bias" in how:
                how["bias"] = how["bias"].to(q.dtype)
            return attend(q, *rest, **how)

        return attend_as

    exact = run(
        run_with_bias(tilewise.attention_reference), given, learned, make, torch.float64, **asked
    )
    with use_interpreter():
        got = run(tilewise.attention, given, learned, make, torch.float32, backend=backend, **asked)
    for x, y in zip(got, exact):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "portable"])
def test_block_mask(backend):
    causal = mods.causal(SEQLEN_K - SEQLEN_Q)
    blocks = create_block_mask(causal, 1, 1, SEQLEN_Q, SEQLEN_K, block=(32, 32))
    check(backend, inputs(), *LEARNED["table of distances"], block_mask=blocks)


OF_SEQUENCES = ("slope of a head", "table of distances", "queries", "keys")


@on_backends(OF_SEQUENCES, "queries")
def test_packed_sequences(name, backend):
    starts = torch.tensor([0, 31, 31, 70], dtype=torch.int32)
    keys = torch.tensor([0, 40, 50, 90], dtype=torch.int32)
    given = [x[0] for x in inputs(batch=1)]
    learned, make = LEARNED[name]
    learned = tensor(3, 70) if name == "queries" else learned
    check(backend, given, learned, make, cu_seqlens_q=starts, cu_seqlens_k=keys)


@pytest.mark.emulator
@pytest.mark.parametrize("packed", [False, True])
def test_hopper(packed):
    given = inputs(130, 130, batch=1, headdim=64, dtype=torch.float16)
    asked = dict(causal=True)
    if packed:
        given = [x[0] for x in given]
        starts = torch.tensor([0, 50, 130], dtype=torch.int32)
        asked |= dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
    check("hopper", given, *LEARNED["table of distances"], 2e-2, torch.float16, **asked)


def test_half_precision_leaf_keeps_its_dtype_and_stride():
    q, k, v = inputs(8, 8)
    table = torch.zeros(5, 4, dtype=torch.bfloat16).T.requires_grad_()  # (4, 5), not contiguous
    out = tilewise.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, (i + j) % 5])
    (grad,) = torch.autograd.grad(out.square().sum(), table)
    assert grad.dtype == torch.bfloat16 and grad.shape == table.shape
    assert grad.abs().sum() > 0


def test_only_what_wants_a_gradient_gets_one():
    q, k, v = inputs(8, 8)
    fixed, learned = torch.ones(4), torch.ones(4, requires_grad=True)
    out = tilewise.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * fixed[h] + learned[h] * i)
    out.square().sum().backward()  # the softmax does not see what is added to a whole row
    torch.testing.assert_close(learned.grad, torch.zeros(4), rtol=0, atol=1e-4)
    assert fixed.grad is None


def test_mask_captures_get_none():
    q, k, v = inputs(8, 8)
    limit = torch.full((4,), 5.0, requires_grad=True)
    q.requires_grad_()
    out = tilewise.attention(q, k, v, mask_mod=lambda b, h, i, j: j < limit[h])
    out.sum().backward()
    assert limit.grad is None and q.grad is not None


def test_one_tensor_of_two_functions():
    q, k, v = inputs(8, 8)
    t = torch.linspace(-1, 1, 8).requires_grad_()
    asked = dict(
        mask_mod=lambda b, h, i, j: j <= i + t[j], score_mod=lambda s, b, h, i, j: s * t[j]
    )
    (got,) = torch.autograd.grad(tilewise.attention(q, k, v, **asked).square().sum(), t)
    exact = tilewise.attention_reference(q.double(), k.double(), v.double(), **asked)
    (want,) = torch.autograd.grad(exact.square().sum(), t)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class Tilted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(tensor(4, 33))
        self.relative = scores.relative_bias(self.table)

    def forward(self, q, k, v):
        return tilewise.attention(q, k, v, score_mod=self.relative)


def test_compiled_and_checkpointed_modules_learn_the_same():
    given, module = inputs(16, 16), Tilted()

    def grad(forward):
        module.table.grad = None
        forward(*given).square().sum().backward()
        return module.table.grad

    plain = grad(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(grad(compiled), plain)
    again = grad(lambda *x: checkpoint(module, *x, use_reentrant=False))
    torch.testing.assert_close(again, plain)


def test_functional_gradients():
    q, k, v = inputs(8, 8)
    make = LEARNED["slope of a head"][1]

    def loss(slopes):
        return tilewise.attention(q, k, v, score_mod=make(slopes)).square().sum()

    slopes = LEARNED["slope of a head"][0]
    leaf = slopes.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(slopes), want)


def test_second_derivatives_are_refused():
    q, k, v = inputs(8, 8)
    learned, make = LEARNED["slope of a head"]
    leaf = learned.clone().requires_grad_()
    out = tilewise.attention(q, k, v, score_mod=make(leaf))
    (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        grad.sum().backward()
