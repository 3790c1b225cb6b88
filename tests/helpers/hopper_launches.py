"""Arguments for the kernels of `hopper_kernels`, and what these must compute from them."""

import torch
from helpers.records import NOTHING, features, tile_of
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels.common.arguments import numbers_of
from tilewise.problem import Scalars
from tilewise.tile.types import Sizes

ELEMENTS = {torch.float16: gl.float16, torch.float32: gl.float32}


def descriptor(x, block):
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[x.dtype])
    return TensorDescriptor.from_tensor(x, block, layout)


class Launch:
    """A kernel's name, grid and arguments; `check` compares what it wrote with torch."""

    def __init__(self, name, grid, args, constants, check):
        self.name, self.grid, self.args, self.constants = name, grid, args, constants
        self.check = check


def copy(rows=448, ctas=3, stages=2):
    x = torch.randn(rows, 64).half()
    y = torch.full_like(x, float("nan"))
    constants = dict(ROWS=64, COLUMNS=64, STAGES=stages, num_warps=4)
    args = descriptor(x, [64, 64]), descriptor(y, [64, 64]), 2.0, -(-rows // 64)

    def check():
        torch.testing.assert_close(y, 2 * x, rtol=0, atol=0)

    return Launch("copy_kernel", (ctas,), args, constants, check)


def matmul(module, m=384, n=192, k=128, ctas=3, stages=4):
    a, b = torch.randn(m, k).half(), torch.randn(k, n).half()
    c = torch.randn(m, n)
    expected = c + a.float() @ b.float()
    counter = torch.zeros(1, dtype=torch.int32)
    problem = module.Problem(m // 128, n // 64, k // 64, n)
    args = descriptor(a, [128, 64]), descriptor(b, [64, 64]), c, counter, problem
    constants = dict(SHAPE=module.Shape(64, 64, stages), num_warps=4)

    def check():
        torch.testing.assert_close(c, expected, rtol=1e-4, atol=1e-3)
        assert counter.item() == (m // 128) * (n // 64)

    return Launch("matmul_kernel", (ctas,), args, constants, check)


def attention(seqlen_q=128, seqlen_k=200, nheads=2, causal=True):
    q, k, v = (torch.randn(nheads, n, 64).half() for n in (seqlen_q, seqlen_k, seqlen_k))
    out = torch.full_like(q, float("nan"))
    lse = torch.full((nheads, seqlen_q), float("nan"))
    scalars = Scalars(0.125, 0.0, -1, 0 if causal else -1)
    args = (
        *(descriptor(x, [1, 64, 64]) for x in (q, k, v, out)),
        *(
            lse,
            NOTHING,
            Sizes(0, nheads, seqlen_q, seqlen_k),
            numbers_of(scalars, seqlen_q, seqlen_k),
        ),
    )
    flags = features(HEADDIM=64, HEADDIM_V=64, RIGHT=causal)
    constants = dict(FEATURES=flags, TILE=tile_of(64, 64), num_warps=4)

    def check():
        s = q.double() @ k.double().mT * 0.125
        if causal:
            seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
            s = s.masked_fill(~seen, float("-inf"))
        torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=0, atol=1e-4)
        torch.testing.assert_close(
            out.double(), s.softmax(-1).nan_to_num() @ v.double(), rtol=0, atol=5e-3
        )

    return Launch("attention_kernel", (-(-seqlen_q // 64), nheads), args, constants, check)
