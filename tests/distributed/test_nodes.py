"""Which ranks are a node: those that map each other's memory, whatever their machines and files are
called, or those that a mesh gives.
"""

import os
import random
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.lives import Store
from helpers.nodes import elsewhere, members_of
from helpers.processes import run
from helpers.waits import DEADLINE
from torch.distributed.device_mesh import DeviceMesh

import tilewise.distributed as td
from tilewise.distributed.layouts.group import timeout_of
from tilewise.distributed.transport import arena as arenas
from tilewise.distributed.transport import memory
from tilewise.distributed.transport.failure import listed

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

CPU = torch.device("cpu")


def attended(layout=None):
    layout = td.contiguous(12) if layout is None else layout
    x = torch.randn(1, layout.tokens, 2, 8)
    assert td.attention(x, x, x, layout=layout).isfinite().all()


def partitions(rank, seed):
    """Any nodes are found; ranks of one node that share no memory are refused by name."""
    draw, host = random.Random(seed), arenas.host_of(dist.group.WORLD)
    together = host.nodes
    for _ in range(12):
        nodes = [draw.randrange(3) for _ in range(4)]
        members = members_of(nodes)
        with elsewhere(nodes, rank, is_empty=draw.random() < 0.5):
            if len(members) == 1:
                assert len(memory.Files().allocate(host, 4096, "blocks")) == 4
            else:
                names = " and ".join(map(listed, members))
                with pytest.raises(NotImplementedError, match=f"^{names} share no memory by Files"):
                    memory.Files().allocate(host, 4096, "blocks")
            found = memory.find_nodes(host, None)
            assert host.nodes == members and (found is None) == (len(members) == 1)
            if found is not None:
                assert found.members == members and rank in found.mine
            blocks = memory.Files().allocate(host, 4096, "blocks")
            assert [x is not None for x in blocks] == [nodes[rank] == x for x in nodes]
        host.nodes = together
    mapped, memory._mapped = memory._mapped, lambda path, nbytes: None
    for _ in range(2):
        match = "^rank 0 and rank 1 and rank 2 and rank 3 share no memory"
        with pytest.raises(NotImplementedError, match=match):
            attended()
    memory._mapped = mapped
    attended()


def test_nodes_are_found_by_proof():
    run(partitions, 4, 8)


def one_way(rank):
    """What ranks map is no partition of them into nodes: ranks 0 and 2 do not map each other."""
    nodes = [0, 0, 1] if rank == 0 else [1, 0, 0] if rank == 2 else [0, 0, 0]
    with elsewhere(nodes, rank):
        for _ in range(2):
            match = "^ranks 0, 1 and ranks 0, 1, 2 and ranks 1, 2 share no memory by Files"
            with pytest.raises(NotImplementedError, match=match):
                attended()
    attended()


def test_nodes_are_a_partition():
    run(one_way, 3)


def given(rank):
    """A mesh gives nodes: of one machine any, but none of ranks that share no memory."""
    for ranks in ([[0, 2], [3, 1]], [[0, 1, 2, 3]], [[0], [1], [2], [3]]):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("node", "rank"))
        layout = td.zigzag(12, mesh)
        attended(layout)
        nodes = arenas.arena_of(layout.group, CPU).nodes
        order = dist.get_process_group_ranks(layout.group)
        members = ((0, 1, 2, 3),) if nodes is None else nodes.members
        assert sorted([order[x] for x in node] for node in members) == sorted(map(sorted, ranks))
        assert td.striped(12, mesh).group is layout.group
        assert timeout_of(layout.group) == timeout_of(dist.group.WORLD)
    with elsewhere([0, 0, 1, 1], rank):
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("node", "near"))
        with pytest.raises(NotImplementedError, match="share no memory by Files: ranks of a node"):
            attended(td.zigzag(12, mesh))
    cube = DeviceMesh("cpu", [[[0, 1], [2, 3]]])
    with pytest.raises(NotImplementedError, match="DeviceMesh of 3 dimensions"):
        td.zigzag(12, cube)
    data = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))
    with pytest.raises(NotImplementedError, match='of which the first is named "node"'):
        td.zigzag(12, data)
    larger = DeviceMesh("cpu", [[[0, 1], [2, 3]]], mesh_dim_names=("dp", "node", "cp"))
    attended(td.zigzag(12, larger["node", "cp"]))


def test_nodes_of_a_mesh():
    run(given, 4)


def remade(rank):
    """A mesh that is made again, with a group that was destroyed, has a group of its own."""
    store = Store(rank, 4)
    for _ in range(2):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("node", "rank"))
        layout = td.zigzag(12, mesh)
        attended(layout)
        assert arenas.arena_of(layout.group, CPU).nodes.members == ((0, 1), (2, 3))
        dist.destroy_process_group()
        assert not arenas._arenas
        store.made(dist.init_process_group, "gloo", store=store.store, rank=rank, world_size=4)


def test_a_mesh_that_is_made_again():
    run(remade, 4)


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "long_sequence.py"
RANKS = """
import runpy, sys
sys.path[:0] = {path!r}
import torch, torch.distributed as dist
from tilewise.distributed.transport.arena import arena_of

losses = runpy.run_path({example!r})["main"](sys.argv[1:])
nodes = arena_of(dist.group.WORLD, torch.device("cpu")).nodes
assert nodes.members == ((0, 1), (2, 3)), nodes.members
if dist.get_rank() == 0:
    print("losses", *map(repr, losses), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["stream", "ring"])
def test_two_nodes_by_torchrun(tmp_path, method):
    """Two mount namespaces of one machine and name, each with a /dev/shm of its own."""
    own = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "node"]
    try:
        subprocess.run([*own, "true"], check=True, capture_output=True, timeout=DEADLINE)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespace: {error}")
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(path=sys.path, example=str(EXAMPLE)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = f"-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --master-port {port}"
    options = ["--steps", "8", "--method", method]
    environment = os.environ | dict(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    begun = []
    for node in range(2):
        ranks = f"--master-addr 127.0.0.1 --node-rank {node}"
        command = [*own, sys.executable, *torchrun.split(), *ranks.split(), str(script), *options]
        pipe = subprocess.PIPE
        begun.append(subprocess.Popen(command, env=environment, stdout=pipe, text=True))
    said = "".join(x.communicate(timeout=DEADLINE)[0] for x in begun)
    assert [x.returncode for x in begun] == [0, 0]
    losses = next(x for x in said.splitlines() if x.startswith("losses")).split()[1:]
    expected = runpy.run_path(str(EXAMPLE))["main"](["--steps", "8"])
    found = torch.tensor(list(map(float, losses)), dtype=torch.float64)
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-6, atol=0)
