"""The answer to the exercise of lesson 02, and its check."""

import torch
import triton
import triton.language as tl

from . import DEVICE, Exercises, expect, here

exercises = Exercises("02")


@triton.jit
def linear_relu_kernel(
    a, b, bias, c, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """C = relu(A B + bias): one tile per program, in order of `tl.program_id`."""
    m_block = tl.program_id(0) // tl.cdiv(N, BLOCK_N)
    n_block = tl.program_id(0) % tl.cdiv(N, BLOCK_N)
    offs_m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows, columns = offs_m[:, None] < M, offs_n[None, :] < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a_at = a + offs_m[:, None] * stride_a + k + offs_k[None, :]
        b_at = b + (k + offs_k[:, None]) * stride_b + offs_n[None, :]
        a_tile = tl.load(a_at, mask=rows & (offs_k[None, :] < K - k), other=0.0)
        b_tile = tl.load(b_at, mask=columns & (offs_k[:, None] < K - k), other=0.0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
    acc += tl.load(bias + offs_n, mask=offs_n < N, other=0.0)[None, :]
    acc = tl.maximum(acc, 0.0)
    c_at = c + offs_m[:, None] * stride_c + offs_n[None, :]
    tl.store(c_at, acc.to(c.dtype.element_ty), mask=rows & columns)


@exercises.check(1, linear_relu_kernel)
def check_linear_relu(kernel):
    """Launches the kernel at sizes that no tile divides; compares with fp64."""
    for m, n, k in ((100, 80, 48), (32, 33, 20)):
        a, b = torch.randn(m, k, device=DEVICE), torch.randn(k, n, device=DEVICE)
        bias, c = torch.randn(n, device=DEVICE), torch.zeros(m, n, device=DEVICE)
        here(kernel)[(triton.cdiv(m, 32) * triton.cdiv(n, 32),)](
            *(a, b, bias, c, m, n, k, k, n, n),
            *(32, 32, 16),
        )
        expected = torch.relu(a.double() @ b.double() + bias.double())
        expect(c, expected, f"({m}, {k}) times ({k}, {n})", atol=1e-4)
    return "bias and relu cost no byte of C"
