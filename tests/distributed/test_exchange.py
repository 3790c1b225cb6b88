"""What ranks publish, the views of it that are kept, and what NCCL is given of it."""

from types import SimpleNamespace

import torch

from tilewise.distributed.transport.exchange import Published
from tilewise.distributed.transport.halves import Arena
from tilewise.distributed.transport.links import Links
from tilewise.distributed.transport.nodes import Message, Traffic


class Here(Arena):
    """An arena of one rank without a barrier."""

    def __init__(self):
        super().__init__(SimpleNamespace(rank=0, ranks=1, number=0, epoch=0), None)

    def grow(self, room, signature):
        self.memory = SimpleNamespace(
            allocate=lambda host, nbytes, signature: [torch.zeros(nbytes, dtype=torch.uint8)]
        )
        super().grow(room, signature)


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


def test_a_call_of_nccl_has_one_message_of_each_rank():
    """So many calls as a pair of ranks has messages; ranks without one have nothing in it."""
    links, calls = Links.__new__(Links), []
    links.nodes, links.host = SimpleNamespace(rank=1), SimpleNamespace(ranks=4)
    links.own, links.device = True, torch.device("cpu")

    def exchange(outputs, inputs, options):
        calls.append([[x.tolist() for x in tensors] for tensors in (outputs, inputs)])

    links.backend = SimpleNamespace(alltoall=exchange)
    sends = [Message(0, 0, 2), Message(2, 4, 5), Message(0, 7, 8)]
    for is_in_place, owner in ((False, 2), (True, 1)):
        traffic = Traffic(sends, [Message(2, 1, 3)], is_in_place=is_in_place)
        calls.clear()
        for call in links.calls_of(traffic, lambda rank, *ends: 10 * rank + torch.arange(*ends)):
            call(None)
        first = [[], [], [10 * owner + 1, 10 * owner + 2], []], [[10, 11], [], [14], []]
        assert calls == [list(first), [[[]] * 4, [[17], [], [], []]]]
