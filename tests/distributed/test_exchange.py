"""Copies between tensors of rows, by elements of 16 bytes where that can be."""

from types import SimpleNamespace

import pytest
import torch

import tilewise.distributed as td
from tilewise.distributed.exchange import Published, copy, is_wide, place
from tilewise.distributed.halves import Arena


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("columns", "first"), [(8, 0), (8, 1), (12, 0), (1, 0)])
def test_any_rows_are_copied(dtype, columns, first):
    x = torch.randn(5, 3, 32, dtype=torch.float64).to(dtype)
    x = x[:, :, first : first + columns]
    assert is_wide(x) == (first * x.itemsize % 16 == 0)
    into = torch.zeros(3, 5, 2, columns, dtype=dtype)
    copy(x.transpose(0, 1), into[:, :, 1])
    assert torch.equal(into[:, :, 1], x.transpose(0, 1)) and (into[:, :, 0] == 0).all()


def test_nothing_is_copied():
    copy(torch.zeros(0, 8), torch.zeros(0, 8))
    copy(torch.zeros(3, 0), torch.zeros(3, 0))
    copy(torch.zeros(4, 3, 8)[:, 1:1], torch.zeros(4, 3, 8)[:, 2:2])


@pytest.mark.parametrize("layout", [td.zigzag(48, 2), td.striped(48, 2, block=3)])
def test_rows_are_placed_at_their_positions(layout):
    for rank in range(2):
        mine, whole = layout.at(rank), torch.randn(2, 48, 3, 8)
        into = torch.zeros(2, 48, 2, 3, 8)
        place(mine, mine.shard(whole), into[:, :, 1])
        assert torch.equal(mine.shard(into[:, :, 1]), mine.shard(whole))
        assert into.count_nonzero() == whole.numel() // 2


class Here(Arena):
    """An arena of one rank without a barrier."""

    def __init__(self):
        super().__init__(SimpleNamespace(rank=0, ranks=1, number=0, catch_up=str), None)

    def grow(self, nbytes, signature):
        self.memory = SimpleNamespace(
            allocate=lambda *asked: [torch.zeros(nbytes, dtype=torch.uint8)]
        )
        super().grow(nbytes, signature)


def test_views_are_kept_until_the_memory_grows():
    arena, x = Here(), torch.randn(1, 4, 3, 8)
    published = Published(arena, [x], [4])
    arena.publish(published.nbytes, "")
    published.view(0, 0).copy_(x)
    rows = published.pull(0, 0, 1, 3)
    again = Published(arena, [x + 1], [4])
    assert again.pull(0, 0, 1, 3) is rows and torch.equal(rows, x[0, 1:3])
    arena.half = 1 - arena.half
    assert again.pull(0, 0, 1, 3).data_ptr() != rows.data_ptr()
    arena.publish(1 << 20, "")
    assert not arena.views
