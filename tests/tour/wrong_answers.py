"""Wrong answers to the tour's exercises, which their checks refuse."""

import torch
import tour.lessons  # noqa: F401 (finds `lesson`)
import triton
import triton.language as tl
from lesson import hopper_parts, hopper_steps, solutions_02, solutions_05, solutions_09
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma


@triton.jit
def nothing_kernel(*arguments):
    pass


@triton.jit
def contiguous_write_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    tl.store(out + offs, tl.load(x + offs, mask=inside), mask=inside)


@triton.jit
def unmasked_write_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offs * stride, tl.load(x + offs))


@triton.jit
def add_kernel(a, x, y, z, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    total = tl.load(x + offs, mask=inside) + tl.load(y + offs, mask=inside)
    tl.store(z + offs, total, mask=inside)


@triton.jit
def axpy_past_the_end_kernel(a, x, y, z, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    total = a * tl.load(x + offs, mask=inside) + tl.load(y + offs, mask=inside)
    tl.store(z + offs, total, mask=offs < n + 1)


@triton.jit
def one_block_kernel(x, y, z, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    total = tl.load(x + offs, mask=inside) + tl.load(y + offs, mask=inside)
    tl.store(z + offs, total, mask=inside)


@triton.jit
def other_bias_kernel(
    a, b, bias, c, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    solutions_02.linear_relu_kernel(
        a, b, b, c, M, N, K, stride_a, stride_b, stride_c, BLOCK_M, BLOCK_N, BLOCK_K
    )


@triton.jit
def lse_without_alpha_kernel(x, lse, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    m_i = -float("inf")
    l_i = 0.0
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf"))
        m_i = tl.maximum(m_i, tl.max(block, 0))
        l_i += tl.sum(tl.exp(block - m_i), 0)
    tl.store(lse + tl.program_id(0), m_i + tl.log(l_i))


@triton.jit
def sum_without_alpha_kernel(x, v, out, columns, BLOCK: tl.constexpr, D: tl.constexpr):
    row, offs_d = tl.program_id(0) * columns, tl.arange(0, D)
    m_i = -float("inf")
    l_i = 0.0
    acc = tl.zeros((D,), tl.float32)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < columns
        block = tl.load(x + row + offs, mask=inside, other=-float("inf"))
        values = tl.load(v + offs[:, None] * D + offs_d[None, :], mask=inside[:, None], other=0.0)
        m_new = tl.maximum(m_i, tl.max(block, 0))
        p = tl.exp(block - m_new)
        l_i = l_i * tl.exp(m_i - m_new) + tl.sum(p, 0)
        acc += tl.sum(p[:, None] * values, 0)
        m_i = m_new
    tl.store(out + tl.program_id(0) * D + offs_d, acc / l_i)


@triton.jit
def dq_without_delta_kernel(
    q, k, v, dout, lse, delta, dq, seqlen, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    solutions_05.dq_kernel(q, k, v, dout, lse, lse, dq, seqlen, scale, D, BLOCK_M, BLOCK_N)


@gluon.jit
def compute_without_waiting(WG: gl.constexpr, q, q_full, keys, values, out, row, seqlen, scale):
    N: gl.constexpr = keys.tiles.shape[1]
    D: gl.constexpr = keys.tiles.shape[2]
    m_i, l_i, acc_o = hopper_parts.empty_state(N, D)
    no_scores = gl.zeros([64, N], gl.float32, hopper_parts.accumulator(N))
    mbarrier.wait(q_full.index(WG), 0)
    for i in range(seqlen // N):
        k = hopper_parts.wait_full(keys, i)
        s = warpgroup_mma(q.index(WG), k.permute((1, 0)), no_scores, use_acc=False)
        hopper_parts.release(keys, i)
        p, m_i, l_i, alpha = hopper_steps.online_step(s, m_i, l_i, scale, False)
        p = hopper_parts.left_operand(p, D, q.dtype)
        v = values.tiles.index(i % 2)
        acc_o = warpgroup_mma(p, v, hopper_parts.rescale(acc_o, alpha))
        hopper_parts.release(values, i)
    hopper_parts.write_rows(acc_o, l_i, out, row + WG * 64)


def without_first(first, stride, itemsize):
    return len({i * stride * itemsize // 32 for i in range(32)})


def without_rounding(n, block_m, block_n, sms):
    tiles = n * n / block_m / block_n
    return tiles / (triton.cdiv(int(tiles), sms) * sms)


def averaged(out1, lse1, out2, lse2):
    return (out1 + out2) / 2, torch.logaddexp(lse1, lse2)


def by_exponentials(out1, lse1, out2, lse2):
    """Right until exp overflows."""
    l1, l2 = lse1.exp(), lse2.exp()
    return (out1 * l1[..., None] + out2 * l2[..., None]) / (l1 + l2)[..., None], (l1 + l2).log()


def without_scores(seqlen, headdim, b_c, b_r):
    tensor = 2 * seqlen * headdim
    passes = {"FA1": 2 + 3 * (seqlen // b_c), "FA2": 2 + 2 * (seqlen // b_r)}
    return {"standard": 4 * tensor} | {name: count * tensor for name, count in passes.items()}


def delta_before_dropout(q, k, v, dout, z):
    p = torch.softmax(q @ k.T / 4, -1)
    ds = p * (z * (dout @ v.T) - (dout * (p @ v)).sum(-1, keepdim=True))
    return ds @ k / 4, ds.T @ q / 4, (p * z).T @ dout


def one_head(tile, lengths, nheads, block):
    for batch, length in enumerate(lengths):
        blocks = -(-length // block)
        if tile < blocks:
            return batch, 0, tile
        tile -= blocks
    return None


def written_once(n, group, headdim):
    return group * 4 * (headdim + 2) / (4 * n * headdim)


def other_pages(table, pages):
    shared = table.clone()
    shared[1, -pages:] = shared[0, -pages:]
    return shared


def unscaled(x):
    return solutions_09.hadamard(x) * x.shape[-1] ** 0.5


def one_step(x):
    if x.shape[-1] == 1:
        return x
    even, odd = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat((even + odd, even - odd), -1) * 0.5**0.5


def without_scale(q, k_mean, scale):
    return q @ k_mean


def neighbouring_chunks(rank, ranks):
    return 2 * rank, 2 * rank + 1


def every_nth_chunk(rank, ranks):
    return rank, rank + ranks


def window_of_each_run(runs, window):
    return sum(min(start, window) for start, _ in runs)


# lesson, check, the answer, wrong ones
EXERCISES = [
    ("00", "sectors", "sectors_from", [without_first]),
    ("00", "strided_write", "strided_write_kernel", [
        nothing_kernel, contiguous_write_kernel, unmasked_write_kernel]),
    ("01", "axpy", "axpy_kernel", [add_kernel, axpy_past_the_end_kernel]),
    ("01", "persistent_add", "persistent_add_kernel", [one_block_kernel]),
    ("02b", "efficiency", "efficiency", [without_rounding]),
    ("02", "linear_relu", "linear_relu_kernel", [other_bias_kernel]),
    ("03", "lse", "lse_kernel", [lse_without_alpha_kernel]),
    ("03", "weighted_sum", "weighted_sum_kernel", [sum_without_alpha_kernel]),
    ("04", "merge", "merge", [averaged, by_exponentials]),
    ("04b", "traffic", "traffic", [without_scores]),
    ("05", "dropout", "backward_with_dropout", [delta_before_dropout]),
    ("05", "dq", "dq_kernel", [dq_without_delta_kernel]),
    ("06", "find", "find", [one_head, lambda *sizes: None]),
    ("06", "static_order", "static_order", [
        lambda costs, processors: costs, lambda costs, processors: costs[1:]]),
    ("07", "race", "compute_with_waits", [compute_without_waiting]),
    ("07", "load", "load_v_first", [hopper_steps.load_partition]),
    ("08", "state_share", "state_share", [written_once]),
    ("08", "share_prefix", "share_prefix", [lambda table, pages: table, other_pages]),
    ("09", "hadamard", "hadamard", [unscaled, one_step]),
    ("09", "shift_of_lse", "shift_of_lse", [without_scale, lambda q, k_mean, scale: 0.0]),
    ("10", "chunks", "chunks_of", [neighbouring_chunks, every_nth_chunk]),
    ("10", "rows_to_pull", "rows_to_pull", [window_of_each_run, lambda runs, window: window]),
]  # fmt: skip
