"""GPUs of one machine as several nodes, which NCCL connects. Needs two; all there are take part."""

import contextlib
import io
import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from helpers.gpu_ranks import CASES, RANKS, SEQLEN, Whole, faults_of, run
from helpers.waits import SHORT
from torch.distributed.device_mesh import init_device_mesh

import tilewise.distributed as td
from tilewise.distributed.methods import heads, stream
from tilewise.distributed.transport.arena import arena_of
from tilewise.distributed.transport.links import Links

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def on_nodes(rank, names):
    """GPUs as nodes: one each, and of four two each."""
    stream.LEAST_ROWS = stream.LEAST_PAIRS = heads.LEAST_ROWS = 1
    faults = []
    for ranks in (1, 2)[: RANKS // 2]:
        shape = RANKS // ranks, ranks
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("node", "rank"))
        for name in names:
            found = faults_of(Whole(**CASES[name]), mesh)
            faults += [f"{name}, {ranks} GPUs per node, {x}" for x in found]
        nodes = arena_of(td.zigzag(SEQLEN, mesh).group, torch.device("cuda", rank)).nodes
        assert len(nodes.members) == RANKS // ranks
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", ["causal", "window", "sinks", "documents"])
def test_the_bits_of_one_gpu_on_several_nodes(name):
    run(on_nodes, [name])


def lost_between_nodes(rank, victim, calls_again):
    """A rank dies as NCCL moves keys. The next call names it, or stderr where there is none; no
    process is ended by torch's watchdog, and what the stream goes on to compute is NaN.
    """
    mesh = init_device_mesh("cuda", (RANKS, 1), mesh_dim_names=("node", "rank"))
    layout = td.contiguous(1024 * RANKS, mesh)
    q = torch.randn(1, 1024, 2 * RANKS, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        assert td.attention(q, q, q, layout=layout, method="stream").isfinite().all()
    dist.barrier()
    if rank == victim:
        Links.begin = lambda *x: os.kill(os.getpid(), signal.SIGKILL)
    out = td.attention(q, q, q, layout=layout, method="stream")
    lost = rf"rank {victim} \(node {victim}\).* did not"
    if not calls_again:  # but waits for the GPU
        with contextlib.redirect_stderr(io.StringIO()) as output:
            torch.cuda.synchronize()
        assert re.search(f"RankLost: call .*attention.*{lost} exchange", output.getvalue())
        assert out.isnan().all()
    with pytest.raises(td.RankLost, match=lost):
        td.attention(q, q, q, layout=layout, method="stream")
    torch.cuda.synchronize()
    assert out.isnan().all()


@pytest.mark.parametrize("calls_again", [True, False])
def test_a_rank_that_is_killed_as_keys_move_between_nodes(calls_again):
    victim = RANKS - 1
    run(lost_between_nodes, victim, calls_again, killed=(victim,), timeout=5 * SHORT)


def raised_between_nodes(rank):
    """A rank raises as the others wait for its keys: all go on, with another communicator."""
    mesh = init_device_mesh("cuda", (RANKS, 1), mesh_dim_names=("node", "rank"))
    layout = td.contiguous(1024 * RANKS, mesh)
    q = torch.randn(1, 1024, 2 * RANKS, 64, device="cuda", dtype=torch.bfloat16)
    first = td.attention(q, q, q, layout=layout, method="stream")
    begin = Links.begin
    if rank == 1:
        Links.begin = None
    with pytest.raises(
        TypeError if rank == 1 else td.RankMismatch, match="is not|raised TypeError"
    ):
        for _ in range(2):
            out = td.attention(q, q, q, layout=layout, method="stream")
    Links.begin = begin
    again = td.attention(q, q, q, layout=layout, method="stream")
    assert torch.equal(again, first)
    assert rank == 1 or out.isnan().all()


def test_a_rank_that_raises_as_keys_move_between_nodes():
    run(raised_between_nodes, timeout=5 * SHORT)


def queued(rank):
    """An exchange behind other work of the GPU, which takes longer than one may take."""
    mesh = init_device_mesh("cuda", (RANKS, 1), mesh_dim_names=("node", "rank"))
    layout = td.contiguous(1024 * RANKS, mesh)
    q = torch.randn(1, 1024, 2 * RANKS, 64, device="cuda", dtype=torch.bfloat16)
    first = td.attention(q, q, q, layout=layout, method="stream")
    torch.cuda._sleep(int(4.5 * SHORT * 1.98e9))  # cycles of the fastest clock
    with contextlib.redirect_stderr(io.StringIO()) as output:
        out = td.attention(q, q, q, layout=layout, method="stream")
        torch.cuda.synchronize()
    assert "RankLost" not in output.getvalue()
    assert torch.equal(out, first)


def test_what_a_gpu_does_before_an_exchange_is_no_wait():
    run(queued, timeout=5 * SHORT)
