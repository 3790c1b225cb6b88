"""Several processes of one group, for tests of what they exchange.

    run(main, 3, 1, "x")  # main(rank, 1, "x") on each of three

Those of gloo come of a server that has imported torch and tilewise once, and have one thread each;
on GPUs they begin by themselves, as CUDA asks. Ranks may share a GPU, where NCCL has none of them.
"""

import datetime
import multiprocessing
import os
import socket
import sys
import traceback

from . import watch
from .waits import DEADLINE

PRELOADED = "torch", "torch.distributed.tensor", "torch._dynamo", "tilewise.distributed"
PAUSE = 0.05  # seconds between looks at the ranks


def run(
    main,
    ranks: int,
    *args,
    timeout: float = DEADLINE,
    killed: tuple[int, ...] = (),
    on_gpus: bool = False,
) -> None:
    """Runs `main` on each rank of a group; AssertionError with the tracebacks of those that fail.
    The ranks in `killed` must end by a signal, and the others well.
    """
    context = multiprocessing.get_context("spawn" if on_gpus else "forkserver")
    if not on_gpus:
        context.set_forkserver_preload(PRELOADED)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    said = context.SimpleQueue()
    ended = context.Semaphore(0)
    reports = said, ended, ranks - 1 - len(killed)
    given = main, ranks, port, timeout, args, reports, sys.path, on_gpus, watch.folder_of_ranks()
    started = [context.Process(target=_start, args=(rank, *given)) for rank in range(ranks)]
    for process in started:
        process.start()
    while said.empty() and any(process.is_alive() for process in started):
        started[0].join(PAUSE)
    for process in started:
        process.join(None if said.empty() else 5.0 if on_gpus else 1.0)
        process.kill()  # one that waits for a rank that failed
    failed = []
    while not said.empty():
        failed.append(said.get())
    assert not failed, "\n".join(failed)
    codes = [process.exitcode for process in started]
    # A rank that could not even import `main` has said nothing
    assert all(code < 0 if rank in killed else code == 0 for rank, code in enumerate(codes)), codes


def _start(rank, main, ranks, port, timeout, args, reports, path, on_gpus, folder):
    said, ended, others = reports
    import torch
    import torch.distributed as dist

    sys.path[:] = path
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if on_gpus:
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        count = torch.cuda.device_count()
        torch.cuda.set_device(rank % count)
        backend = "cpu:gloo,cuda:nccl" if ranks <= count else "cpu:gloo,cuda:gloo"
    dist.init_process_group(
        backend,
        init_method=f"tcp://localhost:{port}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )
    # Rank 0 has the server, which ends with its last handle: others may still ask
    store = dist.distributed_c10d._get_default_store().underlying_store.underlying_store
    try:
        with watch.rank(folder):
            main(rank, *args)
    except BaseException:
        said.put(f"rank {rank}:\n{traceback.format_exc()}")
    if rank == 0:
        for _ in range(others):
            ended.acquire(timeout=timeout)
    del store
    ended.release()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)  # gloo's threads may outlive Python's end (pytorch/pytorch#190489)
