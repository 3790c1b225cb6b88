"""Single instructions, executed, against what the PTX ISA says."""

import numpy as np
import pytest
import torch

from ptx import assemble
from ptx.errors import Divergence, UnknownInstruction
from ptx.formats import E4M3, E5M2, bf16_from_f32

LANE = np.arange(32, dtype=np.uint32)
U32 = (1 << 32) - 1


def run(text, constraints, *inputs):
    return assemble(text, constraints, *(np.asarray(x) for x in inputs))[0]


def words(*values):
    return np.array(values, np.int64).astype(np.uint32)


def floats(*values):
    return np.array(values, np.float32)


INTEGERS = [
    ("add.s32 $0, $1, $2;", (0x7FFFFFFF, 5), (1, -6), (-(2**31), -1)),
    ("sub.s32 $0, $1, $2;", (0, 5), (1, 7), (-1, -2)),
    ("mul.lo.s32 $0, $1, $2;", (-3, 2**31 + 1), (7, 2), (-21, 2)),
    ("mul.hi.s32 $0, $1, $2;", (-3, 2**30), (7, 8), (-1, 2)),
    ("mul.hi.u32 $0, $1, $2;", (-3, 2**30), (7, 8), (6, 2)),
    ("div.s32 $0, $1, $2;", (-7, 7, -(2**31)), (2, -2, 3), (-3, -3, -715827882)),
    ("rem.s32 $0, $1, $2;", (-7, 7, 9), (2, -2, 4), (-1, 1, 1)),
    ("div.u32 $0, $1, $2;", (-7, 7), (2, 2), (2147483644, 3)),
    ("min.s32 $0, $1, $2;", (-7, 7), (2, 2), (-7, 2)),
    ("max.u32 $0, $1, $2;", (-7, 7), (2, 2), (-7, 7)),
    ("max.relu.s32 $0, $1, $2;", (-7, 7), (-2, 2), (0, 7)),
    ("shl.b32 $0, $1, $2;", (1, 1, 3), (31, 32, 40), (1 << 31, 0, 0)),
    ("shr.u32 $0, $1, $2;", (-1, -1, 8), (31, 32, 2), (1, 0, 2)),
    ("shr.s32 $0, $1, $2;", (-8, -8, 8), (1, 99, 99), (-4, -1, 0)),
    ("shf.l.wrap.b32 $0, $1, $2, 8;", (0x89ABCDEF,), (0x01234567,), (0x23456789,)),
    ("shf.r.clamp.b32 $0, $1, $2, 40;", (0x89ABCDEF,), (0x01234567,), (0x01234567,)),
    ("bfe.u32 $0, $1, 4, 8; ", (0x12345678,), (0,), (0x67,)),
    ("bfe.s32 $0, $1, 4, 4; ", (0x12345698,), (0,), (-7,)),
    ("bfe.s32 $0, $1, 28, 8; ", (0x92345698, 0x12345698), (0, 0), (-7, 1)),
    ("bfe.u32 $0, $1, 28, 0; ", (0x92345698,), (0,), (0,)),
    ("bfi.b32 $0, $1, $2, 8, 4;", (0xAB,), (-1,), (0xFFFFFBFF,)),
    ("lop3.b32 $0, $1, $2, 12, 0xE8;", (9,), (5,), (13,)),  # majority
    ("prmt.b32 $0, $1, $2, 0x7610;", (0x33221100,), (0x77665544,), (0x77661100,)),
    ("prmt.b32 $0, $1, $2, 0x888F;", (0x33221180,), (0x87665544,), (0xFFFFFFFF,)),
    ("mad.lo.s32 $0, $1, $2, 5;", (3,), (-4,), (-7,)),
    ("selp.b32 $0, $1, $2, -1;", (3,), (4,), (3,)),
    ("clz.b32 $0, $1;", (1, 0, -1), (0, 0, 0), (31, 32, 0)),
    ("popc.b32 $0, $1;", (7, 0, -1), (0, 0, 0), (3, 0, 32)),
    ("brev.b32 $0, $1;", (1, 6), (0, 0), (1 << 31, 0x60000000)),
    ("abs.s32 $0, $1;", (-7, 7, -(2**31)), (0, 0, 0), (7, 7, -(2**31))),
]


@pytest.mark.parametrize("text, a, b, expected", INTEGERS, ids=lambda x: str(x)[:24])
def test_integers(text, a, b, expected):
    assert run(text, "=r,r,r", words(*a), words(*b)).tolist() == words(*expected).tolist()


def test_wide_products_and_halves():
    text = "mul.wide.s32 $0, $1, $2;"
    found = run(text, "=l,r,r", words(-3, 2**31 - 1), words(7, 2**31 - 1))
    assert found.view(np.int64).tolist() == [-21, (2**31 - 1) ** 2]
    low, high = assemble("mov.b64 {$0, $1}, $2;", "=r,=r,l", np.array([0x1122334455667788]))
    assert (low[0], high[0]) == (0x55667788, 0x11223344)
    assert run("bfe.u64 $0, $1, 4, 12;", "=l,l", np.array([0x1234567]))[0] == 0x456


NAN, INF = float("nan"), float("inf")
FLOATS = [
    ("max.f32 $0, $1, $2;", (NAN, 1, NAN), (2, NAN, NAN), (2, 1, NAN)),
    ("max.NaN.f32 $0, $1, $2;", (NAN, 1, 3), (2, NAN, 4), (NAN, NAN, 4)),
    ("min.f32 $0, $1, $2;", (NAN, -1), (2, 5), (2, -1)),
    ("fma.rn.f32 $0, $1, $2, 0fBF800000;", (1 + 2.0**-12,), (1 - 2.0**-12,), (-(2.0**-24),)),
    ("mul.f32 $0, $1, $2;", (1e-30,), (1e-10,), (np.float32(1e-40),)),
    ("mul.ftz.f32 $0, $1, $2;", (1e-30, 1e-40), (1e-10, 1e20), (0, 0)),
    ("div.full.f32 $0, $1, $2;", (1, -1, 0), (0, 0, 0), (INF, -INF, NAN)),
    ("ex2.approx.ftz.f32 $0, $1;", (-INF, 3, -140, 200), (0,) * 4, (0, 8, 0, INF)),
    ("lg2.approx.f32 $0, $1;", (0, 8, -1), (0,) * 3, (-INF, 3, NAN)),
]


@pytest.mark.parametrize("text, a, b, expected", FLOATS, ids=lambda x: str(x)[:24])
def test_floats(text, a, b, expected):
    np.testing.assert_array_equal(run(text, "=f,f,f", floats(*a), floats(*b)), floats(*expected))


@pytest.mark.parametrize("how", ["eq", "ne", "lt", "equ", "neu", "ltu", "num", "nan"])
def test_comparisons_with_nan(how):
    """Ordered ones are false of NaN, unordered ones true."""
    text = f"{{ .reg .pred p; setp.{how}.f32 p, $1, $2; selp.b32 $0, 1, 0, p; }}"
    found = run(text, "=r,f,f", floats(1, NAN, 1), floats(2, 1, 1)).tolist()
    a, b = np.array([1, NAN, 1]), np.array([2, 1, 1])
    expected = {
        **dict(eq=a == b, ne=[True, False, False], lt=a < b),
        **dict(equ=[False, True, True], neu=a != b, ltu=[True, True, False]),
        **dict(num=[True, False, True], nan=[False, True, False]),
    }[how]
    assert found == list(map(int, expected))


def test_comparisons_of_bf16():
    """As numbers, and not as bits."""
    a, b = floats(-1, NAN, 2), floats(1, 1, 1)
    pair = "{ .reg .b16 x, y; .reg .pred p; mov.b32 {_, x}, $1; mov.b32 {_, y}, $2;"
    for how, expected in (("lt", [1, 0, 0]), ("nan", [0, 1, 0]), ("neu", [1, 1, 1])):
        text = f"{pair} setp.{how}.bf16 p, x, y; selp.b32 $0, 1, 0, p; }}"
        assert run(text, "=r,f,f", a, b).tolist() == expected


def test_two_predicates_of_one_comparison():
    text = (
        "{ .reg .pred p, q, c; setp.lt.s32 c, $1, 9; setp.lt.and.s32 p|q, $1, $2, !c;"
        " selp.b32 $0, 2, 0, p; @q add.s32 $0, $0, 1; }"
    )
    found = run(text, "=r,r,r", words(3, 10, 10), words(5, 20, 5))
    assert found.tolist() == [0, 2, 1]


@pytest.mark.parametrize("kind, small", [("e4m3", E4M3), ("e5m2", E5M2)])
def test_formats_of_8_bits(kind, small):
    """Their numbers, and rounding of what is halfway, too large and NaN, as torch's."""
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    codes = torch.arange(256).to(torch.uint8)
    values = codes.view(dtype).float()
    np.testing.assert_array_equal(small.decode(codes.numpy()), values.numpy())
    finite = values[values.isfinite()].sort().values
    x = torch.cat(
        [(finite[1:] + finite[:-1]) / 2, torch.randn(4096) * 50, torch.tensor([1e9, NAN])]
    )
    most = torch.finfo(dtype).max
    found = run(f"cvt.rn.satfinite.{kind}x2.f32 $0, $2, $1;", "=h,f,f", x.numpy(), -x.numpy())
    expected = torch.stack([x, -x], 1).clamp(-most, most).to(dtype)
    same = torch.from_numpy(found.view(np.uint8).reshape(-1, 2).copy()) == expected.view(
        torch.uint8
    )
    assert (same | expected.isnan()).all()


def test_conversions():
    x = floats(1 + 2.0**-8, 1 + 3 * 2.0**-8, -2.5, 3e38, NAN)
    found = run("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", x, x[::-1].copy())
    assert (found.view(np.uint16).reshape(-1, 2)[:, 1] == bf16_from_f32(x)).all()
    assert (bf16_from_f32(x[:3]) == [0x3F80, 0x3F82, 0xC020]).all()
    found = run("cvt.rzi.s32.f32 $0, $1;", "=r,f", floats(-2.7, 3e9, NAN)).view(np.int32)
    assert found.tolist() == [-2, 2**31 - 1, 0]
    found = run("cvt.rn.f32.s32 $0, $1;", "=f,r", words(-3, 2**24 + 1))
    assert found.tolist() == [-3, 2**24]
    assert run("cvt.s64.s32 $0, $1;", "=l,r", words(-3)).view(np.int64)[0] == -3


@pytest.mark.parametrize(
    "how, b, c, source",
    [
        ("bfly", 8, 31, LANE ^ 8),
        ("idx", 5, 31, LANE * 0 + 5),
        ("up", 1, 0, np.maximum(LANE, 1) - 1),
        ("down", 3, 31, np.where(LANE < 29, LANE + 3, LANE)),
        ("down", 1, 0x1807, np.where(LANE % 8 < 7, LANE + 1, LANE)),  # segments of 8
        ("idx", 2, 0x1C03, LANE // 4 * 4 + 2),  # of 4
    ],
)
def test_shuffles(how, b, c, source):
    text = f"{{ .reg .pred p; shfl.sync.{how}.b32 $0|p, $1, {b}, {c}, -1; }}"
    assert run(text, "=r,r", LANE * 3).tolist() == (source * 3).tolist()


def test_votes_and_reductions():
    text = "{{ .reg .pred p; setp.eq.s32 p, $1, 40; vote.sync.{}.pred p, {}p, -1;"
    text += " selp.b32 $0, 1, 0, p; }}"
    lanes = np.arange(64, dtype=np.uint32)
    assert run(text.format("any", ""), "=r,r", lanes).tolist() == [0] * 32 + [1] * 32
    assert run(text.format("all", "!"), "=r,r", lanes).tolist() == [1] * 32 + [0] * 32
    ballot = "{ .reg .pred p; setp.ge.s32 p, $1, 30; vote.sync.ballot.b32 $0, p, -1; }"
    assert run(ballot, "=r,r", lanes)[[0, 32]].tolist() == [3 << 30, U32]
    assert run("redux.sync.add.s32 $0, $1, -1;", "=r,r", lanes)[[0, 32]].tolist() == [496, 1520]
    assert run("redux.sync.max.s32 $0, $1, -1;", "=r,r", lanes)[[0, 32]].tolist() == [31, 63]
    elect = "{ .reg .pred p; elect.sync _|p, -1; selp.b32 $0, 1, 0, p; }"
    assert run(elect, "=r,r", lanes).nonzero()[0].tolist() == [0, 32]


# Branches


def test_lanes_that_part_meet_again():
    """A loop of as many steps as each lane says, and a shuffle behind it."""
    text = """{ .reg .pred p; .reg .b32 n; mov.b32 n, 0; mov.b32 $0, 0;
    LOOP: setp.ge.s32 p, n, $1; @p bra DONE; add.s32 n, n, 1; add.s32 $0, $0, n; bra LOOP;
    DONE: shfl.sync.idx.b32 n, $0, 31, 31, -1; add.s32 $0, $0, n; }"""
    assert run(text, "=r,r", LANE).tolist() == (LANE * (LANE + 1) // 2 + 496).tolist()


def test_labels_are_those_of_a_scope():
    one = "{{ .reg .pred p; setp.lt.s32 p, $1, {}; @p bra HERE; add.s32 $0, $0, 1; HERE: }}"
    text = "mov.b32 $0, 0; " + " ".join(one.format(n) for n in (4, 8, 16))
    expected = (LANE >= 4) * 1 + (LANE >= 8) * 1 + (LANE >= 16)
    assert run(text, "=r,r", LANE).tolist() == expected.tolist()


def test_a_shuffle_of_lanes_that_are_apart():
    text = """{ .reg .pred p; setp.lt.s32 p, $1, 4; @p bra HERE;
    shfl.sync.bfly.b32 $0, $1, 1, 31, -1; HERE: }"""
    with pytest.raises(Divergence, match="shfl"):
        run(text, "=r,r", LANE)


@pytest.mark.parametrize(
    "text", ["frob.b32 $0, $1;", "add.sat.s32 $0, $1, $1;", "cvt.rz.f32.s32 $0, $1;"]
)
def test_what_is_not_known_is_named(text):
    with pytest.raises((UnknownInstruction, ValueError), match=text[:3]):
        run(text, "=r,r", LANE)
