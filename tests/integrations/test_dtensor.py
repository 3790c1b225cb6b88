"""DTensor: sharded by batch or heads, attention gives the whole tensors' results and gradients."""

import functools

import pytest
import torch
from helpers.processes import run

import tilewise

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch has no distributed here", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

from tilewise.ops import sharding  # noqa: E402

WORLD = 2
BATCH, SEQLEN_Q, SEQLEN_K, NHEADS, HEADDIM = 4, 24, 40, 8, 16


def test_registers_once_and_says_so():
    assert sharding.register() is True
    assert sharding.register() is True


def test_without_distributed_nothing_is_registered(monkeypatch):
    monkeypatch.setattr(sharding, "_registered", False)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert sharding.register() is False


def test_a_moved_experimental_api_is_no_error(monkeypatch):
    import torch.distributed.tensor.experimental as experimental

    monkeypatch.setattr(sharding, "_registered", False)
    monkeypatch.delattr(experimental, "register_sharding")
    assert sharding.register() is False


@pytest.mark.parametrize(
    ("nheads", "nheads_k", "mesh", "whole"),
    [
        (6, 6, (4,), True),  # uneven, but no groups to tear
        (8, 2, (2,), True),
        (8, 2, (4,), True),  # more cuts than key heads: torch itself finds k unshardable
        (6, 3, (2,), False),  # 3 query heads here would meet 2 key heads there
        (12, 6, (2, 4), False),  # 4 cuts of 6
        (16, 8, (2, 4), True),
    ],
)
def test_heads_are_cut_between_groups(nheads, nheads_k, mesh, whole):
    assert sharding._groups_stay_whole(nheads, nheads_k, mesh) is whole


def _on_a_mesh(rank: int, *jobs) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    for job in jobs:
        job(mesh)


def _inputs(nheads_k: int, slopes: str = "", sinks: bool = False, used: bool = False):
    generator = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator)
    q = normal(BATCH, SEQLEN_Q, NHEADS, HEADDIM)
    k, v = normal(2, BATCH, SEQLEN_K, nheads_k, HEADDIM).unbind(0)
    shape = {"": None, "heads": (NHEADS,), "batch": (BATCH, NHEADS)}[slopes]
    extras = {
        "alibi_slopes": None if shape is None else torch.rand(shape, generator=generator),
        "sinks": normal(NHEADS) if sinks else None,
        "seqused_k": torch.tensor([40, 3, 0, 17], dtype=torch.int32) if used else None,
    }
    return (q, k, v), extras, normal(BATCH, SEQLEN_Q, NHEADS, HEADDIM), normal(BATCH, NHEADS, 24)


def _leaf(x):
    return None if x is None else x.detach().requires_grad_(x.is_floating_point())


def _attend(qkv, extras, call, scale=None):
    return call(*qkv, **extras, scale=scale, causal=True, return_lse=True)


def _wanted(qkv, extras, dout, dlse, scale=None):
    """out, lse and gradients of the whole tensors."""
    qkv = [_leaf(x) for x in qkv]
    extras = {**extras, "sinks": _leaf(extras["sinks"])}
    out, lse = _attend(qkv, extras, tilewise.attention, scale)
    leaves = [*qkv, *([] if extras["sinks"] is None else [extras["sinks"]])]
    finite = lse.isfinite()
    ((out * dout).sum() + (lse * dlse)[finite].sum()).backward()
    return out.detach(), lse.detach(), [x.grad for x in leaves]


def _sharded(mesh, qkv, extras, dout, dlse, places: dict):
    """The same from DTensors; the gradient comes in through autograd.grad with DTensors."""
    qkv = [_leaf(distribute_tensor(x, mesh, [places[n]])) for n, x in zip("qkv", qkv, strict=True)]
    placed = {
        name: None if x is None else distribute_tensor(x, mesh, [places[name]])
        for name, x in extras.items()
    }
    placed["sinks"] = _leaf(placed["sinks"])
    out, lse = _attend(qkv, placed, tilewise.attention)
    leaves = [*qkv, *([] if placed["sinks"] is None else [placed["sinks"]])]
    given = [distribute_tensor(x, mesh, [Replicate()]) for x in (dout, dlse)]
    given[1] = torch.where(lse.detach() > -torch.inf, given[1], torch.zeros_like(given[1]))
    return out, lse, torch.autograd.grad((out, lse), leaves, given)


def _check(got, wanted) -> None:
    out, lse, grads = got
    torch.testing.assert_close(out.full_tensor(), wanted[0], rtol=0, atol=0)
    torch.testing.assert_close(lse.full_tensor(), wanted[1], rtol=0, atol=0)
    assert len(grads) == len(wanted[2])
    for grad, want in zip(grads, wanted[2], strict=True):
        torch.testing.assert_close(grad.full_tensor(), want, rtol=1e-5, atol=1e-5)


BY_BATCH = dict.fromkeys(["q", "k", "v", "seqused_k"], Shard(0)) | {
    "alibi_slopes": Shard(0),
    "sinks": Replicate(),
}
BY_HEAD = dict.fromkeys("qkv", Shard(2)) | {
    "alibi_slopes": Shard(0),
    "sinks": Shard(0),
    "seqused_k": Replicate(),
}


def _features_job(mesh) -> None:
    """Every optional tensor, both ways."""
    for ways, slopes in [(BY_BATCH, "heads"), (BY_BATCH, "batch"), (BY_HEAD, "heads")]:
        inputs = _inputs(2, slopes, sinks=True, used=True)
        places = ways | (
            {"alibi_slopes": Replicate()} if (ways, slopes) == (BY_BATCH, "heads") else {}
        )
        out, lse, grads = got = _sharded(mesh, *inputs, places)
        _check(got, _wanted(*inputs))
        assert out.placements == (places["q"],)
        assert lse.placements == (Shard(0 if ways is BY_BATCH else 1),)
        assert [x.placements for x in grads[:3]] == [(places["q"],)] * 3
        # A sink is shared by the batch, so each half of the batch has a part of its gradient.
        assert grads[3].placements == (Partial() if ways is BY_BATCH else Shard(0),)
    inputs = _inputs(2, "batch", sinks=True)
    _check(_sharded(mesh, *inputs, BY_HEAD | {"alibi_slopes": Shard(1)}), _wanted(*inputs))


def _redistribution_job(mesh) -> None:
    inputs = _inputs(NHEADS)
    for places in [
        BY_BATCH | {"q": Shard(1)},  # a sharded sequence
        dict.fromkeys("qkv", Shard(1)),
        BY_HEAD | {"q": Shard(3)},  # a sharded headdim
        BY_HEAD | {"k": Replicate()},
        dict.fromkeys("qkv", Replicate()),
    ]:
        _check(_sharded(mesh, *inputs, places), _wanted(*inputs))
    # The rules are cached by placement: a second call with other scalars keeps its own.
    q, k, v = (distribute_tensor(x, mesh, [Shard(1)]) for x in inputs[0])
    for scale in (0.1, 0.9):
        want = tilewise.attention(*inputs[0], scale=scale)
        got = tilewise.attention(q, k, v, scale=scale).full_tensor()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def _torn_groups_job(mesh) -> None:
    """3 key heads on 2 ranks: a cut by heads would tear a group."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 8, 6, 16, generator=generator)
    k, v = torch.randn(2, 2, 8, 3, 16, generator=generator).unbind(0)
    placed = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    got = tilewise.attention(*placed)
    assert isinstance(got, DTensor)
    torch.testing.assert_close(got.full_tensor(), tilewise.attention(q, k, v), rtol=0, atol=0)


def _lse_only_job(mesh) -> None:
    qkv, extras, _, dlse = _inputs(2)
    wanted = [_leaf(x) for x in qkv]
    (_attend(wanted, extras, tilewise.attention)[1] * dlse).sum().backward()
    placed = [_leaf(distribute_tensor(x, mesh, [Shard(0)])) for x in qkv]
    _, lse = _attend(placed, extras, tilewise.attention)
    grads = torch.autograd.grad(
        lse, placed, distribute_tensor(dlse, mesh, [Shard(0)]), allow_unused=True
    )
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.full_tensor(), want.grad, rtol=1e-5, atol=1e-5)


def _indices_job(mesh) -> None:
    """Functions that tell rows of the batch or heads apart count them in the whole."""
    (q, k, v), *_ = _inputs(NHEADS)
    for dim, mask, score in (
        (0, lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 4 * b, None),
        (2, lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 2 * h, None),
        (0, None, lambda s, b, h, q_idx, kv_idx: s * (b + 1)),
        (2, None, lambda s, b, h, q_idx, kv_idx: s * (h + 1)),
    ):
        placed = [_leaf(distribute_tensor(x, mesh, [Shard(dim)])) for x in (q, k, v)]
        whole = [_leaf(x) for x in (q, k, v)]
        got = tilewise.attention(*placed, mask_mod=mask, score_mod=score)
        want = tilewise.attention(*whole, mask_mod=mask, score_mod=score)
        torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=0)
        got.sum().backward(), want.sum().backward()
        for x, y in zip(placed, whole):
            torch.testing.assert_close(x.grad.full_tensor(), y.grad, rtol=1e-5, atol=1e-5)
    # One that does not is sharded as before
    placed = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    cut = tilewise.attention(*placed, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx)
    assert cut.placements == (Shard(2),)


def _dropout_job(mesh) -> None:
    """Ranks with different generators drop the same probabilities, those of rank 0's numbers."""
    (q, k, v), *_ = _inputs(NHEADS)
    calls = {
        "attention": tilewise.attention,
        "flash_attn_func": tilewise.flash_attn_func,
        "scaled_dot_product_attention": lambda *qkv, **options: (
            tilewise.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), **options)
        ),
    }
    for attend in calls.values():
        torch.manual_seed(0)
        want = attend(q, k, v, dropout_p=0.5)
        torch.manual_seed(mesh.get_local_rank())
        placed = [_leaf(distribute_tensor(x, mesh, [Shard(2)])) for x in (q, k, v)]
        torch.manual_seed(mesh.get_local_rank())
        got = attend(*placed, dropout_p=0.5)
        torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=0)
        got.sum().backward()
        assert all(x.grad.full_tensor().isfinite().all() for x in placed)


def test_sharded_attention_is_exact():
    jobs = _features_job, _redistribution_job, _torn_groups_job, _lse_only_job, _indices_job
    jobs = *jobs, _dropout_job
    run(_on_a_mesh, WORLD, *jobs)


def _compiled_job(mesh) -> None:
    inputs = _inputs(2)
    want = _wanted(*inputs)
    placed = [_leaf(distribute_tensor(x, mesh, [Shard(2)])) for x in inputs[0]]
    attend = functools.partial(tilewise.attention, causal=True)
    out = torch.compile(attend, backend="aot_eager", fullgraph=True)(*placed)
    grads = torch.autograd.grad(out, placed, distribute_tensor(inputs[2], mesh, [Shard(2)]))
    plain = [_leaf(x) for x in inputs[0]]
    wanted = torch.autograd.grad(attend(*plain), plain, inputs[2])
    torch.testing.assert_close(out.full_tensor(), want[0], rtol=0, atol=0)
    for grad, w in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.full_tensor(), w, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiled():
    run(_on_a_mesh, WORLD, _compiled_job)
