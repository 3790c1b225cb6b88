"""Ranks of one machine as ranks of several nodes: memory of another node cannot be mapped."""

import contextlib

import torch

from tilewise.distributed.transport import memory

_mapped = memory._mapped


class Elsewhere:
    """Files of ranks of other nodes are not there, or others that have their names."""

    def __init__(self, nodes, rank, is_empty=False):
        self.nodes, self.rank, self.is_empty, self.count = nodes, rank, is_empty, 0

    def __call__(self, path, nbytes):
        peer, self.count = self.count % len(self.nodes), self.count + 1
        if self.nodes[peer] == self.nodes[self.rank]:
            return _mapped(path, nbytes)
        if self.is_empty:
            return torch.zeros(nbytes, dtype=torch.uint8)
        return _mapped(path + "-", nbytes)


@contextlib.contextmanager
def elsewhere(nodes, rank, **how):
    """Inside, memory is mapped of ranks of the same node alone; `nodes` has the node of each."""
    memory._mapped = Elsewhere(nodes, rank, **how)
    try:
        yield
    finally:
        memory._mapped = _mapped


def members_of(nodes):
    """The ranks of each node."""
    return tuple(sorted({tuple(i for i, x in enumerate(nodes) if x == node) for node in nodes}))
