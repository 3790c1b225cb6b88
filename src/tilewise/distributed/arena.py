"""Memory of each rank of a group that the other ranks read: a rank publishes there, the others
pull what they need, and none sends.

An arena has two halves. A call publishes into one of them, meets the others at one barrier, and
pulls; the next call does so in the other half, and its barrier proves that all have pulled what
the first one held. So there is one barrier a call.
"""

from __future__ import annotations

import abc
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .failure import Barrier, check_cpu_group

Tensor = torch.Tensor
LEAST = 1 << 16  # bytes of a half
HALVES = 2


class Arena(abc.ABC):
    """What each kind of memory has in common: halves, growth, the barrier. All ranks must make the
    same calls; an arena grows on all of them at once.
    """

    def __init__(self, group: Any) -> None:
        self.barrier = Barrier(group)
        self.rank, self.ranks = self.barrier.rank, self.barrier.ranks
        self.half, self.room = 0, 0
        self.pulled = 0  # bytes that were read of other ranks, in all

    def publish(self, nbytes: int, asked: str) -> Tensor:
        """Room for what this rank publishes next, uint8; `asked` names the call, and ranks that
        make the same one ask for as many bytes.
        """
        self.barrier.catch_up(asked)
        if not self.room or nbytes > self.room:
            room = max(LEAST, nbytes, 2 * self.room)
            self.grow(HALVES * room, asked)
            self.room = room
        # By barriers, which ranks count alike: a call that raised on one has published on others
        self.half = (self.barrier.number + 1) % HALVES
        return self.of(self.rank, nbytes)

    def meet(self, asked: str) -> None:
        """Waits until all ranks have published for this call, which is named by `asked`."""
        self.barrier.wait(asked)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """An error of this rank is left for the others, which would wait for it."""
        try:
            yield
        except Exception as error:
            self.barrier.abandon(error)
            raise

    def of(self, rank: int, nbytes: int) -> Tensor:
        """What a rank has published, uint8; after `meet`, and until the call after the next."""
        return self.block(rank).narrow(0, self.half * self.room, nbytes)

    @abc.abstractmethod
    def grow(self, nbytes: int, asked: str) -> None:
        """New memory on every rank, which is there on all of them when it returns."""

    @abc.abstractmethod
    def block(self, rank: int) -> Tensor:
        """The memory of a rank as this one sees it, uint8."""


class SharedFile(Arena):
    """On the CPU, ranks of one machine: a file of each rank that all of them map. Files are
    removed as soon as they are mapped, so that nothing stays behind, however a process ends.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.blocks: list[Tensor] = []

    def grow(self, nbytes: int, asked: str) -> None:
        path = _reserve(nbytes)
        try:
            here = f"{socket.gethostname()}\n{path}"
            found = [note.split("\n") for note in self.barrier.wait(asked, here)]
            if len({host for host, _ in found}) > 1:
                hosts = ", ".join(f"rank {rank} on {x[0]}" for rank, x in enumerate(found))
                raise NotImplementedError(
                    f"ranks on several machines ({hosts}): the arena of CPU tensors is a file that "
                    "all ranks map, so run them on one machine"
                )
            blocks = [
                torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
                for _, path in found
            ]
            self.barrier.wait(asked)  # all have mapped it
            self.blocks = blocks
        finally:
            Path(path).unlink()

    def block(self, rank: int) -> Tensor:
        return self.blocks[rank]


def _reserve(nbytes: int) -> str:
    """A new file that has so many bytes, in memory where there is room."""
    shared = Path("/dev/shm")  # its room in a container may be small, and a write past it is fatal
    has_room = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2 * nbytes
    file, path = tempfile.mkstemp(prefix="tilewise-", dir=shared if has_room else None)
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError:
        Path(path).unlink()
        raise
    finally:
        os.close(file)
    return path


_arenas: dict[Any, Arena] = {}


def arena_of(group: Any, device: torch.device) -> Arena:
    """The arena of a process group for tensors on a device, one for all calls."""
    if device.type != "cpu":
        raise NotImplementedError(
            f"tensors on {device}: an arena on GPUs needs symmetric memory "
            "(torch.distributed._symmetric_memory: empty, rendezvous, get_buffer) or CUDA IPC, and "
            "a barrier on the device; neither is written yet, so tilewise.distributed serves CPU "
            "tensors alone"
        )
    if group not in _arenas:
        check_cpu_group(group)
        _arenas[group] = SharedFile(group)
    return _arenas[group]
