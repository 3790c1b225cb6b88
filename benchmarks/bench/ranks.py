"""Processes that measure together: those that torchrun has started, or ones started here, a rank
each. Rank 0 tells what it finds.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 120.0  # seconds: a rank that is lost ends the run
# NVLink multicast, which a program may only use if it owns all GPUs of the machine
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
Tell = Callable[[str], object]
Main = Callable[..., Any]  # main(tell, *args), on each rank; what rank 0 returns is the result


def run_ranks(main: Main, ranks: int, device: str, *args: Any, tell: Tell = print) -> Any:
    """`main(tell, *args)` on every rank of a new group. Under torchrun this process is one of them,
    and only rank 0 has a result, and others None.
    """
    os.environ.update(NO_MULTICAST)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _run(main, int(os.environ["RANK"]), ranks, device, "env://", args, tell)
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"tcp://localhost:{free.getsockname()[1]}"
    said = context.SimpleQueue()
    given = main, ranks, device, address, args, said, sys.path
    started = [context.Process(target=_start, args=(rank, *given)) for rank in range(ranks)]
    for process in started:
        process.start()
    result, failed, ended = None, "", 0
    while ended < ranks and not failed:
        if said.empty() and any(x.exitcode not in (None, 0) for x in started):
            failed = "a process ended without a word"
        elif said.empty():
            started[0].join(0.05)
        else:
            kind, what = said.get()
            if kind == "line":
                tell(what)
            elif kind == "result":
                result = what
            failed = what if kind == "error" else failed
            ended += kind == "end"
    for process in started:
        process.join(1.0 if failed else 30.0)
        process.kill()
    if failed:
        raise RuntimeError(f"a rank failed:\n{failed}")
    return result


def size_under_torchrun() -> int | None:
    """How many processes torchrun has started; None without it."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def _start(rank: int, main: Main, ranks, device, address, args, said, path) -> None:
    sys.path[:] = path
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result = _run(main, rank, ranks, device, address, args, lambda x: said.put(("line", x)))
        if rank == 0:
            said.put(("result", result))
        said.put(("end", ""))
    except BaseException:
        said.put(("error", f"rank {rank}:\n{traceback.format_exc()}"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may outlive Python's end (pytorch/pytorch#190489)


def _end_with_parent() -> None:
    """Ends this rank if the process that started it is killed: ranks would wait for each other on
    their GPUs until the group's timeout, beside whatever runs there next.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(main: Main, rank: int, ranks: int, device: str, address: str, args, tell: Tell) -> Any:
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=TIMEOUT)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(
        backend, init_method=address, rank=rank, world_size=ranks, timeout=timeout
    )
    result = main(tell if rank == 0 else _nothing, *args)
    dist.barrier()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return result if rank == 0 else None


def _nothing(line: str) -> None:
    """Ranks but the first say nothing."""
