"""Answers to the exercises of lesson 05, and their checks."""

import torch
import triton
import triton.language as tl

from . import DEVICE, Exercises, expect, here

exercises = Exercises("05")


def backward_with_dropout(q, k, v, dout, z):
    """dq, dk, dv of O = (P * Z) V; Z is 1 / (1 - p), or 0 for dropped weights."""
    scale = q.shape[-1] ** -0.5
    p = torch.softmax(scale * q @ k.T, -1)
    out = (p * z) @ v
    dv = (p * z).T @ dout  # the weights that were used
    dp = z * (dout @ v.T)  # a dropped weight has no gradient
    # as before, with the O of the forward
    delta = (dout * out).sum(-1, keepdim=True)
    ds = p * (dp - delta)  # as before, with the P from before dropout
    return scale * ds @ k, scale * ds.T @ q, dv


@exercises.check(1, backward_with_dropout)
def check_dropout(answer):
    """Compares `answer(q, k, v, dout, z)` with autograd in fp64."""
    generator = torch.Generator().manual_seed(0)
    for kept in (0.9, 0.5, 1.0):
        size = dict(generator=generator, dtype=torch.float64)
        q, k, v, dout = torch.randn(4, 40, 16, **size).unbind(0)
        z = (torch.rand(40, 40, **size) < kept) / kept
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        p = torch.softmax(leaves[0] @ leaves[1].T / 4, -1)
        exact = torch.autograd.grad((p * z) @ leaves[2], leaves, dout)
        for name, got, expected in zip(
            ("dq", "dk", "dv"), answer(q, k, v, dout, z), exact
        ):
            expect(got, expected, f"{name}, {kept:.0%} kept", atol=1e-10)
    return "delta is rowsum(dO * O) with dropout, too"


@triton.jit
def dq_kernel(
    q, k, v, dout, lse, delta, dq, seqlen, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ of one head, no mask: a program per block of queries, without atomics."""
    q_idx, offs_d = (
        tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.arange(0, D)[None, :],
    )
    is_row = (q_idx < seqlen)[:, None]
    of_rows = q_idx[:, None] * D + offs_d
    q_tile = tl.load(q + of_rows, mask=is_row, other=0.0)
    do_tile = tl.load(dout + of_rows, mask=is_row, other=0.0)
    row_lse = tl.load(lse + q_idx, mask=q_idx < seqlen, other=0.0)
    row_delta = tl.load(delta + q_idx, mask=q_idx < seqlen, other=0.0)
    acc_dq = tl.zeros([BLOCK_M, D], tl.float32)
    for n_start in range(0, seqlen, BLOCK_N):
        k_idx = n_start + tl.arange(0, BLOCK_N)
        of_keys = k_idx[:, None] * D + offs_d
        k_tile = tl.load(k + of_keys, mask=(k_idx < seqlen)[:, None], other=0.0)
        v_tile = tl.load(v + of_keys, mask=(k_idx < seqlen)[:, None], other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        p = tl.exp2((s - row_lse[:, None]) * 1.4426950408889634)
        p = tl.where((k_idx < seqlen)[None, :], p, 0.0)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
        ds = p * (dp - row_delta[:, None])
        acc_dq = tl.dot(ds.to(k_tile.dtype), k_tile, acc_dq, input_precision="ieee")
    tl.store(dq + of_rows, acc_dq * scale, mask=is_row)


@exercises.check(2, dq_kernel)
def check_dq(kernel):
    """Launches the kernel in fp32 at lengths that are no multiples of a block."""
    for seqlen in (100, 32, 17):
        q, k, v, dout = torch.randn(4, seqlen, 16, device=DEVICE).unbind(0)
        s = q.double() @ k.double().T / 4
        p, lse = torch.softmax(s, -1), torch.logsumexp(s, -1).float()
        delta = (dout.double() * (p @ v.double())).sum(-1, keepdim=True)
        exact = p * (dout.double() @ v.double().T - delta) @ k.double() / 4
        dq = torch.zeros_like(q)
        grid = (triton.cdiv(seqlen, 32),)
        here(kernel)[grid](
            q, k, v, dout, lse, delta.float(), dq, seqlen, 0.25, 16, 32, 32
        )
        expect(dq, exact, f"{seqlen} rows", atol=1e-4)
    return "no atomics, so the same bits in every run"
