"""Ranks that do not map each other's memory, whatever their machines and files are called: they are
refused by name on all ranks, and no call reads what another rank has not written.
"""

import random
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run
from helpers.waits import DEADLINE

import tilewise.distributed as td
from tilewise.distributed.transport import arena as arenas
from tilewise.distributed.transport import memory
from tilewise.distributed.transport.failure import listed

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

CPU = torch.device("cpu")
TWO_NODES = "ranks 0, 1 and ranks 2, 3 share no memory by Files"


def refused(match):
    layout = td.contiguous(12)
    x = torch.randn(1, layout.tokens, 2, 8)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=match):
            td.attention(x, x, x, layout=layout)


class Elsewhere:
    """Files of ranks of other nodes are not there, or others that have their names."""

    def __init__(self, nodes, rank, is_empty):
        self.nodes, self.rank, self.is_empty, self.count = nodes, rank, is_empty, 0
        self.mapped = memory._mapped

    def __call__(self, path, nbytes):
        peer, self.count = self.count, self.count + 1
        if self.nodes[peer] == self.nodes[self.rank]:
            return self.mapped(path, nbytes)
        if self.is_empty:
            return torch.zeros(nbytes, dtype=torch.uint8)
        return self.mapped(path + "-", nbytes)


def partitions(rank, seed):
    """Any nodes are found, and the group goes on with memory that all share."""
    draw, host, mapped = random.Random(seed), arenas.host_of(dist.group.WORLD), memory._mapped
    for _ in range(12):
        nodes = [draw.randrange(3) for _ in range(4)]
        memory._mapped = Elsewhere(nodes, rank, draw.random() < 0.5)
        members = {tuple(i for i in range(4) if nodes[i] == node) for node in nodes}
        if len(members) == 1:
            assert len(memory.Files().allocate(host, 4096, "blocks")) == 4
        else:
            names = " and ".join(map(listed, sorted(members)))
            with pytest.raises(NotImplementedError, match=f"^{names} share no memory by Files"):
                memory.Files().allocate(host, 4096, "blocks")
        memory._mapped = mapped
    memory._mapped = lambda path, nbytes: None
    refused("^rank 0 and rank 1 and rank 2 and rank 3 share no memory")
    memory._mapped = mapped
    layout = td.contiguous(12)
    x = torch.randn(1, layout.tokens, 2, 8)
    assert td.attention(x, x, x, layout=layout).isfinite().all()


def test_nodes_are_found_by_proof():
    run(partitions, 4, 8)


RANKS = """
import datetime, os, sys
sys.path[:0] = {path!r}
import torch, torch.distributed as dist
import tilewise.distributed as td
from distributed.test_nodes import TWO_NODES, refused

node = int(sys.argv[1])
children = [os.fork() for _ in range(1)]
rank = 2 * node + (children[0] == 0)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group(
    "gloo", store=dist.FileStore(sys.argv[2], 4), rank=rank, world_size=4,
    timeout=datetime.timedelta(seconds={seconds}),
)
torch.set_num_threads(1)
refused(TWO_NODES)
dist.barrier()
print("refused", rank, flush=True)
if children[0]:
    os.waitpid(children[0], 0)
os._exit(0)
"""


@pytest.mark.slow
def test_two_nodes_of_one_name(tmp_path):
    """Two mount namespaces of one machine, each with a /dev/shm of its own."""
    own = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "node"]
    try:
        subprocess.run([*own, "true"], check=True, capture_output=True, timeout=DEADLINE)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespace: {error}")
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(path=sys.path, seconds=DEADLINE))
    command = [*own, sys.executable, str(script)]
    store = str(tmp_path / "store")
    begun = [
        subprocess.Popen([*command, str(node), store], stdout=subprocess.PIPE, text=True)
        for node in (0, 1)
    ]
    said = "".join(x.communicate(timeout=DEADLINE)[0] for x in begun)
    assert sorted(said.split("\n")) == ["", *(f"refused {rank}" for rank in range(4))]
