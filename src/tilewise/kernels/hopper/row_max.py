"""The maxima of a block's rows by integer instructions, of three values each.

They stand on the critical path of a block, between S and its exponentials. Floats without a sign
are ordered as their bits are as signed integers, and those with one are below them. So the integer
maximum of a row with a score of at least 0 is its float maximum, and of any other row it is
negative. Hopper takes the maximum of three integers in one instruction (`__vimax3_s32` of CUDA's
DPX functions; ptxas makes it of two max.s32 of the PTX ISA) and that of two floats.

A row whose m is at least 0 needs no more than that: a negative score does not change m. Nor does it
if m grows by steps of more than LAG only, and is at least -LAG. Whether this holds for all rows of
a warp is known from the block before, so that no vote stands between S and the maxima. Each block
votes again, which takes three instructions: of a causal tile's first block some rows see few keys,
and their m may be low until the next one.

Zeros do no harm: -0 is the lowest integer, but as a score of a row it changes m as little as what
is below it, and as m it is at least -LAG. An m of infinity stays; m is never NaN, and would be
taken by floats. NaN among scores may win as an integer: then m differs, of a row whose output is
NaN.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.softmax import running_max
from .operands import row_factor

WARP_ROWS = 16


@gluon.constexpr_function
def vote_of(lag):
    """Whether the m of all rows of a warp are at least -lag. NaN is not."""
    least = {0.0: "0f00000000", 0.75: "0fBF400000", 8.0: "0fC1000000"}[lag]
    return (
        "{ .reg .pred holds;"
        f" setp.ge.f32 holds, $2, {least}; setp.ge.and.f32 holds, $3, {least}, holds;"
        " vote.sync.all.pred holds, holds, 0xffffffff;"
        " selp.b32 $0, 1, 0, holds; selp.b32 $1, 1, 0, holds; }"
    )


@gluon.constexpr_function
def maxima_of(n):
    """Maxima of n values each of a thread's two rows, of integers where the flag is set. Two chains
    a row, of odd lengths: an instruction takes two more values.
    """
    first = n // 2 + (n // 2 + 1) % 2

    def maxima(kind):
        of_rows = [[f"${2 + 2 * i + row}" for i in range(n)] for row in (0, 1)]
        chains = [part for x in of_rows for part in (x[:first], x[first:])]
        lines = [f"max.{kind} t{i}, {x[0]}, {x[1]};" for i, x in enumerate(chains)]
        for j in range(2, first):
            lines += [f"max.{kind} t{i}, t{i}, {x[j]};" for i, x in enumerate(chains) if x[j:]]
        return " ".join([*lines, f"max.{kind} $0, t0, t1; max.{kind} $1, t2, t3;"])

    return (
        f"{{ .reg .pred floats; .reg .b32 t0, t1, t2, t3; setp.eq.s32 floats, ${2 * n + 2}, 0;"
        f" @floats bra.uni FLOATS; {maxima('s32')} bra.uni DONE;"
        f" FLOATS: {maxima('f32')} DONE: }}"
    )


@gluon.constexpr_function
def constraints_of(n):
    return ",".join(["=&r"] * 2 + ["r"] * (2 * n + 2))


@gluon.jit
def integers_suffice(m_i, LAG: gl.constexpr):
    """Whether `running_max_of` may take integers, of the block after that of m_i: an int32 a row,
    the same in all rows of a warp. m grows by steps of more than LAG only.
    """
    return gl.inline_asm_elementwise(
        vote_of(LAG), "=r,=r,f,f", [m_i], dtype=gl.int32, is_pure=False, pack=2
    )


@gluon.jit
def running_max_of(s, m_i, scale, by_integers):
    """`tile.softmax.running_max`, or what leads to the same m in rows where `integers_suffice`. The
    scale is positive.
    """
    if by_integers is None:
        return running_max(s, m_i, exp_scale=scale)
    else:
        n: gl.constexpr = s.shape[1] // 4
        # A thread holds columns 8 i + 2 t and 8 i + 2 t + 1
        by_thread = s.to(gl.int32, bitcast=True).reshape([64, n // 2, 4, 2])
        columns = split_columns(by_thread.permute(0, 1, 3, 2).reshape([64, n, 4]))
        layout: gl.constexpr = columns[0].type.layout
        flag = row_factor(by_integers, layout)[:, None]
        top = gl.inline_asm_elementwise(
            maxima_of(n),
            constraints_of(n),
            columns + (flag,),
            dtype=gl.int32,
            is_pure=False,
            pack=2,
        )
        # Of the four threads of a row, as floats: bits of parts that are negative would be ordered
        # the other way round
        top = gl.max(top.to(gl.float32, bitcast=True), 1)
        return gl.maximum(m_i, gl.convert_layout(top, m_i.type.layout) * scale)


@gluon.jit
def split_columns(x):
    """(64, n, 4) as n of (64, 4): each number stays in its register."""
    if x.shape[1] == 1:
        return (x.reshape([64, 4]),)
    else:
        halves = x.reshape([64, x.shape[1] // 2, 2, 4]).permute(0, 1, 3, 2)
        even, odd = gl.split(halves)
        return split_columns(even) + split_columns(odd)


def _vote(lag):
    def vote(m_i):
        holds = (m_i >= -lag).unflatten(0, (-1, WARP_ROWS)).all(1)
        return holds.repeat_interleave(WARP_ROWS).int()

    return vote


def _maxima(*columns_and_flag):
    *columns, flag = columns_and_flag
    integers = functools.reduce(torch.maximum, columns)
    floats = functools.reduce(torch.fmax, [x.view(torch.float32) for x in columns])
    return torch.where(flag != 0, integers, floats.view(torch.int32))


_LAGS = 0.0, 0.75, 8.0  # without one, of FP8, `rescale.THRESHOLD`
_COLUMNS = 16, 32  # of a thread, in blocks of 64 and 128 keys
# What this assembly means to the emulator
ASM = {**{vote_of(lag): _vote(lag) for lag in _LAGS}, **{maxima_of(n): _maxima for n in _COLUMNS}}
