"""Scale, softcap and other numbers and flags of a call: of every kind, however small or large."""

import contextlib
import fractions
import itertools
import math

import numpy as np
import pytest
import torch
from helpers.tiers import sample_rows

import tilewise
from tilewise import ArgumentError
from tilewise.testing import use_emulator, use_interpreter
from tilewise.testing.tolerance import assert_within

TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max / math.log2(math.e)
LEAST = 2.0**-149  # of all numbers of fp32
HUGE_64 = torch.finfo(torch.float64).max / 1.4

# scale, softcap, and the size of q and k that makes scores of them
SERVED = {
    "smallest scale": (LEAST, None, 1.0),
    "scale of few digits": (TINY / 2, None, 1.0),
    "small scale": (1e-30, None, 1e15),
    "largest scale": (0.99 * HUGE, None, 1e-19),
    "smallest softcap": (1e-7, LEAST, 1.0),
    "small softcap": (1.0, TINY, 1.0),
    "largest softcap": (4.0, HUGE * 0.99, 1.0),
    "both small": (1e-37, 1e-37, 1.0),
    "smallest quotient": (TINY, 1.0, 1.0),
    "quotient of few digits": (TINY, 1e9, 1.0),
    "largest quotient": (2.7, TINY, 1e-19),
}
REFUSED = {
    "scale lost in fp32": (1e-46, None),
    "scale past fp32": (1e39, None),
    "scale past fp32 times log2(e)": (HUGE * 1.01, None),
    "softcap lost in fp32": (0.1, 1e-46),
    "softcap of few digits, quotient past fp32": (0.1, 1e-40),
    "softcap past fp32": (0.1, 3.5e38),
    "softcap past fp32 times log2(e)": (100.0, HUGE * 1.01),
    "quotient past fp32": (1e20, 1e-20),
    "quotient lost in fp32": (1e-20, 1e30),
}


@contextlib.contextmanager
def on(backend):
    modes = {"cpu": contextlib.nullcontext, "portable": use_interpreter, "hopper": use_emulator}
    with modes[backend]():
        yield torch.bfloat16 if backend == "hopper" else torch.float32


def outcome(attend, tensors, dout, **asked):
    """out, and the gradients of q and k."""
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    out = attend(q, k, v, **asked)
    dq, dk = torch.autograd.grad(out, (q, k), dout.to(out.dtype))
    return out.detach(), dq, dk


# Each end on the CPU, and in one kind of kernels
ENDS = list(itertools.product(SERVED, ("cpu", "portable", "hopper")))
FEW = [x for at, x in enumerate(ENDS) if x[1] == "cpu" or at % 2]


@pytest.mark.parametrize("name, backend", sample_rows(ENDS, *FEW))
def test_the_ends_of_the_range_are_right(name, backend):
    scale, softcap, size = SERVED[name]
    if backend == "portable" and min(scale, softcap or 1.0, scale / (softcap or 1.0)) < TINY:
        pytest.skip("Triton's interpreter takes a subnormal number for fp64, as no GPU does")
    asked = dict(scale=scale, softcap=softcap, causal=True)
    with on(backend) as dtype:
        q, k, v, dout = torch.randn(4, 1, 20, 2, 64).mul_(0.5).unbind(0)
        tensors = [x.to(dtype) for x in (q * size, k * size, v)]
        found = outcome(tilewise.attention, tensors, dout.to(dtype), backend=backend, **asked)
    plain = outcome(tilewise.attention_reference, tensors, dout.to(dtype), upcast=False, **asked)
    doubles = [x.double() for x in tensors]
    exact = outcome(tilewise.attention_reference, doubles, dout.to(dtype).double(), **asked)
    if backend != "portable" or not softcap:  # tanh there has an error of its own
        assert_within(found[0], exact[0], plain[0], "out")
    for x, want in zip(found, exact):
        assert not x.isnan().any()
        is_small = backend == "portable" and softcap and softcap > 1e3  # beside the cap: digits go
        if want.abs().max() < torch.finfo(torch.float32).max and not is_small:
            lost = TINY * want.numel() ** 0.5  # what is below fp32's normal numbers
            assert (x.double() - want).norm() <= 2**-6 * want.norm() + lost


@pytest.mark.parametrize("backend", ["cpu", "portable", "hopper"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_precision_does_not_hold_is_refused_by_name(name, backend):
    scale, softcap = REFUSED[name]
    with on(backend) as dtype:
        q = torch.randn(1, 20, 2, 64, dtype=dtype)
        with pytest.raises(ArgumentError, match=r"scale=|softcap=") as refusal:
            tilewise.attention(q, q, q, scale=scale, softcap=softcap, backend=backend)
    assert "torch.float32" in str(refusal.value) and "between" in str(refusal.value)
    with pytest.raises(ArgumentError, match=r"scale=|softcap="):
        tilewise.attention_reference(q, q, q, scale=scale, softcap=softcap)


@pytest.mark.parametrize("name", [*REFUSED, *SERVED])
def test_fp64_holds_more(name):
    scale, softcap = (REFUSED | SERVED)[name][:2]
    asked = dict(scale=scale, softcap=softcap, causal=True)
    q, k, v, dout = torch.randn(4, 1, 20, 2, 64, dtype=torch.float64).unbind(0)
    size = (1.0 / scale) ** 0.5
    tensors = q * size, k * size, v
    found = outcome(tilewise.attention, tensors, dout, **asked)
    want = outcome(tilewise.attention_reference, tensors, dout, **asked)
    for x, y in zip(found, want):
        assert x.isfinite().all()
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9 * y.abs().max().item())


@pytest.mark.parametrize(
    "asked",
    [
        dict(scale=HUGE_64),
        dict(scale=1e200, softcap=1e-200),
        dict(softcap=HUGE_64),
    ],
    ids=str,
)
def test_fp64_has_ends_too(asked):
    q = torch.randn(1, 20, 2, 64, dtype=torch.float64)
    with pytest.raises(ArgumentError, match="torch.float64"):
        tilewise.attention(q, q, q, **asked)


NUMBERS = {
    "an int": 2,
    "numpy's fp32": np.float32(0.25),
    "numpy's fp64": np.float64(0.25),
    "numpy's int": np.int64(2),
    "a fraction": fractions.Fraction(1, 4),
    "a tensor": torch.tensor(0.25),
    "a tensor of one": torch.tensor([0.25]),
}


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_any_kind_are_taken(name, number):
    q, k, v = torch.randn(3, 1, 20, 2, 16).unbind(0)
    for _ in range(2):
        found = tilewise.attention(q, k, v, **{name: number})
        torch.testing.assert_close(found, tilewise.attention(q, k, v, **{name: float(number)}))


def reject():
    """A function."""


NO_NUMBERS = {
    "complex": 1j,
    "an object": object(),
    "bytes": b"1",
    "a function": reject,
    "a bool": True,
    "a string": "0.1",
    "past all floats": 10**400,
    "an array of one": np.array([0.1]),
    "an array of two": np.array([0.1, 0.2]),
    "an array without dimensions": np.array(0.1),
    "a complex tensor": torch.tensor(1j),
    "two numbers": torch.tensor([0.1, 0.2]),
    "a tensor without memory": torch.tensor(0.1, device="meta"),
    "a sparse tensor": torch.tensor([0.1]).to_sparse(),
    "a nested tensor": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
}


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_what_is_no_number_is_refused_by_name(name, value):
    q = torch.randn(1, 20, 2, 16)
    for attend in (tilewise.attention, tilewise.attention, tilewise.attention_reference):
        with pytest.raises(ArgumentError, match=f"(?s)^{name}.*(number|positive)"):
            attend(q, q, q, **{name: value})


NO_FLAGS = {
    "a list": [],
    "a word": "yes",
    "an object": object(),
    "none": None,
    "two": 2,
    "a float": 1.0,
    "an array": np.array([1, 2]),
    "a tensor": torch.tensor([True, False]),
}
OTHERS = {
    "dropout_p none": dict(dropout_p=None),
    "dropout_p false": dict(dropout_p=False),
    "dropout_p a word": dict(dropout_p=""),
    "dropout_p a list": dict(dropout_p=[]),
    "dropout_p an array": dict(dropout_p=np.array([0.0, 0.1])),
    "dropout_p an array of one": dict(dropout_p=np.array([0.1])),
    "dropout_p a tensor": dict(dropout_p=torch.tensor(0.1)),
    "causal an array": dict(causal=np.array([1, 2])),
    "causal one": dict(causal=1),
    "causal a list": dict(causal=[]),
    "backend a list": dict(backend=["cpu"]),
    "backend unknown": dict(backend="fast"),
    "backend a number": dict(backend=1),
    "layout a list": dict(layout=["bshd"]),
    "layout an array": dict(layout=np.array(["bshd", "bhsd"])),
    "window of bools": dict(window=(True, False)),
    "window an array of three": dict(window=np.array([1, 2, 3])),
    "window an array of floats": dict(window=np.array([1.0, 2.0])),
    "window without memory": dict(window=torch.ones(2, dtype=torch.int32, device="meta")),
    "window with a side without memory": dict(window=(torch.tensor(1, device="meta"), 0)),
    "max_seqlen_q of two": dict(max_seqlen_q=torch.tensor([1, 2])),
    "max_seqlen_q a float tensor": dict(max_seqlen_q=torch.tensor(1.5)),
    "max_seqlen_k negative": dict(max_seqlen_k=-1),
    **{f"deterministic {name}": dict(deterministic=x) for name, x in NO_FLAGS.items()},
    **{f"return_lse {name}": dict(return_lse=x) for name, x in NO_FLAGS.items()},
}


@pytest.mark.parametrize("asked", OTHERS.values(), ids=OTHERS)
def test_no_second_call_takes_what_the_first_refused(asked):
    q = torch.randn(1, 20, 2, 16)
    [name] = asked
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"^{name}.*(must|use one)"):
            tilewise.attention(q, q, q, **asked)
        tilewise.attention(q, q, q)  # a call of the same shape is kept


@pytest.mark.parametrize("backend", ["fast", ["cpu"]])
def test_a_backend_is_known_where_nothing_is_computed(backend):
    q = torch.randn(1, 20, 2, 16, device="meta")
    with pytest.raises(ArgumentError, match="backend="):
        tilewise.attention(q, q, q, backend=backend)


def test_what_equals_a_bool_is_a_flag():
    q = torch.randn(1, 20, 2, 16)
    expected = tilewise.attention(q, q, q)
    for flag in (False, 0, np.False_):
        assert torch.equal(tilewise.attention(q, q, q, deterministic=flag), expected)
    for flag in (True, 1, np.True_):
        out, lse = tilewise.attention(q, q, q, deterministic=flag, return_lse=flag)
        assert torch.equal(out, expected) and lse.shape == (1, 2, 20)
