"""The operators stand up to torch's own checks, and every mode that watches or rewrites them."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from helpers.tiers import sample, sample_rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tilewise.ops.flops import visible_pairs

FORWARD = torch.ops.tilewise.flash_attn_forward.default
BACKWARD = torch.ops.tilewise.flash_attn_backward.default
PROBLEMS = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (3, 1)},
    "heads first": {"layout": "bhsd", "causal": True},
    "every feature": {
        "causal": True,
        "window": (4, None),
        "softcap": 5.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]),
        "sinks": torch.tensor([0.3, -1.0, 0.0, 2.0]),
        "seqused_k": torch.tensor([9, 4], dtype=torch.int32),
        "deterministic": True,
    },
}


def qkv(layout="bshd", dtype=torch.float32, headdim_v=8):
    q, k = torch.randn(2, 6, 4, 16, dtype=dtype), torch.randn(2, 9, 2, 16, dtype=dtype)
    tensors = q, k, torch.randn(2, 9, 2, headdim_v, dtype=dtype)
    return [(x if layout == "bshd" else x.transpose(1, 2)).requires_grad_() for x in tensors]


def captured(op, name: str):
    """The arguments with which the operator is called for a problem, forward and backward."""

    calls = {}

    class Capture(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (FORWARD, BACKWARD):
                calls[func] = args
            return func(*args, **(kwargs or {}))

    features = PROBLEMS[name]
    with Capture():
        out, lse = tilewise.attention(
            *qkv(features.get("layout", "bshd")), return_lse=True, **features
        )
        (out.sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
    return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in calls[op])


CHECKED = "plain", "heads first", "every feature"


@pytest.mark.parametrize("name", sample(PROBLEMS, *CHECKED))
def test_opcheck_forward(name):
    args = captured(FORWARD, name)
    sinks = args[4]
    for leaf in (*args[:3], *([] if sinks is None else [sinks])):
        leaf.requires_grad_()
    torch.library.opcheck(FORWARD, args)


@pytest.mark.parametrize(
    ("name", "given"),
    sample_rows(
        [*((name, "both") for name in PROBLEMS), ("every feature", "dout")],
        *((name, "both") for name in CHECKED),
        ("every feature", "dout"),
    ),
)
def test_opcheck_backward(name, given):
    dout, dlse, *rest = captured(BACKWARD, name)
    torch.library.opcheck(BACKWARD, (dout, None if given == "dout" else dlse, *rest))


class Count(TorchDispatchMode):
    """How often each of our operators is called."""

    def __init__(self):
        super().__init__()
        self.calls = {FORWARD: 0, BACKWARD: 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.calls:
            self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def brute_pairs(seqlen_q, seqlen_k, left, right, align):
    diagonal = seqlen_k - seqlen_q if align == "bottom_right" else 0
    return sum(
        (left < 0 or i + diagonal - left <= j) and (right < 0 or j <= i + diagonal + right)
        for i in range(seqlen_q)
        for j in range(seqlen_k)
    )


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("sides", [(-1, -1), (-1, 0), (0, -1), (2, 0), (1, 3), (50, 50)], ids=str)
@pytest.mark.parametrize("seqlens", [(5, 5), (3, 8), (8, 3), (0, 4), (4, 0)], ids=str)
def test_visible_pairs_are_counted(seqlens, sides, align):
    assert visible_pairs(*seqlens, *sides, align) == brute_pairs(*seqlens, *sides, align)


@pytest.mark.parametrize("name", ["plain", "causal", "top left", "window", "heads first"])
def test_flops_are_the_formulas(name):
    """Two matmuls forward and five backward, over the pairs that the mask keeps."""
    features = dict(PROBLEMS[name])
    tensors = qkv(features.get("layout", "bshd"))
    sides = {"plain": (-1, -1), "window": (3, 1)}.get(name, (-1, 0))
    align = "top_left" if name == "top left" else "bottom_right"
    work = 2 * 2 * 4 * brute_pairs(6, 9, *sides, align)  # batch 2, 4 heads
    with FlopCounterMode(display=False) as counter:
        out = tilewise.attention(*tensors, **features)
    assert counter.get_total_flops() == work * (16 + 8)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()  # the forward skipped the dispatcher
    assert counter.get_total_flops() == work * (3 * 16 + 2 * 8)


def test_flops_of_what_is_learned():
    """Beside the backward: S and dP of every pair, twice, for delta and then for the gradient."""
    q, k, v = (torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3))
    slopes = torch.ones(2, requires_grad=True)
    out = tilewise.attention(q, k, v, score_mod=tilewise.scores.alibi(slopes))
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    pairs = 2 * 8 * 8
    assert counter.get_total_flops() == 2 * pairs * (5 * 16 + 2 * (16 + 16))


@pytest.mark.parametrize(
    "part",
    ["all", *(pytest.param(x, marks=pytest.mark.slow) for x in ("backward", "imported within"))],
)
def test_flops_of_a_counter_older_than_us(part):
    """A counter copies the formulas when it is made, so the first call under it has to add ours."""
    script = f"""
        import torch
        part = {part!r}
        if part != "imported within":
            import tilewise  # before the counter's own module
        from torch.utils.flop_counter import FlopCounterMode
        q = torch.randn(1, 8, 2, 16, requires_grad=True)
        counter = FlopCounterMode(display=False)
        if part == "backward":
            loss = tilewise.attention(q, q, q).sum()
        with counter:
            import tilewise
            if part != "backward":
                loss = tilewise.attention(q, q, q).sum()
            loss.backward()
        print(counter.get_total_flops())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    matmul = 2 * 2 * 8 * 8 * 16
    assert int(done.stdout) == matmul * (5 if part == "backward" else 7)


@pytest.mark.parametrize("saved", [str(FORWARD), "flash_attn", None])
def test_selective_checkpointing_sees_the_operator(saved):
    """By itself, or by the part of a name that policies for flash attention look for."""
    saves = saved is not None

    def policy(ctx, op, *args, **kwargs):
        keep = saves and saved in str(op)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    tensors = qkv()
    want = torch.autograd.grad(tilewise.attention(*tensors, causal=True).square().sum(), tensors)
    with Count() as count:
        out = checkpoint(
            lambda *t: tilewise.attention(*t, causal=True).square(),
            *tensors,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        got = torch.autograd.grad(out.sum(), tensors)
    assert count.calls == {FORWARD: 1 if saves else 2, BACKWARD: 1}
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    tensors = qkv()
    out = tilewise.attention(*tensors, causal=True)
    out.square().sum().backward()
    want = [x.grad.clone() for x in tensors]
    for x in tensors:
        x.grad = None
    again = checkpoint(
        lambda *t: tilewise.attention(*t, causal=True), *tensors, use_reentrant=use_reentrant
    )
    again.square().sum().backward()
    torch.testing.assert_close(again, out, rtol=0, atol=0)
    torch.testing.assert_close([x.grad for x in tensors], want, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_fake_tensors_tell_shapes_and_strides(layout):
    real = qkv(layout, torch.bfloat16)
    out, lse = tilewise.attention(*real, layout=layout, return_lse=True)
    grads = torch.autograd.grad((out.sum(), lse.sum()), real)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in real]
        fake_out, fake_lse = tilewise.attention(*fake, layout=layout, return_lse=True)
        fake_grads = torch.autograd.grad((fake_out.sum(), fake_lse.sum()), fake)
    for x, y in zip((fake_out, fake_lse, *fake_grads), (out, lse, *grads), strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_a_mode_sees_the_operators_and_changes_no_bit():
    tensors = qkv()
    out = tilewise.attention(*tensors, **PROBLEMS["every feature"])
    want = torch.autograd.grad(out.square().sum(), tensors)
    with Count() as count:
        again = tilewise.attention(*tensors, **PROBLEMS["every feature"])
        got = torch.autograd.grad(again.square().sum(), tensors)
    assert count.calls == {FORWARD: 1, BACKWARD: 1}
    torch.testing.assert_close((again, got), (out, want), rtol=0, atol=0)


def test_a_tensor_subclass_sees_the_operators():
    seen = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    q, k, v = (x.detach() for x in qkv())
    tilewise.attention(q.as_subclass(Logged), k, v)
    assert torch.ops.tilewise.flash_attn_forward in seen


@pytest.mark.parametrize("missing", ["dout", "dlse"])
def test_a_gradient_that_does_not_come_in_counts_as_zero(missing):
    tensors = [*qkv(), torch.randn(4, requires_grad=True)]
    out, lse = tilewise.attention(*tensors[:3], sinks=tensors[3], return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    if missing == "dout":
        got = torch.autograd.grad(lse, tensors, dlse, retain_graph=True)
        dout.zero_()
    else:
        got = torch.autograd.grad(out, tensors, dout, retain_graph=True)
        dlse.zero_()
    torch.testing.assert_close(got, torch.autograd.grad((out, lse), tensors, (dout, dlse)))


@pytest.mark.parametrize("how", ["expanded", "transposed", "sliced"])
def test_gradients_come_in_with_any_strides(how):
    tensors = qkv()
    out, lse = tilewise.attention(*tensors, return_lse=True)
    dout = {
        "expanded": torch.ones(()).expand(out.shape),  # what sum() hands back
        "transposed": torch.randn(out.shape[::-1]).permute(3, 2, 1, 0),
        "sliced": torch.randn(2, 6, 4, 16)[..., ::2],
    }[how]
    dlse = dout[..., 0].transpose(1, 2)
    got = torch.autograd.grad((out, lse), tensors, (dout, dlse), retain_graph=True)
    want = torch.autograd.grad((out, lse), tensors, (dout.contiguous(), dlse.contiguous()))
    torch.testing.assert_close(got, want)


def test_autocast_casts_and_gradients_come_back():
    tensors = [*qkv(), torch.randn(4, requires_grad=True)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = tilewise.attention(*tensors[:3], sinks=tensors[3], return_lse=True)
        dispatched = torch.ops.tilewise.flash_attn_forward(
            *tensors[:3],
            None,
            tensors[3],
            *(None,) * 6,
            [],
            *(0.25, 0.0, -1, -1, 0.0),
            *("bottom_right", False, "", "", "", [0, 0], False, False),
            None,
        )
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(dispatched, (out, lse), rtol=0, atol=0)
    (out.float().sum() + lse.sum()).backward()
    assert [x.grad.dtype for x in tensors] == [torch.float32] * 4
    cast = [x.detach().bfloat16() for x in tensors[:3]]
    want = tilewise.attention(*cast, sinks=tensors[3].detach(), return_lse=True)
    torch.testing.assert_close((out, lse), want, rtol=0, atol=0)  # the sinks stayed fp32


def test_autocast_leaves_fp64_alone():
    tensors = qkv(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tilewise.attention(*tensors).dtype == torch.float64


@pytest.mark.slow
def test_tilewise_imports_after_the_flop_counter():
    """Whose formulas are registered once all operators are there."""
    code = "import torch.utils.flop_counter, tilewise"
    subprocess.run([sys.executable, "-c", code], check=True)
