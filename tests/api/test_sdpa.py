"""`scaled_dot_product_attention` takes what torch's takes, and refuses what it refuses."""

import functools
import re
import sys
import types
import unittest
import warnings

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import tilewise
from tilewise import ArgumentError, errors
from tilewise.ops import attention as ops
from tilewise.problem import Extras
from tilewise.testing.cases import Case, Features, Sizes
from tilewise.testing.inputs import Inputs
from tilewise.testing.run import standards
from tilewise.testing.tolerance import judge

sdpa = tilewise.scaled_dot_product_attention
FREE = pytest.mark.filterwarnings("ignore::tilewise.PerformanceWarning")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(errors, "_said", set())


def seeded():
    return torch.Generator().manual_seed(1)


def run(attend, tensors, **asked):
    """Out and all gradients."""

    def leaf(x):
        if type(x) is not torch.Tensor or not x.is_floating_point():
            return x
        return x.detach().requires_grad_()

    leaves, asked = [leaf(x) for x in tensors], {name: leaf(x) for name, x in asked.items()}
    out = attend(*leaves, **asked)
    dout = torch.randn(out.shape, generator=seeded()).to(out.dtype)
    wanted = [x for x in (*leaves, *asked.values()) if getattr(x, "requires_grad", False)]
    return out, *torch.autograd.grad(out, wanted, dout)


def check(tensors, **asked):
    """Ours is torch's, which computes in fp64: values, gradients, shapes."""
    tensors = [x.double() for x in tensors]
    ours, theirs = (run(attend, tensors, **asked) for attend in (sdpa, torch_sdpa))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def qkv(*shapes):
    return [torch.randn(shape) for shape in shapes]


SHAPES = {  # of query, key and value
    "rank 2": ((4, 8), (6, 8), (6, 5)),
    "rank 3": ((3, 4, 8), (3, 6, 8), (3, 6, 5)),
    "rank 5": ((2, 3, 2, 4, 8), (2, 3, 2, 6, 8), (2, 3, 2, 6, 8)),
    "query of rank 3": ((2, 4, 8), (3, 2, 6, 8), (3, 2, 6, 8)),
    "key and value of rank 2": ((3, 2, 4, 8), (6, 8), (6, 8)),
    "one batch of keys": ((3, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8)),
    "one batch of queries": ((1, 2, 4, 8), (3, 2, 6, 8), (3, 2, 6, 8)),
    "one head of keys": ((3, 4, 4, 8), (3, 1, 6, 8), (3, 1, 6, 8)),
    "one head of keys alone": ((3, 4, 4, 8), (3, 1, 6, 8), (3, 4, 6, 8)),
    "one head of queries": ((3, 1, 4, 8), (3, 4, 6, 8), (3, 4, 6, 8)),
    "batches of values": ((1, 2, 4, 8), (1, 2, 6, 8), (3, 2, 6, 8)),
    "values of rank 5": ((1, 2, 4, 8), (1, 2, 6, 8), (2, 3, 2, 6, 8)),
    "batches crosswise": ((2, 1, 2, 4, 8), (1, 3, 2, 6, 8), (1, 3, 2, 6, 8)),
    "no heads": ((2, 0, 4, 8), (2, 0, 6, 8), (2, 0, 6, 8)),
    "rank 3 of nothing": ((0, 4, 8), (0, 6, 8), (0, 6, 8)),
    "batch of nothing": ((0, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8)),
    "no columns": ((2, 2, 4, 0), (2, 2, 6, 0), (2, 2, 6, 8)),
    "no columns of value": ((2, 2, 4, 8), (2, 2, 6, 8), (2, 2, 6, 0)),
}


# torch 2.11's own kernel divides by the number of heads, which ends the process
NO_HEADS = pytest.mark.skipif(torch.__version__ < "2.12", reason="no heads end torch 2.11")
CASES = [pytest.param(x, marks=NO_HEADS if x == "no heads" else ()) for x in SHAPES]


@FREE
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_shapes_broadcast_as_in_torch(name, is_causal):
    check(qkv(*SHAPES[name]), is_causal=is_causal)


SHARED = {
    "rank 3": ((4, 4, 8), (2, 6, 8), (2, 6, 8)),
    "rank 5": ((2, 3, 4, 4, 8), (2, 3, 2, 6, 8), (2, 3, 2, 6, 8)),
    "one batch of keys": ((3, 4, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8)),
    "mixed ranks": ((4, 4, 8), (3, 2, 6, 8), (3, 2, 6, 8)),
    "fewer heads of value": ((3, 8, 4, 8), (3, 4, 6, 8), (3, 2, 6, 8)),
    "heads that divide one another not": ((3, 6, 4, 8), (3, 2, 6, 8), (3, 3, 6, 8)),
    "no heads": ((2, 0, 4, 8), (2, 0, 6, 8), (2, 0, 6, 8)),
}


@FREE
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=NO_HEADS if x == "no heads" else ()) for x in SHARED]
)
def test_heads_are_shared_as_in_torch(name):
    check(qkv(*SHARED[name]), enable_gqa=True)


MASKS = [
    ("rank 2", (4, 6)),
    ("rank 2", (6,)),
    ("rank 3", (3, 1, 6)),
    ("rank 5", (2, 3, 2, 4, 6)),
    ("rank 5", (3, 2, 4, 6)),
    ("rank 5", (2, 1, 1, 1, 6)),
    ("rank 5", (4, 6)),
    ("one batch of keys", (3, 1, 4, 6)),
    ("batches of values", (1, 2, 4, 6)),
    ("values of rank 5", (1, 2, 4, 6)),
    ("one head of queries", (3, 4, 4, 6)),
]


@FREE
@pytest.mark.parametrize("is_bool", [True, False])
@pytest.mark.parametrize(("name", "shape"), MASKS)
def test_masks_broadcast_as_in_torch(name, shape, is_bool):
    mask = torch.randn(shape)
    tensors = qkv(*SHAPES[name])
    check(tensors, attn_mask=mask > -1 if is_bool else mask.double())


@pytest.mark.parametrize("is_bool", [True, False])
def test_a_mask_of_no_heads(is_bool):
    """It has a gradient of zeros (torch: none)."""
    q, k, v = (x.requires_grad_() for x in qkv(*SHAPES["no heads"]))
    mask = torch.zeros(4, 6, requires_grad=True)
    out = sdpa(q, k, v, mask > 0 if is_bool else mask)
    assert out.shape == q.shape
    found = torch.autograd.grad(out, [q, k, v, mask], out, allow_unused=True)
    assert all(x is None or not x.any() for x in found)


BIASES = {"upper left": causal_upper_left, "lower right": causal_lower_right}


@FREE
@pytest.mark.parametrize("shapes", [(4, 6), (6, 4), (4, 4)])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("name", BIASES)
def test_causal_biases_are_causal_masks(name, rank, shapes):
    """They hold no numbers: read as a tensor they were whatever lay in memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bias = BIASES[name](*shapes)
    heads = (2, 3, 2)[: rank - 2]
    check(qkv(*((*heads, n, 8) for n in (shapes[0], shapes[1], shapes[1]))), attn_mask=bias)


def test_a_causal_bias_of_other_lengths():
    """An upper-left one counts nothing; a lower-right one does (torch takes a square one)."""
    q, k = qkv((1, 2, 4, 8), (1, 2, 6, 8))
    want = sdpa(q, k, k, is_causal=True)
    assert torch.equal(sdpa(q, k, k, causal_upper_left(3, 3)), want)
    for lengths in ((4, 7), (4, 4)):
        with pytest.raises(ArgumentError, match=r"CausalBias.*causal_lower_right\(4, 6\)"):
            sdpa(q, k, k, causal_lower_right(*lengths))
    with pytest.raises(ArgumentError, match="attn_mask with is_causal"):
        sdpa(q, k, k, causal_lower_right(4, 6), is_causal=True)


def transposed(x):
    return x.mT.contiguous().mT


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_a_last_dimension_that_is_not_contiguous_is_copied_and_said(which):
    tensors = dict(zip(("query", "key", "value"), torch.randn(3, 2, 2, 6, 8)))
    want = sdpa(**tensors)
    tensors[which] = transposed(tensors[which])
    with pytest.warns(tilewise.PerformanceWarning, match=f"^{which} has stride 6.*copies it"):
        got = sdpa(**tensors)
    assert torch.equal(got, want)
    sdpa(**tensors)  # once a process


COPIES = {
    "batches": (SHAPES["batches crosswise"], {}, "^query has 2 batch dimensions"),
    "heads": (SHARED["fewer heads of value"], {"enable_gqa": True}, "^value has 2 heads"),
    "scale": (SHAPES["rank 3"], {"scale": -1.0}, "scale=-1.0.*copies query"),
}


@FREE  # the others are copied, too
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_said(name):
    shapes, asked, said = COPIES[name]
    with pytest.warns(tilewise.PerformanceWarning, match=said):
        sdpa(*qkv(*shapes), **asked)


@pytest.mark.parametrize("name", ["rank 5", "one batch of keys", "one head of queries"])
def test_what_lies_in_order_is_not_copied(name):
    sdpa(*qkv(*SHAPES[name]))  # a PerformanceWarning is an error here


@FREE
@pytest.mark.parametrize("asked", [{"scale": -0.5}, {"scale": 0.0}, {"dropout_p": 1.0}], ids=str)
def test_numbers_at_the_edge(asked):
    check(qkv(*SHAPES["rank 3"]), **asked)


@FREE
def test_a_negative_scale_with_a_causal_mask():
    """Where torch's own CPU kernel gives NaN."""
    q, k, v = (x.double() for x in qkv(*SHAPES["rank 3"]))
    torch.testing.assert_close(
        sdpa(q, k, v, is_causal=True, scale=-0.5), torch_sdpa(-q, k, v, is_causal=True, scale=0.5)
    )


REFUSED = {  # by torch, too
    "rank 1": (((8,), (8,), (8,)), {}),
    "batches": (((2, 2, 4, 8), (3, 2, 6, 8), (3, 2, 6, 8)), {}),
    "heads": (((3, 4, 4, 8), (3, 2, 6, 8), (3, 2, 6, 8)), {}),
    "heads to share": (((3, 6, 4, 8), (3, 4, 6, 8), (3, 4, 6, 8)), {"enable_gqa": True}),
    "rank 2 to share": (((4, 8), (6, 8), (6, 8)), {"enable_gqa": True}),
    "headdim": (((2, 2, 4, 8), (2, 2, 6, 7), (2, 2, 6, 8)), {}),
    "mask of a higher rank": (SHAPES["rank 3"], {"attn_mask": torch.ones(1, 3, 4, 6)}),
    "mask of rank 3 at rank 2": (SHAPES["rank 2"], {"attn_mask": torch.ones(1, 4, 6)}),
    "mask over batches of values": (
        SHAPES["batches of values"],
        {"attn_mask": torch.ones(3, 2, 4, 6)},
    ),
    "mask and is_causal": (
        SHAPES["rank 3"],
        {"attn_mask": torch.ones(4, 6), "is_causal": True},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name):
    shapes, asked = REFUSED[name]
    tensors = qkv(*shapes)
    with pytest.raises((RuntimeError, IndexError)):
        torch_sdpa(*tensors, **asked)
    with pytest.raises(ArgumentError) as refusal:
        sdpa(*tensors, **asked)
    words = "query|key|value|attn_mask"
    assert re.search(words, str(refusal.value)) and re.search(r"\(\d", str(refusal.value) + "(0")


@FREE
def test_odd_shapes_compile():
    """Without a break, and torch.func and vmap pass through them, too."""

    def attend(q, k, v):
        return sdpa(q, k, v, is_causal=True)

    again = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for name in ("rank 2", "rank 5", "one batch of keys"):
        tensors = qkv(*SHAPES[name])
        torch.testing.assert_close(again(*tensors), attend(*tensors))
    q, k, v = qkv((3, 2, 4, 8), (3, 2, 6, 8), (3, 2, 6, 8))
    bias = causal_lower_right(4, 6)
    again = torch.compile(functools.partial(sdpa, attn_mask=bias), backend="aot_eager")
    torch.testing.assert_close(again(q, k, v), sdpa(q, k, v, bias))
    got = torch.func.vmap(attend, (0, None, None))(q, k, v)
    want = torch.stack([attend(x, k, v) for x in q])
    torch.testing.assert_close(got, want)


@pytest.fixture(scope="module")
def opinfo():
    """torch's own samples of the function; what they are made with wants `expecttest`."""
    if "expecttest" not in sys.modules:
        fake = types.ModuleType("expecttest")
        fake.TestCase = unittest.TestCase
        sys.modules["expecttest"] = fake
    from torch.testing._internal.common_methods_invocations import op_db

    return next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")


@FREE
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_samples_of_torchs_own_tests(opinfo, dtype):
    """Held to fp64 by the budget of every kernel; those with dropout, which is drawn otherwise, are
    finite. In fp32 a LSE of 300 is off by 1.5e-5, and so is each probability of its row: a few rows
    of these samples are past a budget that follows the mean.
    """
    count = 0
    for sample in opinfo.sample_inputs("cpu", dtype):
        tensors, asked = (sample.input, *sample.args), sample.kwargs
        count += 1
        if asked["dropout_p"]:
            assert all(x.isfinite().all() for x in run(sdpa, tensors, **asked))
            continue
        results = run(sdpa, tensors, **asked)
        for result, runs in zip(results, budget(tensors, **asked), strict=True):
            exact, *plain = (x.sum_to_size(result.shape) for x in runs)
            verdict = judge(result, exact, *plain)
            if dtype == torch.float32 and not verdict.ok:
                torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-4)
            else:
                assert verdict.ok, verdict
    assert count == 25


def budget(tensors, is_causal, attn_mask=None, dropout_p=0.0):
    """Out and gradients of these inputs, without broadcasting: exact, and by the plain runs."""
    rank = max(x.dim() for x in tensors)
    batch = max(x.shape[0] for x in tensors) if rank == 4 else 1
    q, k, v = (x.expand(batch, *x.shape[-3:]).contiguous() for x in tensors)
    dout = torch.randn((*q.shape[:3], v.shape[3])[4 - rank :], generator=seeded()).to(q.dtype)
    dout = dout.expand(q.shape[0], *dout.shape[-3:])
    bias = None if attn_mask is None else attn_mask[None, None]
    sizes = Sizes(batch, q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3])
    features = Features(causal="top_left" if is_causal else False, layout="bhsd", bias="qk")
    inputs = Inputs(q, k, v, dout, None, Extras(bias=bias))
    runs = standards(Case("a sample", sizes, features), inputs)
    names = ("out", "dq", "dk", "dv", *(() if bias is None else ("dbias",)))
    return [[found[name] for found in runs] for name in names]


@pytest.mark.parametrize("asked", [False, True])
def test_deterministic_gradients_are_asked_for_as_torch_does(monkeypatch, asked):
    found = []
    real = ops.attention
    monkeypatch.setattr(
        ops, "attention", lambda c, *a: (found.append(c.problem.deterministic), real(c, *a))[1]
    )
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(asked)
    try:
        sdpa(*qkv((1, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8)))
        compiled = torch.compile(sdpa, backend="eager", fullgraph=True)
        compiled(*qkv((1, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8)))
    finally:
        torch.use_deterministic_algorithms(was)
    assert found and set(found) == {asked}
