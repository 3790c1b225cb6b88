"""Calls of one signature are checked once; another signature is another call."""

import functools
import gc
import threading
import weakref

import pytest
import torch
from helpers.work import entered

import tilewise
from tilewise import ArgumentError, attention, attention_reference
from tilewise.frontend import call as api
from tilewise.ops import attention as ops
from tilewise.ops import calls


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """The lengths of the calls that were checked, with nothing kept from before."""
    calls._entry.cache_clear()
    found, check = [], api.check
    monkeypatch.setattr(
        api, "check", lambda *x, **y: (found.append(x[0].shape[1]), check(*x, **y))[1]
    )
    return found


def tensors(seqlen=9, headdim=8):
    generator = torch.Generator().manual_seed(seqlen)
    return (torch.randn(2, seqlen, 2, headdim, generator=generator) for _ in range(3))


def test_alike(checked):
    for seed in range(3):
        q, k, v = (x + seed for x in tensors())
        torch.testing.assert_close(attention(q, k, v), attention_reference(q, k, v))
    assert len(checked) == 1


FUNCTIONS = {
    "attention": lambda q, k, v: attention(q, k, v, causal=True),
    "by heads": lambda *x: attention(*(t.transpose(1, 2) for t in x), layout="bhsd"),
    "flash_attn": lambda q, k, v: tilewise.flash_attn_func(q, k, v, 0.0, None, True),
    "sdpa": lambda *x: tilewise.scaled_dot_product_attention(*(t.transpose(1, 2) for t in x)),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_known_call_enters_few_functions(function):
    q, k, v = tensors(32, 32)
    with torch.no_grad():
        FUNCTIONS[function](q, k, v)
        found = entered(lambda: FUNCTIONS[function](q, k, v))
    assert len(found) <= 12, found


def test_a_known_backward_enters_few_functions(monkeypatch):
    """As on a GPU: by its guard, where tensors look as they did and nothing watches."""
    monkeypatch.setattr(ops, "UNGUARDED", frozenset())
    q, k, v = (x.requires_grad_() for x in tensors(32, 32))
    for _ in range(2):
        out = attention(q, k, v, causal=True)
    dense = torch.randn_like(out)
    spread = torch.cat([dense, dense], -1)[..., :32]

    def gradients(dout, **options):
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True, **options)

    def backward(dout):
        return [x.split(":")[1] for x in entered(lambda: gradients(dout), ("kernels/",))]

    want = gradients(dense)
    assert backward(dense) == ["_backward", "recalled_backward", "recall"]
    torch.testing.assert_close(gradients(dense), want, rtol=0, atol=0)
    assert "run_backward" in backward(spread)
    torch.testing.assert_close(gradients(spread), want)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        gradients(spread, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_is_checked_once(function, checked):
    for _ in range(3):
        FUNCTIONS[function](*tensors(32, 32))
    assert len(checked) == 1


def test_whether_a_gradient_is_wanted_tells():
    q, k, v = tensors()
    for wants in (False, True, False, True):
        q.requires_grad_(wants)
        assert attention(q, k, v).requires_grad == wants
        with torch.no_grad():
            assert not attention(q, k, v).requires_grad


def test_autocast_tells():
    q, k, v = tensors(32)
    for _ in range(2):
        assert attention(q, k, v).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert attention(q, k, v).dtype == torch.bfloat16


def test_nothing_is_kept_of_tensors():
    q, k, v = tensors()
    attention(q, k, v, sinks=torch.zeros(2), scale=0.3)
    with pytest.raises(ArgumentError):
        attention(q, k, v, scale=q)
    alive = weakref.ref(q)
    del q, k, v
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "how",
    [
        dict(causal=True),
        dict(causal="top_left"),
        dict(scale=0.1),
        dict(softcap=2.0),
        dict(window=(3, 0)),
        dict(layout="bhsd"),
    ],
    ids=str,
)
def test_every_argument_tells(how):
    q, k, v = tensors()
    attention(q, k, v)
    expected = attention_reference(q, k, v, **how)
    torch.testing.assert_close(attention(q, k, v, **how), expected)


def test_lengths_and_strides_tell():
    q, k, v = tensors()
    attention(q, k, v)
    for other in (k[:, :5], k.transpose(1, 2).contiguous().transpose(1, 2)):
        values = v[:, : other.shape[1]]
        expected = attention_reference(q, other, values)
        torch.testing.assert_close(attention(q, other, values), expected)


def test_errors_stay(checked):
    q, k, v = tensors()
    attention(q, k, v)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="k.dtype"):
            attention(q, k.double(), v)
        with pytest.raises(ArgumentError, match="scale"):
            attention(q, k, v, scale=-1.0)
    assert len(checked) == 5


def test_a_scale_that_can_change_is_not_kept(checked):
    q, k, v = tensors()
    scale = torch.tensor(0.5)
    for factor in (0.5, 2.0):
        scale.fill_(factor)
        expected = attention_reference(q, k, v, scale=factor)
        torch.testing.assert_close(attention(q, k, v, scale=scale), expected)
    assert len(checked) == 2


EXTRAS = {
    "sinks": lambda: dict(sinks=torch.randn(2)),
    "slopes": lambda: dict(alibi_slopes=torch.rand(2)),
    "mask": lambda: dict(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 2),
    "score": lambda: dict(score_mod=lambda score, b, h, q_idx, kv_idx: score + 0.1 * kv_idx),
    "bias": lambda: dict(bias=torch.randn(2, 1, 9, 9)),
    "dropout": lambda: dict(dropout_p=0.3, dropout_rng=torch.tensor([3, 4])),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_extras_of_one_look_are_checked_once(name, checked):
    """And their values are those of each call."""
    q, k, v = tensors()
    attention(q, k, v)
    torch.manual_seed(0)
    for _ in range(2):
        extras = EXTRAS[name]()
        expected = attention_reference(q, k, v, **extras)
        torch.testing.assert_close(attention(q, k, v, **extras), expected)
    assert len(checked) == 2


@pytest.mark.parametrize("name", EXTRAS)
def test_extras_of_another_look_are_checked(name):
    q, k, v = tensors()
    attention(q, k, v, **EXTRAS[name]())
    errors = {
        "sinks": dict(sinks=torch.zeros(3)),
        "slopes": dict(alibi_slopes=torch.ones(2).double()),
        "bias": dict(bias=torch.zeros(2, 1, 9, 8)),
        "dropout": dict(dropout_p=0.3, dropout_rng=torch.zeros(2)),
    }
    if name in errors:
        with pytest.raises(ArgumentError, match=next(reversed(errors[name]))):
            attention(q, k, v, **errors[name])


def test_whether_a_bias_wants_a_gradient_tells():
    q, k, v = tensors()
    bias = torch.randn(1, 2, 9, 9)
    for _ in range(2):
        attention(q, k, v, bias=bias)
        wanting = bias.clone().requires_grad_()
        attention(q, k, v, bias=wanting).sum().backward()
        assert wanting.grad is not None


def test_lengths_whose_values_are_known_are_looked_at_each_time(checked):
    q, k, v = tensors()
    attention(q, k, v, seqused_k=torch.tensor([9, 3], dtype=torch.int32))
    with pytest.raises(ArgumentError, match="seqused_k"):
        attention(q, k, v, seqused_k=torch.tensor([9, 10], dtype=torch.int32))
    assert len(checked) == 1  # all else is known


def test_bounded(monkeypatch, checked):
    """The call that was longest not asked for goes."""
    kept = functools.lru_cache(maxsize=2)(calls._entry.__wrapped__)
    monkeypatch.setattr(calls, "_entry", kept)
    for seqlen in (1, 2, 1, 3, 1, 2):
        attention(*tensors(seqlen))
        assert kept.cache_info().currsize <= 2
    assert checked == [1, 2, 3, 2]


def test_threads_share_what_is_kept(monkeypatch):
    """Few entries and many signatures: what one thread keeps another evicts."""
    kept = functools.lru_cache(maxsize=3)(calls._entry.__wrapped__)
    monkeypatch.setattr(calls, "_entry", kept)
    inputs = {n: [*tensors(n)] for n in range(1, 9)}
    expected = {n: attention_reference(*x) for n, x in inputs.items()}
    wrong = []

    def run(seed):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)) % 8 + 1
        for n in order.tolist():
            q, k, v = (x.clone().requires_grad_() for x in inputs[n])
            out = attention(q, k, v)
            out.sum().backward()
            if not torch.allclose(out, expected[n], atol=1e-5) or q.grad is None:
                wrong.append(n)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
