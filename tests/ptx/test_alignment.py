"""Tensors that lie anywhere, as instructions read and write them: an address that is no multiple of
what one moves is an error here, as it is on a GPU.
"""

import random

import pytest
import torch
from fuzz.places import lying
from helpers.alignment import drawn
from helpers.caches import paged, sequences

import tilewise
from ptx import executing
from tilewise.testing import use_emulator, use_interpreter

pytestmark = pytest.mark.slow

READ_BY_TMA = ("q", "k", "v")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("page_size", [16, 3])
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_a_cache(backend, page_size, seed, monkeypatch):
    """Hopper takes all but what its kernel refuses elsewhere, portable kernels take all."""
    s = sequences([1, 3], [70, 30], (4, 2), (64, 64), torch.float16)
    k, v, table = paged(s, page_size)
    arguments = dict(q=torch.cat(s.q), k=k, v=v, page_table=table, seqused_k=s.lengths)
    arguments |= dict(
        cu_seqlens_q=s.starts, alibi_slopes=torch.rand(4), sinks=torch.randn(4).half()
    )
    arguments["out"] = torch.zeros_like(arguments["q"])
    rng = random.Random(seed)
    moved = {name: drawn(rng, x) for name, x in arguments.items()}
    if backend == "hopper":
        whole = (16, 16, 16)
        moved |= {name: lying(arguments[name], 16, whole) for name in READ_BY_TMA}

    def attended(tensors):
        with executing(monkeypatch, options=dict(num_warps=4)), use_emulator(), use_interpreter():
            options = dict(causal=True, split_size=128, backend=backend, return_lse=True)
            return [x.clone() for x in tilewise.attention(**tensors, **options)]

    for mine, theirs in zip(attended(moved), attended(arguments), strict=True):
        assert torch.equal(mine, theirs)
