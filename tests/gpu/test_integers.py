"""Integers of masks and score functions on a GPU are those of the CPU."""

import pytest
import torch
from helpers.hostile_masks import HOSTILE
from helpers.modified_tiles import arguments, expected_of, triton_kernel

from tilewise import attention, mods
from tilewise.mods.codegen import captured_of
from tilewise.sparse import create_block_mask

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("turned", [False, True])
def test_a_kernel_agrees_with_torch(name, turned):
    mod = HOSTILE[name]
    (x, out, *at, _), constants = arguments(mod, turned=turned)
    found, captured = out.cuda(), captured_of(mod.to("cuda").tensors)
    triton_kernel[(1,)](x.cuda(), found, *at, captured, **constants)
    expected = expected_of(mod, x, *at, turned)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_documents_that_are_hashes(backend):
    """Forward and backward, of ids that differ in their high and in their low half alone."""
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper kernels are for sm_90")
    ids = torch.tensor([7, 7 + 2**32, 2**62, 2**62 + 1], device="cuda").repeat_interleave(200)
    q = torch.randn(1, 800, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    found = []
    for documents in (ids, torch.arange(4, device="cuda").int().repeat_interleave(200)):
        out = attention(q, q, q, mask_mod=mods.document(documents), backend=backend)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), q)))
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16, torch.uint32], ids=str)
def test_block_masks_of_every_width(dtype):
    ids = (torch.arange(512) // 100).to(dtype)
    made = mods.mask(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx])
    on_gpu = create_block_mask(made.to("cuda"), 1, 1, 512, 512)
    assert torch.equal(on_gpu.kinds().cpu(), create_block_mask(made, 1, 1, 512, 512).kinds())
