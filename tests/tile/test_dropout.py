"""Kernels keep the pairs that `tilewise.tile.random_bytes` says, bit for bit, and share their
work.
"""

import re
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from helpers.philox import KNOWN
from helpers.tiers import sample
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.hopper.bwd import dropout as bwd_dropout
from tilewise.kernels.hopper.bwd.dropout import select
from tilewise.kernels.hopper.bwd.dropout_bits import draw_keep_bits
from tilewise.kernels.hopper.fwd import dropout
from tilewise.kernels.hopper.fwd.dropout import drop_pairs
from tilewise.kernels.hopper.fwd.pairs import from_pairs
from tilewise.kernels.hopper.layouts import accumulator, column_of, row_of
from tilewise.testing import build, emulate, interpret
from tilewise.tile.dropout import keep_mask, philox, stream_of
from tilewise.tile.random_bytes import keep_tile

RNGS = [(0, 0), (1, 2), (-1, -1), (0x0123_4567_89AB_CDEF, -(2**63))]
STARTS = [(0, 0), (16, 32), (4096, 96), (2**31 - 256, 2**31 - 256)]


class Where(NamedTuple):
    """A tile's place, as a kernel knows it."""

    batch: int
    head: int
    m_start: int
    n_start: int


@triton.jit
def kept_kernel(
    out, rng, at, threshold, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    offs_m, offs_n = tl.arange(0, M), tl.arange(0, N)
    stream = stream_of(rng, at.batch, at.head)
    if TRANSPOSED:
        offs_m, offs_n = offs_m[None, :], offs_n[:, None]
    else:
        offs_m, offs_n = offs_m[:, None], offs_n[None, :]
    keep = keep_mask(stream, at.m_start, at.n_start, offs_m, offs_n, threshold)
    tl.store(out + offs_m * N + offs_n, keep.to(tl.int8))


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("shape", sample([(16, 32), (64, 128), (128, 64)], (16, 32)), ids=str)
def test_interpreter(shape, transposed):
    for i, rng in enumerate(map(torch.tensor, RNGS)):
        m_start, n_start = STARTS[i]
        for batch, head, threshold in ((0, 1, 128), (2**31 - 1, 5, 1), (3, 2**31 - 1, 255)):
            out = torch.full(shape, -1, dtype=torch.int8)
            at = Where(batch, head, m_start, n_start)
            interpret(kept_kernel)[(1,)](
                out, rng, at, threshold, M=shape[0], N=shape[1], TRANSPOSED=transposed
            )
            expected = keep_tile(rng, batch, head, m_start, n_start, *shape, threshold)
            assert out.equal(expected.to(torch.int8))


@triton.jit
def heads_in_a_tile_kernel(out, rng, threshold, M: tl.constexpr, N: tl.constexpr):
    """Rows are two heads of each query in turn, as where the heads of a group share a tile."""
    rows, offs_n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    stream = stream_of(rng, 4, rows % 2)
    keep = keep_mask(stream, 0, 64, 5 + rows // 2, offs_n, threshold)
    tl.store(out + rows * N + offs_n, keep.to(tl.int8))


def test_rows_of_several_heads():
    """Queries that start anywhere are offsets from 0."""
    rng, out = torch.tensor([7, 8]), torch.empty(32, 64, dtype=torch.int8)
    interpret(heads_in_a_tile_kernel)[(1,)](out, rng, 99, M=32, N=64)
    expected = keep_tile(rng, 4, torch.arange(2), 5, 64, 16, 64, 99)
    assert out.equal(expected.transpose(0, 1).reshape(32, 64).to(torch.int8))


@triton.jit
def philox_kernel(words, out, ROUNDS: tl.constexpr):
    w0 = tl.load(words).to(tl.uint32)
    w1 = tl.load(words + 1).to(tl.uint32)
    w2 = tl.load(words + 2).to(tl.uint32)
    w3 = tl.load(words + 3).to(tl.uint32)
    k0 = tl.load(words + 4).to(tl.uint32)
    k1 = tl.load(words + 5).to(tl.uint32)
    r0, r1, r2, r3 = philox(w0, w1, w2, w3, k0, k1, ROUNDS)
    tl.store(out, r0.to(tl.int64))
    tl.store(out + 1, r1.to(tl.int64))
    tl.store(out + 2, r2.to(tl.int64))
    tl.store(out + 3, r3.to(tl.int64))


@pytest.mark.parametrize("line", KNOWN.strip().splitlines())
def test_known_answers(line):
    rounds, *words = line.split()
    words = torch.tensor([int(word, 16) for word in words])
    out = torch.empty(4, dtype=torch.int64)
    interpret(philox_kernel)[(1,)](words, out, ROUNDS=int(rounds))
    assert out.equal(words[6:])


@gluon.jit
def hopper_kernel(
    out, rng, at, threshold, N: gl.constexpr, TRANSPOSED: gl.constexpr, HOW: gl.constexpr
):
    """Ones, where they are kept: (64 queries, N keys), or (64 keys, N queries)."""
    LAYOUT: gl.constexpr = accumulator(N)
    rows = gl.arange(0, 64, row_of(LAYOUT))[:, None]
    columns = gl.arange(0, N, column_of(LAYOUT))[None, :]
    stream = stream_of(rng, at.batch, at.head)
    offs_m, offs_n = rows, columns
    if TRANSPOSED:
        offs_m, offs_n = columns, rows
    cells = out + rows * N + columns
    ones = gl.load(cells)
    if HOW == "select":
        x = select(draw_keep_bits(stream, at.m_start, at.n_start, threshold, N), ones, 0.0)
    elif HOW == "drop_pairs":
        rows = gl.arange(0, 64, row_of(LAYOUT))
        pairs = drop_pairs(ones, stream, at.m_start, at.n_start, rows, threshold, gl.bfloat16)
        x = gl.convert_layout(from_pairs(pairs, gl.bfloat16), LAYOUT).to(gl.float32)
    elif HOW == "keep_mask":
        keep = keep_mask(stream, at.m_start, at.n_start, offs_m, offs_n, threshold)
        x = gl.where(keep, ones, 0.0)
    else:
        x = ones * gl.load(rng)
    gl.store(cells, x)


WAYS = [(False, "keep_mask"), (True, "keep_mask"), (False, "drop_pairs"), (True, "select")]


@pytest.mark.emulator
@pytest.mark.parametrize("n", sample([64, 128], 64))
@pytest.mark.parametrize("transposed, how", WAYS, ids=str)
def test_emulator(transposed, how, n):
    for i, rng in enumerate(map(torch.tensor, RNGS)):
        m_start, n_start = STARTS[i]
        for batch, head, threshold in ((0, 1, 26), (5, 2, 1), (2, 0, 255), (1, 1, 128)):
            out = torch.ones(64, n)
            at = Where(batch, head, m_start, n_start)
            emulate(hopper_kernel, asm={**dropout.ASM, **bwd_dropout.ASM})[(1,)](
                out, rng, at, threshold, N=n, TRANSPOSED=transposed, HOW=how
            )
            shape = (n, 64) if transposed else (64, n)
            expected = keep_tile(rng, batch, head, m_start, n_start, *shape, threshold)
            assert out.equal((expected.T if transposed else expected).float())


def drawn_groups(transposed, how, n):
    """Of how many groups a thread computes the words: bytes change places eight times in each."""
    at, rng = Where(2, 3, 160, 320), torch.empty(2, dtype=torch.int64)
    compiled = build(hopper_kernel, torch.empty(64, n), rng, at, 26, n, transposed, how)
    ptx = compiled.asm["ptx"]
    # A thread asks its neighbour once in 64 queries, not by way of shared memory
    assert ptx.count("shfl") == (n // 64 if how == "select" else 0)
    assert compiled.metadata.shared == 0 and "bar.sync" not in ptx
    return len(re.findall(r"prmt\.b32\s+%r\d+, %r\d+, 0, (?:0x123U?|291);", ptx)) / 8


@pytest.mark.compile
@pytest.mark.parametrize("n", sample([64, 128], 64))
def test_elements_share_words(n):
    """A thread has n / 2 elements: 16 of each group with queries down, 4 with keys down, and there
    it asks its neighbour for half of them.
    """
    assert drawn_groups(False, "none", n) == 0
    assert drawn_groups(False, "drop_pairs", n) == drawn_groups(False, "keep_mask", n) == n / 32
    assert drawn_groups(True, "select", n) == n / 16


@pytest.mark.compile
@pytest.mark.parametrize("on", sample(["sm80", "sm90", "gfx942"], "sm90"))
def test_portable_compile(on):
    rng, out = torch.empty(2, dtype=torch.int64), torch.empty(64, 64, dtype=torch.int8)
    # A launch makes a constant of every 1
    for at, threshold, transposed in (
        (Where(2, 3, 160, 320), 26, False),
        (Where(1, 1, 0, 0), 1, True),
    ):
        assert build(kept_kernel, out, rng, at, threshold, 64, 64, transposed, on=on)


@pytest.mark.compile
@pytest.mark.parametrize("transposed, how", WAYS, ids=str)
def test_hopper_compiles_with_ones(transposed, how):
    rng = torch.empty(2, dtype=torch.int64)
    at = Where(1, 1, 16, 32)
    assert build(hopper_kernel, torch.empty(64, 64), rng, at, 1, 64, transposed, how)
