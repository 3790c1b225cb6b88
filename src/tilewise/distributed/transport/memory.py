"""Memory that the ranks of a node map of each other, by kind, and the proof that they do."""

from __future__ import annotations

import abc
import ast
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from .barrier import Barrier
from .failure import listed
from .nodes import Nodes

Tensor = torch.Tensor
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
NONCE = 16  # bytes


class Memory(abc.ABC):
    """Blocks of one kind. Collective: all ranks allocate at the same time. It keeps the blocks that
    it allocated last, and no earlier ones: the pads of a barrier and the blocks of an arena, which
    grow, are of two.
    """

    faults: tuple[type[Exception], ...] = ()  # what is raised where there is no such memory

    def allocate(self, barrier: Barrier, nbytes: int, signature: str) -> list[Any]:
        """Allocates a block on every rank, uint8, for the call of `signature`, and maps those of
        this rank's node; of other nodes it returns None. They are there on all ranks when it
        returns; NotImplementedError on all where some are not.
        """
        blocks, proven, why = self.prove(barrier, nbytes, signature=signature)
        if not all(any(set(x) <= set(y) for y in proven) for x in barrier.nodes):
            self.refuse(barrier, proven, why=why)
        mine = next(x for x in barrier.nodes if barrier.rank in x)
        return [x if rank in mine else None for rank, x in enumerate(blocks)]

    def prove(
        self, barrier: Barrier, nbytes: int, *, signature: str
    ) -> tuple[Sequence[Tensor | None], list[tuple[int, ...]], str]:
        """Allocates and maps blocks; returns them, the groups of ranks that are proven to share
        them, and why others do not.
        """
        handle, why = "", ""
        blocks: Sequence[Tensor | None] = [None] * barrier.ranks
        mine = next(x for x in barrier.nodes if barrier.rank in x)
        try:
            try:
                handle = self.make(nbytes)
            except self.faults as error:
                why = f": {type(error).__name__}: {error}"
            handles = barrier.wait(signature, handle)
            try:
                if all(handles):
                    of_node = [x if rank in mine else "" for rank, x in enumerate(handles)]
                    blocks = self.open(of_node, nbytes, rank=barrier.rank)
            except self.faults as error:
                why = f": {type(error).__name__}: {error}"
            return blocks, nodes_of(barrier, blocks, signature=signature), why
        finally:
            self.settle()

    def refuse(self, barrier: Barrier, proven: list[tuple[int, ...]], *, why: str) -> NoReturn:
        """Raises for nodes whose ranks do not map each other's memory."""
        alone = {(x,) for x in range(barrier.ranks)} - {(x,) for node in proven for x in node}
        names = " and ".join(map(listed, sorted(alone.union(proven))))
        raise NotImplementedError(
            f"{names} share no memory by {type(self).__name__}{why}: ranks of a node map each "
            "other's memory, so make no node of several machines, or of containers without one "
            "/dev/shm"
        )

    @abc.abstractmethod
    def make(self, nbytes: int) -> str:
        """Makes a block of this rank, and returns how others find it."""

    @abc.abstractmethod
    def open(self, handles: list[str], nbytes: int, *, rank: int) -> Sequence[Tensor | None]:
        """Maps blocks, of which that of `rank` is its own; None for those that it cannot, or of
        which the handle is empty.
        """

    def settle(self) -> None:  # noqa: B027  # nothing, of most kinds
        """Cleans up once all ranks have mapped the blocks, or will not."""


class Files(Memory):
    """On CPUs of one machine: a file of each rank that all map, and remove at once."""

    path = ""

    def make(self, nbytes: int) -> str:
        self.path = _reserve(nbytes)
        return self.path

    def open(self, handles: list[str], nbytes: int, *, rank: int) -> Sequence[Tensor | None]:
        return [_mapped(path, nbytes) for path in handles]

    def settle(self) -> None:
        if self.path:
            Path(self.path).unlink()
        self.path = ""


class Symmetric(Memory):
    """On GPUs that reach each other: torch's symmetric memory, without NVLink multicast, which a
    program may only use if it owns all GPUs of the machine.

    torch 2.11 to 2.13 agree in what is used here, but for the backend: 2.13 may be told by
    TORCH_SYMMMEM to take NVSHMEM or NCCL, of which `rendezvous` gives no addresses of peers.
    `empty_strided_p2p` and not `empty`, which takes parts of a pool that other users share.
    """

    faults = RuntimeError, ImportError, AttributeError
    exchanges = 0  # of this process

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.kept: list[Any] = []  # of the last blocks, which are unmapped when it is dropped

    def make(self, nbytes: int) -> str:
        self.kept = []  # before more is taken; `grow` has seen that no rank reads it
        os.environ[NO_MULTICAST] = "1"  # which `rendezvous` reads
        symmetric = _symmetric()
        if (backend := symmetric.get_backend(self.device)) not in (None, "CUDA"):
            raise RuntimeError(f"symmetric memory's backend is {backend}: CUDA alone maps peers")
        name = self.group.group_name
        self.kept = [symmetric.empty_strided_p2p((nbytes,), (1,), torch.uint8, self.device, name)]
        return f"{Symmetric.exchanges} exchanges"

    def open(self, handles: list[str], nbytes: int, *, rank: int) -> Sequence[Tensor | None]:
        if len(set(handles)) > 1:  # of groups that share some ranks: it would wait without names
            raise RuntimeError(f"torch numbers exchanges by process, which made {handles}")
        Symmetric.exchanges += 1
        handle = _symmetric().rendezvous(self.kept[0], self.group.group_name)
        if handle.multicast_ptr:
            raise RuntimeError(f"torch made a multicast object although {NO_MULTICAST} is 1")
        self.kept.append(handle)
        return [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(len(handles))]


class Ipc(Memory):
    """On GPUs of one machine where symmetric memory fails: CUDA IPC, by the handles with which
    torch.multiprocessing shares tensors. A block is mapped for this process's own device, so that
    copies from it go by this device's streams; by those of the device that it is on, copies of
    several ranks at once had a quarter of the bandwidth (four H200s, November 2026).
    """

    faults = (RuntimeError,)

    def __init__(self, group: Any, device: torch.device) -> None:
        self.device = device
        self.kept: Tensor | None = None

    def make(self, nbytes: int) -> str:
        self.kept = None
        self.kept = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return repr(self.kept.untyped_storage()._share_cuda_())

    def open(self, handles: list[str], nbytes: int, *, rank: int) -> Sequence[Tensor | None]:
        blocks = []
        for peer, handle in enumerate(handles):
            if peer == rank:
                blocks.append(self.kept)
                continue
            if not handle:
                blocks.append(None)
                continue
            _, *place = ast.literal_eval(handle)
            storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *place)
            block = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            blocks.append(block[:nbytes])
        return blocks


def nodes_of(
    barrier: Barrier, blocks: Sequence[Tensor | None], signature: str
) -> list[tuple[int, ...]]:
    """Groups ranks that share memory. It is proved: each writes a nonce into its own
    block, and the others read it there. A name of a machine or file may be that of two.
    """
    nonce, mine = os.urandom(NONCE), blocks[barrier.rank]
    if mine is not None:
        mine[:NONCE].copy_(torch.tensor(list(nonce), dtype=torch.uint8))
        synchronize(mine.device)
    written = barrier.wait(signature, nonce.hex())
    nonces = ["" if x is None else bytes(x[:NONCE].tolist()).hex() for x in blocks]
    readable = [str(rank) for rank, (x, y) in enumerate(zip(nonces, written)) if x == y]
    sights = [x.split() for x in barrier.wait(signature, " ".join(readable))]
    pairs = {(i, int(j)) for i, sight in enumerate(sights) for j in sight}
    ranks = range(barrier.ranks)
    nodes = {tuple(j for j in ranks if {(i, j), (j, i)} <= pairs) for i in ranks}
    return sorted(nodes - {()})


def find_nodes(barrier: Barrier, given: tuple[tuple[int, ...], ...] | None) -> Nodes | None:
    """Finds and names the nodes of a group: those that are given, or by files which of its ranks
    share memory. None where all do.
    """
    signature, files = f"tilewise.distributed with nodes {given}", Files()
    if given is not None:
        barrier.nodes = given
        files.allocate(barrier, NONCE, signature)
    else:
        _, proven, why = files.prove(barrier, NONCE, signature=signature)
        if sorted(x for node in proven for x in node) != list(range(barrier.ranks)):
            files.refuse(barrier, proven, why=why)
        barrier.nodes = tuple(proven)
    return Nodes(barrier.nodes, barrier.rank) if len(barrier.nodes) > 1 else None


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _symmetric() -> Any:
    from torch.distributed import _symmetric_memory

    return getattr(_symmetric_memory, "_SymmetricMemory")  # noqa: B009  # not public


def _mapped(path: str, nbytes: int) -> Tensor | None:
    """Maps a file as a tensor; None where there is none of this size. Creates no file."""
    try:
        with Path(path).open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
    except (OSError, ValueError):
        return None


def _reserve(nbytes: int) -> str:
    """Creates a file of `nbytes`, in memory where there is room."""
    shared = Path("/dev/shm")  # its room in a container may be small, and a write past it is fatal
    has_room = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2 * nbytes
    file, path = tempfile.mkstemp(prefix="tilewise-", dir=shared if has_room else None)
    try:
        os.posix_fallocate(file, 0, nbytes)
    except BaseException:
        Path(path).unlink()
        raise
    finally:
        os.close(file)
    return path
