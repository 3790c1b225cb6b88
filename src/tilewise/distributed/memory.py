"""Memory that every rank of a group maps of every other, by kind."""

from __future__ import annotations

import abc
import ast
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch

from .failure import Barrier

Tensor = torch.Tensor
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Memory(abc.ABC):
    """Blocks of one kind. Collective: all ranks allocate at the same time. It keeps the blocks that
    it allocated last, and no earlier ones: the pads of a barrier and the blocks of an arena, which
    grow, are of two.
    """

    @abc.abstractmethod
    def allocate(self, barrier: Barrier, nbytes: int, signature: str) -> list[Tensor]:
        """A new block on every rank as this one sees them, uint8, for the call of `signature`. They
        are there on all ranks when it returns.
        """


class Files(Memory):
    """On the CPU, ranks of one machine: a file of each rank that all of them map. Files are
    removed as soon as they are mapped, so that nothing stays behind, however a process ends.
    """

    def allocate(self, barrier: Barrier, nbytes: int, signature: str) -> list[Tensor]:
        path = _reserve(nbytes)
        try:
            found = on_one_machine(barrier, signature, path)
            blocks = [
                torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in found
            ]
            barrier.wait(signature)  # all have mapped it
            return blocks
        finally:
            Path(path).unlink()


class Symmetric(Memory):
    """On GPUs that reach each other: torch's symmetric memory, without NVLink multicast, which a
    program may only use if it owns all GPUs of the machine.

    torch 2.11 to 2.13 agree in what is used here, but for the backend: 2.13 may be told by
    TORCH_SYMMMEM to take NVSHMEM or NCCL, of which `rendezvous` gives no addresses of peers.
    `empty_strided_p2p` and not `empty`, which takes parts of a pool that other users share.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.kept: list[Any] = []  # of the last blocks, which are unmapped when it is dropped

    def allocate(self, barrier: Barrier, nbytes: int, signature: str) -> list[Tensor]:
        self.kept = []  # before more is taken; `grow` has seen that no rank reads it
        os.environ[NO_MULTICAST] = "1"  # which `rendezvous` reads
        name, ranks = self.group.group_name, barrier.ranks
        given = (nbytes,), (1,), torch.uint8, self.device, name
        on_one_machine(barrier, signature)  # and all are here: what follows waits without names
        from torch.distributed import _symmetric_memory

        symmetric = getattr(_symmetric_memory, "_SymmetricMemory")  # noqa: B009  # not public
        if (backend := symmetric.get_backend(self.device)) not in (None, "CUDA"):
            raise RuntimeError(f"symmetric memory's backend is {backend}: CUDA alone maps peers")
        mine = symmetric.empty_strided_p2p(*given)
        handle = symmetric.rendezvous(mine, name)
        if handle.multicast_ptr:
            raise RuntimeError(f"torch made a multicast object although {NO_MULTICAST} is 1")
        self.kept = [mine, handle]
        return [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(ranks)]


class Ipc(Memory):
    """On GPUs of one machine where symmetric memory fails: CUDA IPC, by the handles with which
    torch.multiprocessing shares tensors. A block is mapped for this process's own device, so that
    copies from it go by this device's streams; by those of the device that it is on, copies of
    several ranks at once had a quarter of the bandwidth (four H200s, November 2026).
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.device = device
        self.kept: Tensor | None = None

    def allocate(self, barrier: Barrier, nbytes: int, signature: str) -> list[Tensor]:
        self.kept = None
        mine = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        shared = mine.untyped_storage()._share_cuda_()
        found = on_one_machine(barrier, signature, repr(shared))
        blocks = []
        for rank, note in enumerate(found):
            _, *handles = ast.literal_eval(note)
            if rank == barrier.rank:
                blocks.append(mine)
                continue
            storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *handles)
            blocks.append(torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage))
        barrier.wait(signature)  # all have mapped it
        self.kept = mine
        return [x[:nbytes] for x in blocks]


def on_one_machine(barrier: Barrier, signature: str, note: str = "") -> list[str]:
    """What each rank has to say, once all are here; NotImplementedError on several machines."""
    found = [x.split("\n") for x in barrier.wait(signature, f"{socket.gethostname()}\n{note}")]
    if len({host for host, _ in found}) > 1:
        hosts = ", ".join(f"rank {rank} on {x[0]}" for rank, x in enumerate(found))
        raise NotImplementedError(
            f"ranks on several machines ({hosts}): the arena is memory that all ranks map, so run "
            "them on one machine"
        )
    return [note for _, note in found]


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
