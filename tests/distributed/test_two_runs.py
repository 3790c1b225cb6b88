"""The backward of stream on Hopper where a rank has two runs of rows: one launch, of keys that are
pulled for each run. In the emulator, over the arena of GPUs without streams.
"""

import pytest
import torch
import torch.distributed as dist
from helpers.call_specs import call_of
from helpers.device_arena import CPU, device_arena
from helpers.processes import run
from helpers.tiers import sample

import tilewise
import tilewise.distributed as td
from tilewise.distributed.layouts.work import Band
from tilewise.distributed.methods import packed_runs, rows
from tilewise.distributed.transport import arena as arenas
from tilewise.testing import use_emulator

SEQLEN, HEADS = 520, (2, 1)
CASES = {
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(240, 0)),
    "full": {},
    "sinks": dict(causal=True, sinks=True),
    "wide heads": dict(causal=True, headdim=256),  # whose gradients of keys are rounded to 16 bits
}


def given(sinks=False, headdim=64, **options):
    draw = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(1, SEQLEN, n, headdim, generator=draw).bfloat16()
        for n in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])
    )
    if sinks:
        options["sinks"] = torch.randn(HEADS[0], generator=draw)
    return (q, k, v), dout, options


def gradients(attend, tensors, dout, options, backwards=1):
    """Of one forward, by so many backwards."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    if "sinks" in options:
        options = {**options, "sinks": options["sinks"].clone().requires_grad_()}
        leaves.append(options["sinks"])
    out = attend(*leaves[:3], **options)
    dout = dout.to(out.dtype)
    return [torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(backwards)]


def both(rank, name):
    arenas._arenas[dist.group.WORLD, CPU] = arena = device_arena()
    tensors, dout, options = given(**CASES[name])
    layout, launches = td.zigzag(SEQLEN), []
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    made = rows.gradients_of

    def noted(*asked, **more):
        launches.append(asked[1].k.shape[1])
        return made(*asked, **more)

    rows.gradients_of = packed_runs.gradients_of = noted
    rows.working_dtype = lambda x: x.dtype  # as on GPUs

    def attend(*given, **more):
        return td.attention(*given, layout=layout, method="stream", **more)

    shards = [layout.shard(x) for x in tensors]
    with use_emulator():
        pulled = arena.pulled
        found, again = gradients(attend, shards, layout.shard(dout), options, backwards=2)
        pulled = arena.pulled - pulled
    for x, y in zip(found[1:3], again[1:3]):
        assert torch.equal(x, y)  # dQ is added up in any order
    exact = [x.double() for x in tensors]
    if "sinks" in options:
        options = {**options, "sinks": options["sinks"].double()}
    (expected,) = gradients(tilewise.attention_reference, exact, dout, options)
    for x, y in zip(found[:3], map(layout.shard, expected)):
        assert (x - y).norm() / y.norm() < 0.006
    if "sinks" in options:
        dist.all_reduce(found[3])
        assert (found[3] - expected[3]).norm() / expected[3].norm() < 0.006
    assert len(launches) == 2  # in two backwards
    seen = {"causal": 650, "window": 522, "full": 1040, "sinks": 650, "wide heads": 650}
    assert rank or launches[0] == seen[name]  # keys of both runs
    assert rank or pulled


@pytest.mark.parametrize("name", sample(CASES, "causal"))
def test_one_launch_of_both(name):
    run(both, 2, name)


@pytest.mark.parametrize(
    "layout, options, packs",
    [
        (td.zigzag(SEQLEN, 2), dict(causal=True), True),
        (td.zigzag(SEQLEN, 2), dict(causal=True, alibi_slopes=torch.rand(HEADS[0])), True),
        (td.zigzag(SEQLEN, 2), dict(causal=True, window=(10, 0)), False),  # no key is seen twice
        (td.zigzag(SEQLEN, 2), dict(window=(30, 9)), False),
        (td.zigzag(SEQLEN, 2).at(1), dict(causal=True), False),  # one run
        (td.striped(SEQLEN, 2, block=16), dict(causal=True), False),
        (td.zigzag(SEQLEN, 2), dict(causal=True, mask_mod=lambda b, h, q, k: q % 3 != k), False),
    ],
)
def test_which_backwards_are_packed(layout, options, packs):
    tensors, _, _ = given()
    q, k, v = (layout.shard(x) for x in tensors)
    with use_emulator():
        spec = call_of(layout, q, k, v, **options)
        packing = packed_runs.packing_for(spec, q, k, v)
    assert (packing is not None) == packs
    spec = call_of(layout, q, k, v, **options)
    assert packed_runs.packing_for(spec, q, k, v) is None  # on a CPU


def test_keys_of_each_run_go_end_to_end():
    layout = td.zigzag(512, 2)
    packing = packed_runs.packing_of(layout, Band(right=0))
    assert packing.starts_k == (0, 128, 640)
    first, second = packed_runs.pulls_into(layout, packing, -1)
    assert first == ((0, 0, 0, 128),)
    assert second == ((0, 0, 128, 256), (0, 128, 512, 640), (1, 0, 256, 512))
