"""One process of lesson 10: RANK of WORLD_SIZE; inputs and results in a folder.

    RANK=0 WORLD_SIZE=2 python rank_10.py FOLDER

`pictures_10.on_ranks` starts them.
"""

import datetime
import os
import sys

import torch
import torch.distributed as dist

import tilewise.distributed as td


def program(q, k, v, how):
    """`out` of this rank's rows, for each way to call; the same on all ranks."""
    layout = td.zigzag(q.shape[1])  # of the ranks there are
    shards = [layout.shard(x) for x in (q, k, v)]
    return {
        name: td.attention(*shards, layout=layout, **options)
        for name, options in how.items()
    }


def main(folder):
    """Joins the group, runs the program and saves what it returned."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=60),
    )
    inputs, how = torch.load(f"{folder}/inputs.pt")
    torch.save(program(*inputs, how), f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
