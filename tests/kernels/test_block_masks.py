"""Block masks of any multiple of 16, and lists that say more than there is, in every backend."""

import contextlib
from unittest import mock

import pytest
import torch
from helpers.tiers import sample
from torch.nn.attention import flex_attention

import tilewise
from tilewise import ArgumentError, mods
from tilewise.sparse import BlockLists, BlockMask, create_block_mask
from tilewise.testing import use_emulator, use_interpreter
from tilewise.testing.inputs import guarded, poisoned
from tilewise.testing.tolerance import judge

ROWS_Q, ROWS_K = 200, 330
CONTEXTS = {"cpu": contextlib.nullcontext, "portable": use_interpreter, "hopper": use_emulator}


def near(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 64) & (kv_idx - q_idx < 64)


def tensors(rows_q=ROWS_Q, rows_k=ROWS_K, dtype=torch.float32, headdim=16):
    sides = rows_q, rows_k, rows_k, rows_q
    q, k, v, dout = (guarded(torch.randn(1, n, 1, headdim).to(dtype)) for n in sides)
    return [x.requires_grad_() for x in (q, k, v)], dout


def run(attend, given, dout, **how):
    out = attend(*given, **how)
    return out.detach(), *torch.autograd.grad(out, given, dout.to(out.dtype))


def check(backend, blocks, given, dout, **how):
    """Out and gradients against the same mask asked for every pair, in fp64."""
    with CONTEXTS[backend](), poisoned():
        found = run(tilewise.attention, given, dout, block_mask=blocks, backend=backend, **how)
    exact = [x.detach().double().requires_grad_() for x in given]
    dense = dict(mask_mod=blocks.mask, **how)
    oracle = run(tilewise.attention_reference, exact, dout, **dense)
    plain = run(tilewise.attention_reference, given, dout, upcast=False, **dense)
    for name, *three in zip(("out", "dq", "dk", "dv"), found, oracle, plain):
        verdict = judge(*three)
        assert verdict.ok, f"{name}: {verdict}"


SIZES = [(128, 112), (192, 128), (96, 96), (512, 384), (16, 48), (112, 16)]


@pytest.mark.parametrize("backend", ["cpu", "portable"])
@pytest.mark.parametrize("block", sample(SIZES, (192, 128), (96, 96)), ids=str)
def test_blocks_that_are_no_powers_of_two(block, backend):
    """By FlexAttention's lists and by ours, of lengths that are no multiples of them."""
    given, dout = tensors()
    ours = create_block_mask(near, 1, 1, ROWS_Q, ROWS_K, block=block)
    check(backend, ours, given, dout)
    theirs = flex_attention.create_block_mask(
        near, 1, 1, ROWS_Q, ROWS_K, device="cpu", BLOCK_SIZE=block
    )
    theirs = BlockMask.from_flex(theirs)
    assert torch.equal(theirs.kinds(), ours.kinds())
    check(backend, theirs, given, dout)


@pytest.mark.emulator
@pytest.mark.parametrize("block", [(128, 384), (128, 256)], ids=str)
def test_hopper_takes_blocks_of_whole_tiles(block):
    given, dout = tensors(dtype=torch.bfloat16, headdim=64)
    blocks = create_block_mask(near, 1, 1, ROWS_Q, ROWS_K, block=block)
    check("hopper", blocks, given, dout)


def test_hopper_says_why_it_does_not_take_others():
    given, _ = tensors(dtype=torch.bfloat16, headdim=64)
    blocks = create_block_mask(near, 1, 1, ROWS_Q, ROWS_K, block=(96, 96))
    with use_emulator(), pytest.raises(NotImplementedError, match="blocks of 96 x 96"):
        tilewise.attention(*given, block_mask=blocks, backend="hopper")


@pytest.mark.parametrize("block", sample([(16, 16), (64, 48), (64, 32)], (64, 48)), ids=str)
def test_dropout_beside_blocks_of_few_keys(block):
    """Random numbers come for 32 keys at a time, and a tile may have 16."""
    given, dout = tensors(70, 90)
    blocks = create_block_mask(near, 1, 1, 70, 90, block=block)
    how = dict(dropout_p=0.5, dropout_rng=torch.tensor([3, 5]))
    check("portable", blocks, given, dout, **how)


MAKERS = {
    "constructor": lambda block: by_hand(block),
    "create_block_mask": lambda block: create_block_mask(near, 1, 1, 512, 512, block=block),
    "from_flex": lambda block: BlockMask.from_flex(
        flex_attention.create_block_mask(near, 1, 1, 512, 512, device="cpu", BLOCK_SIZE=block)
    ),
}


def by_hand(block, **changed):
    """A mask of 512 x 512, of lists as they should be but for those that are changed."""
    made = create_block_mask(near, 1, 1, 512, 512)
    given = dict(mask=made.mask, shape=made.shape, block=block)
    return BlockMask(**given | dict(partial=made.partial, full=made.full) | changed)


@pytest.mark.parametrize("block", [(100, 128), (128, 8), (128, 120)], ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_other_blocks_are_refused(maker, block):
    with pytest.raises(ArgumentError, match="multiples of 16"):
        MAKERS[maker](block)


def lists(counts, indices):
    counts = torch.tensor(counts, dtype=torch.int32)
    return BlockLists(counts.view(1, 1, -1), torch.tensor(indices).int().view(1, 1, 4, -1))


WRONG = {
    "past the blocks": (lists([1] * 4, [0, 1, 2, 4]), "below 4"),
    "negative": (lists([1] * 4, [0, 1, -1, 3]), "below 4"),
    "past the width": (lists([1, 1, 2, 1], [0, 1, 2, 3]), "at most 1"),
    "count below 0": (lists([1, 1, -1, 1], [0, 1, 2, 3]), "at most 1"),
    "of int64": (BlockLists(*(x.long() for x in lists([1] * 4, [0] * 4))), "must be int32"),
    "of another grid": (
        BlockLists(*(x[:, :, :3] for x in lists([1] * 4, [0] * 4))),
        "must be int32",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", ["partial", "full"])
def test_wrong_lists_are_refused(name, kind):
    wrong, message = WRONG[name]
    with pytest.raises(ArgumentError, match=message):
        by_hand((128, 128), **{kind: wrong})


def test_full_blocks_end_before_the_sequence():
    made = create_block_mask(near, 1, 1, 500, 500)
    full = lists([1, 0, 0, 0], [3, 0, 0, 0])
    with pytest.raises(ArgumentError, match="list the others as partial"):
        BlockMask(made.mask, made.shape, made.block, made.partial, full)
    flex = flex_attention.BlockMask.from_kv_blocks(
        torch.zeros(1, 1, 4, dtype=torch.int32),
        torch.zeros(1, 1, 4, 4, dtype=torch.int32),
        torch.full((1, 1, 4), 4, dtype=torch.int32),
        torch.arange(4, dtype=torch.int32).expand(1, 1, 4, 4).contiguous(),
        BLOCK_SIZE=128,
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= 0,
        seq_lengths=(500, 500),
    )
    kinds = BlockMask.from_flex(flex).kinds()[0, 0]
    assert (kinds[:3, :3] == 2).all() and (kinds[3] == 1).all() and (kinds[:, 3] == 1).all()


def test_the_operator_refuses_other_lists():
    """Any code may call it, such as a program that was saved and changed."""
    given, _ = tensors(256, 256)
    blocks = create_block_mask(near, 1, 1, 256, 256)
    exported = torch.export.export(Model(blocks), tuple(given))
    program = exported.module()
    torch.testing.assert_close(program(*given), Model(blocks)(*given))
    node = next(n for n in exported.graph.nodes if "tilewise" in str(n.target))
    place = [str(a.name) for a in node.target._schema.arguments].index("mask_block")
    args = list(node.args)
    for block, message in (((64, 64), "must be int32"), ((100, 128), "multiples of 16")):
        args[place] = list(block)
        node.args = tuple(args)
        with pytest.raises((ArgumentError, RuntimeError), match=message):
            exported.module()(*given)


class Model(torch.nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, q, k, v):
        return tilewise.attention(q, k, v, block_mask=self.blocks)


HOSTILE = {
    "indices": dict(indices=10**6),
    "negative": dict(indices=-(10**6)),
    "counts": dict(counts=2**31 - 1),
    "negative counts": dict(counts=-5),
    "both": dict(counts=10**6, indices=2**31 - 1),
}


@pytest.mark.parametrize(
    "backend", ["portable", pytest.param("hopper", marks=pytest.mark.emulator)]
)
@pytest.mark.parametrize("rows", sample([256, 200], 200))
@pytest.mark.parametrize("name", sample(HOSTILE, "both"))
def test_lists_that_changed_read_and_write_nothing_else(name, rows, backend):
    """As the device may change them behind us, or a GPU make them: a wrong result at worst."""
    dtype, headdim = (torch.float32, 16) if backend == "portable" else (torch.bfloat16, 64)
    given, dout = tensors(rows, rows, dtype, headdim)
    blocks = create_block_mask(near, 1, 1, rows, rows, block=(128, 128))
    everything = create_block_mask(mods.mask(lambda *_: True), 1, 1, 256, 256, block=(128, 128))
    full = BlockLists(*(x.clone() for x in everything.full))
    object.__setattr__(blocks, "full", full)
    object.__setattr__(blocks, "transposed", (blocks.transposed[0], full))
    for held in (blocks.partial, full, *blocks.transposed):
        for field, value in HOSTILE[name].items():
            getattr(held, field).fill_(value)
    bias = guarded(torch.randn(1, 1, rows, rows).to(dtype)).requires_grad_()
    how = dict(block_mask=blocks, bias=bias, backend=backend)
    with CONTEXTS[backend](), mock.patch.object(BlockMask, "check", lambda *_, **named: None):
        run(tilewise.attention, given, dout, **how)
