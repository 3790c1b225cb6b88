"""Inside torch's context_parallel, where q, k and v are shards, every way to us is refused."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import tilewise

experimental = pytest.importorskip("torch.distributed.tensor.experimental")
context_parallel = getattr(experimental, "context_parallel", None)
pytestmark = [
    pytest.mark.skipif(context_parallel is None, reason="this torch has no context_parallel"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not here"),
]


@pytest.fixture(scope="module")
def mesh():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def flash(q):
    return tilewise.flash_attn_func(q, q, q, causal=True)


def varlen(q):
    starts = torch.tensor([0, q.shape[1]], dtype=torch.int32)
    return tilewise.flash_attn_varlen_func(q[0], q[0], q[0], starts, starts)


def of_torch(q):
    return tilewise.scaled_dot_product_attention(q, q, q, is_causal=True)


def attend(q):
    return tilewise.attention(q, q, q, causal=True)


CALLS = {
    "attention": attend,
    "flash_attn_func": flash,
    "flash_attn_varlen_func": varlen,
    "scaled_dot_product_attention": of_torch,
    "compiled": torch.compile(attend, backend="eager"),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_refused_inside_and_right_outside(mesh, name, learns):
    q = torch.randn(1, 16, 2, 8, requires_grad=learns)
    before = CALLS[name](q)  # so that the call is kept
    buffer = torch.randn(1, 16, 2, 8)
    for _ in range(2):
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
            with pytest.raises(NotImplementedError, match=r"context_parallel.*call torch"):
                CALLS[name](q)
        torch.testing.assert_close(CALLS[name](q), before)


def test_another_replacement_of_torchs_attention_is_none_of_our_business(monkeypatch):
    q = torch.randn(1, 16, 2, 8)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **options: None)
    assert attend(q).isfinite().all()
