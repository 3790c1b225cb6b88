"""A process group that is destroyed and made again on one store: each life is the first. Nothing of
an earlier one is read, and nothing of it stays.
"""

import dataclasses
import gc
import random
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import tilewise.distributed as td
from tilewise.distributed.transport import arena as arenas
from tilewise.distributed.transport.exchange import publish_rows
from tilewise.errors import ArgumentError

from .device_arena import CPU, device_arena


def calls_of(group, value, kind):
    """What each rank publishes in some calls is what the others read. `kind` is a device, or
    "interpreter": the arena of GPUs on a CPU.
    """
    is_cuda = kind == "cuda"
    device = torch.device(kind, torch.cuda.current_device()) if is_cuda else CPU
    arena = device_arena(group) if kind == "interpreter" else arenas.arena_of(group, device)
    for call in range(3):
        mine = torch.full((4,), value + 10.0 * call + arena.rank, device=device)
        found = publish_rows(arena, "rows", [mine], [4] * arena.ranks)
        for peer in range(arena.ranks):
            assert (found.pull(peer, 0) == value + 10 * call + peer).all(), (value, call, peer)
    return weakref.ref(arena)


class Store:
    """The store that all lives share, and how ranks meet there beside any group."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks, self.number = rank, ranks, 0
        self.store = distributed_c10d._get_default_store().underlying_store.underlying_store

    def meet(self):
        self.number += 1
        if self.store.add(f"met/{self.number}", 1) == self.ranks:
            self.store.set(f"all/{self.number}", "")
        self.store.wait([f"all/{self.number}"])

    def made(self, make, *args, **options):
        """A group, without the addresses that gloo has left, some of which it would take."""
        self.meet()
        if self.rank == 0:
            for key in self.store.list_keys():
                if "tilewise" not in key and "met/" not in key and "all/" not in key:
                    self.store.delete_key(key)
        self.meet()
        return make(*args, **options)

    def ours(self):
        self.meet()
        keys = [key for key in self.store.list_keys() if "tilewise" in key]
        self.meet()
        return keys


def lives(rank, ranks, seed, kind):
    """The default group lives several times, and others of all ranks or of two in each life."""
    store, draw, kept = Store(rank, ranks), random.Random(seed), []
    for life in range(3):
        if life:
            dist.destroy_process_group()
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            group_options = dict(store=store.store, rank=rank, world_size=ranks)
            store.made(dist.init_process_group, backend, **group_options)
        members, late = (
            sorted(draw.sample(range(ranks), draw.choice([2, ranks]))),
            draw.randrange(ranks),
        )
        for again in range(3):
            if rank == late:
                time.sleep(0.03)
            if again == 1:
                kept.append(calls_of(dist.group.WORLD, 1000.0 * life, kind))
            group = None
            if rank in members:
                make = dict(ranks=members, use_local_synchronization=True)
                group = store.made(dist.new_group, **make)
                kept.append(calls_of(group, 1000.0 * life + 300 * again, kind))
                dist.destroy_process_group(group)
                layout = td.contiguous(12, len(members))
                x = torch.ones(1, 12, 1, 8)[:, : layout.tokens]
                with pytest.raises(ArgumentError, match="the process group was destroyed"):
                    td.attention(x, x, x, layout=dataclasses.replace(layout, group=group))
            else:
                store.made(lambda: None)
    dist.destroy_process_group()
    gc.collect()
    assert not store.ours()
    assert not arenas._arenas and not arenas._hosts
    assert not any(arena() for arena in kept)
