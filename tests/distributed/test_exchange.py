"""What ranks publish, and the views of it that are kept."""

from types import SimpleNamespace

import torch

from tilewise.distributed.transport.exchange import Published
from tilewise.distributed.transport.halves import Arena


class Here(Arena):
    """An arena of one rank without a barrier."""

    def __init__(self):
        super().__init__(SimpleNamespace(rank=0, ranks=1, number=0, epoch=0), None)

    def grow(self, nbytes, signature):
        self.memory = SimpleNamespace(
            allocate=lambda *asked, **more: [torch.zeros(nbytes, dtype=torch.uint8)]
        )
        super().grow(nbytes, signature)


def test_views_are_kept_until_the_memory_grows():
    arena, x = Here(), torch.randn(4, 3, 8)
    published = Published(arena, [x], [4])
    arena.publish(published.nbytes, "")
    published.view(0, 0).copy_(x)
    rows = published.pull(0, 0, start=1, stop=3)
    again = Published(arena, [x + 1], [4])
    assert again.pull(0, 0, start=1, stop=3) is rows and torch.equal(rows, x[1:3])
    arena.half = 1 - arena.half
    assert again.pull(0, 0, start=1, stop=3).data_ptr() != rows.data_ptr()
    room = arena.publish(1 << 20, "")
    assert [*map(id, arena.views.values())] == [id(room)]
