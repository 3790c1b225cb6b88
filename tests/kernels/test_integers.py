"""Integers of masks and score functions are the same on the CPU and in kernels, whatever their
size, and whatever they are divided and shifted by.
"""

import functools

import pytest
import torch
from helpers.hostile_masks import BYTES, HOSTILE, IDS, LEAST, WORDS
from helpers.modified_tiles import (
    arguments,
    check,
    emulated,
    gluon_kernel,
    interpreted,
    triton_kernel,
)

import tilewise
from tilewise import ArgumentError, mods
from tilewise.mods import causal, document, mask, score
from tilewise.mods.codegen import source_of
from tilewise.mods.expressions import INT, OPERATORS, Node, nodes_of
from tilewise.mods.widths import BITS_32, long_nodes, ranges_of
from tilewise.sparse import create_block_mask
from tilewise.testing import build, use_emulator, use_interpreter


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("run", [interpreted, emulated])
def test_kernels_agree_with_torch(name, run):
    check(HOSTILE[name], run, q_start=-9)
    check(HOSTILE[name], run, turned=True, q_start=16, h=0, b=0)


@pytest.mark.parametrize("run", [interpreted, emulated])
def test_kernels_hold_any_index_of_64_bits(run):
    """Near 2^63, too: past an end they read the first or last element."""
    size = len(BYTES)

    def held(i):
        return torch.clamp(torch.where(i < 0, i + size, i), 0, size - 1)

    hostile = mask(lambda b, h, q, k: BYTES[IDS[q]] == BYTES[IDS[k] % size])
    as_read = mask(lambda b, h, q, k: BYTES[held(IDS[q])] == BYTES[IDS[k] % size])
    check(hostile, run, as_read=as_read, q_start=-9)
    check(hostile, run, as_read=as_read, turned=True, q_start=16, h=0, b=0)
    with pytest.raises(ArgumentError, match="out of bounds"):
        check(hostile, run)


@pytest.mark.compile
@pytest.mark.parametrize("kernel", [triton_kernel, gluon_kernel], ids=["triton", "gluon"])
def test_they_compile(kernel):
    masks = [x for x in HOSTILE.values() if isinstance(x, mods.Mask)]
    for some in (masks[::3], masks[1::3], masks[2::3]):
        mod = functools.reduce(lambda x, y: mask(lambda *at: x(*at) ^ y(*at)), some)
        given, constants = arguments(mod)
        compiled = build(kernel, *given, **constants, num_warps=4, on="sm90")
        assert " 0 bytes spill stores" in compiled.ptxas_log, mod


def exactly(op: str, x: int, y: int) -> int:
    """What an operator gives, in Python's integers."""
    if op in ("//", "%"):
        found = (0 if op == "//" else x) if y == 0 else eval(f"x {op} y", {"x": x, "y": y})
    elif op == "<<":
        found = x << y if 0 <= y <= 63 else 0
    elif op == ">>":
        found = x >> (y if 0 <= y <= 63 else 63)
    else:
        known = {"abs": abs(x), "neg": -x, "~": ~x, "minimum": min(x, y), "maximum": max(x, y)}
        found = known[op] if op in known else eval(f"x {op} y", {"x": x, "y": y})
    return (found + 2**63) % 2**64 - 2**63


INTEGER = [op for op, known in OPERATORS.items() if known.kind([INT] * known.arity) == INT]
VALUES = [LEAST, LEAST + 1, -(2**62), -(2**31) - 1, -(2**31), -65, -64, -63, -33, -32, -2, -1, 0]
VALUES += [1, 2, 3, 31, 32, 33, 62, 63, 64, 65, 2**31 - 1, 2**31, 2**53 + 1, 2**62 + 1, 2**63 - 1]


@pytest.mark.parametrize("op", INTEGER)
def test_torch_gives_what_integers_give(op):
    """For every pair of hostile values, those that would end the process among them."""
    x = torch.tensor(VALUES)
    operands = [x[:, None], x[None, :]][: OPERATORS[op].arity]
    found = OPERATORS[op].compute(*operands).expand(len(x), len(x) if len(operands) > 1 else 1)
    for i, j in ((i, j) for i in range(found.shape[0]) for j in range(found.shape[1])):
        assert int(found[i, j]) == exactly(op, VALUES[i], VALUES[j]), (op, VALUES[i], VALUES[j])


@pytest.mark.parametrize("op", INTEGER)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_ranges_hold_every_value(op, dtype):
    limits = torch.iinfo(dtype)
    values = [v for v in VALUES if limits.min <= v <= limits.max]
    leaf = Node("load", (Node("q_idx"),), (0, dtype))
    other = Node("-", (Node("k_idx"), Node("int", (), 3)))
    for right, ys in ((Node("load", (Node("k_idx"),), (1, dtype)), values), (other, range(-3, 99))):
        inputs = (leaf, right)[: OPERATORS[op].arity]
        own = ranges_of(nodes_of(Node(op, inputs)))[Node(op, inputs)]
        for x in values:
            for y in ys:
                assert own.has(exactly(op, x, y)), (op, x, y, own)


ORDINARY = {
    "causal": causal(),
    "documents": document(WORDS),
    "bytes": mask(lambda b, h, q, k: BYTES[q] - BYTES[k] == 1),
    "window": mods.sliding_window(7, 2),
    "chunks": mods.chunked(5),
    "dilated": mods.dilated(3),
    "neighbours": mask(lambda b, h, q, k: (abs(q // 9 - k // 9) < 2) & (abs(q % 9 - k % 9) < 2)),
    "heads": mask(lambda b, h, q, k: (q - k) % (h + 1) == 0),
    "sums": mask(lambda b, h, q, k: (q + k + h + b) % 3 == 0),
    "multiples": mask(lambda b, h, q, k: (q * 5 + 3 - k * 2) % 7 < 2),
    "distances": score(lambda s, b, h, q, k: s + k - q),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_functions_stay_in_32_bits_and_guard_nothing(name):
    nodes = nodes_of(ORDINARY[name].expr)
    assert not long_nodes(nodes, ranges_of(nodes))
    assert "== 0), 1" not in source_of(ORDINARY[name].expr)


def test_what_may_not_fit_is_long():
    nodes = nodes_of(HOSTILE["differences"].expr)
    ranges = ranges_of(nodes)
    assert [r for node, r in ranges.items() if node.op == "load"] == [BITS_32, BITS_32]
    assert len(long_nodes(nodes, ranges)) == 1


UNDEFINED = {
    "// 0": lambda b, h, q, k: q // 0 == k,
    "% 0": lambda b, h, q, k: q % 0 == k,
    "<< -1": lambda b, h, q, k: q << -1 == k,
    ">> 70": lambda b, h, q, k: q >> 70 == k,
    "within": lambda b, h, q, k: mask(lambda b, h, q, k: q // k == 1)(b, h, q, 0),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_constants_that_give_nothing_are_refused(name):
    with pytest.raises(ArgumentError, match=r"divide by a number|shift by 0 to 63"):
        mask(UNDEFINED[name])


@pytest.mark.parametrize("count", [2**28, 2**28 + 1])
def test_so_many_positions_are_served(count):
    q = torch.empty(1, 1, 1, 8, device="meta")
    k = torch.empty(1, count, 1, 8, device="meta")
    if count == 2**28:
        assert tilewise.attention(q, k, k, mask_mod=causal()).shape == q.shape
        return
    with pytest.raises(NotImplementedError, match=r"support k_idx.*268435457.*merge_states"):
        tilewise.attention(q, k, k, mask_mod=causal())


def qkv(seqlen=80, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, seqlen, heads, 16) for heads in (2, 1, 1)]
    return [torch.randn(s, generator=generator, requires_grad=requires_grad) for s in shapes]


# Documents whose numbers differ in the high half alone, and in the low half alone.
HASHED = torch.tensor([7] * 20 + [7 + 2**32] * 20 + [2**62 + 1] * 20 + [2**62] * 20)


@pytest.mark.parametrize("by_blocks", [False, True])
def test_documents_that_are_hashes(by_blocks):
    """CPU, interpreter, and torch by hand; forward and backward."""
    given = {"mask_mod": document(HASHED)}
    if by_blocks:
        blocks = create_block_mask(document(HASHED), 1, 1, 80, 80, block=(16, 16))
        given = {"block_mask": blocks}
    plain = torch.zeros(80, 80).masked_fill(HASHED[:, None] != HASHED, -torch.inf)
    expected = None
    for backend in (None, "portable"):
        q, k, v = qkv()
        with use_interpreter():
            out = tilewise.attention(q, k, v, **given, backend=backend or "cpu")
            grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        if expected is None:
            bias = plain[None, None]
            wanted = tilewise.attention_reference(*(x.double() for x in (q, k, v)), bias=bias)
            wanted_grads = torch.autograd.grad(wanted.square().sum(), (q, k, v))
            expected = wanted.float(), *wanted_grads
        torch.testing.assert_close((out, *grads), expected, rtol=1e-4, atol=1e-5)


def test_documents_that_are_hashes_in_hopper_kernels():
    q, k, v = (x.half() for x in qkv(requires_grad=False))
    with use_emulator(0):
        out = tilewise.attention(q, k, v, mask_mod=document(HASHED), backend="hopper")
    wanted = tilewise.attention(q, k, v, mask_mod=document(HASHED), backend="cpu")
    torch.testing.assert_close(out, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("by", ["b", "h"])
def test_a_block_mask_tells_long_numbers_apart(by):
    """Intervals lie in float64, which has not every int64."""
    near = torch.tensor([2**60, 2**60 + 1])
    made = mask(lambda b, h, q, k: near[b if by == "b" else h] == near[0])
    blocks = create_block_mask(made, 2, 2, 32, 32, block=(16, 16))
    kinds = blocks.kinds()
    assert kinds.select(0 if by == "b" else 1, 1).max() == 0
    assert kinds.select(0 if by == "b" else 1, 0).min() == 2
    wide = mask(lambda b, h, q, k: (q * 0 + 2**60 + 1 == k * 0 + 2**60) | (q < 0))
    assert create_block_mask(wide, 1, 1, 32, 32, block=(16, 16)).kinds().max() == 0
