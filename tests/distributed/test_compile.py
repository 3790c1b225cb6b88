"""torch.compile without a graph break: forward and backward are, to the bit, those of eager mode,
and one graph serves layouts of many lengths.
"""

import functools

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from helpers.processes import run
from helpers.shards import FEATURES, NAMES, Case

import tilewise
import tilewise.distributed as td
from tilewise.ops.context_parallel import unsharded

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

FEW = (
    "causal",
    "bf16, sinks",
    "lse and sinks",
    "documents, much",
    "documents, mask_mod",
    "dropout",
)
MODS = {"mask_mod": tilewise.mods.mask, "score_mod": tilewise.scores.score}
HEADS = dict(method="heads", deterministic=True)


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def same(function, case, layout, what, **more):
    """One call, compiled and as it is."""

    def by(attend, *tensors, return_lse, **given):
        """An lse that is not used has a gradient of 0 in a graph, and of None in eager mode."""
        given = {x: MODS[x](y) if x in MODS else y for x, y in given.items()}
        found = attend(*tensors, return_lse=case.has_dlse, **given, **more)
        return found if case.has_dlse else (found, found)

    graph = compiled(function)
    expected, found = (
        case.run(functools.partial(by, attend), share=layout.shard) for attend in (function, graph)
    )
    assert len(found) == len(expected) == 5 + (case.sinks is not None)
    for name, x, y in zip(NAMES, found, expected):
        assert torch.equal(x, y) and x.dtype == y.dtype, f"{what}: {name} has other bits"


def features(rank, names):
    asked = FEATURES | {"dropout": dict(causal=True, dropout_p=0.3)}
    for name in names:
        case = Case(4, 2, **asked[name])
        layout = case.deal(td.zigzag(case.seqlen))
        attend = functools.partial(td.attention, layout=layout)
        same(attend, case, layout, f"{name}, stream", method="stream")
        if name != "dropout":
            same(attend, case, layout, f"{name}, heads", **HEADS)


def ring(rank):
    case = Case(4, 2, causal=True, sinks=True)
    attend = functools.partial(td.attention, layout=td.zigzag(case.seqlen))
    same(attend, case, td.zigzag(case.seqlen), "ring", method="ring", bitwise=False)


def inside(rank):
    """A function that calls tilewise's functions, in a context that is entered around it or in
    it.
    """
    case = Case(4, 2, causal=True, sinks=True)
    layout = td.zigzag(case.seqlen)

    def around(q, k, v, **asked):
        flash = tilewise.flash_attn_func(q, k, v, causal=True, window_size=(9, -1))
        heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        sdpa = tilewise.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return tilewise.attention(q, k, v, **asked) + flash + sdpa.transpose(1, 2)

    def within(q, k, v, **asked):
        with td.context_parallel(layout):
            return tilewise.attention(q, k, v, **asked)

    with td.context_parallel(layout):
        same(around, case, layout, "around")
    same(within, case, layout, "within")


def lengths(rank):
    """One graph for layouts, and another one outside of them."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attend(q):
        return tilewise.attention(q, q, q, causal=True)

    graph = compiled(attend, counter)
    for seqlen in (32, 36, 40, 44, 48):
        q = torch.randn(1, seqlen, 2, 16)
        for layout in (td.zigzag(seqlen), td.contiguous(seqlen)):
            with td.context_parallel(layout):
                assert torch.equal(graph(layout.shard(q)), layout.shard(attend_whole(q)))
        assert torch.equal(graph(q), attend_whole(q))
    assert counter.frame_count <= 4  # inside and outside, of one length and of any


def attend_whole(q):
    with unsharded():
        return tilewise.attention(q, q, q, causal=True)


def refused(rank):
    """By name, while a graph is made or as it runs, and on all ranks."""
    layout = td.zigzag(20)
    q, learned = torch.randn(1, 10, 2, 16), torch.randn(40, requires_grad=True)
    starts = torch.tensor([0, 20], dtype=torch.int32)
    score = tilewise.scores.score(lambda s, b, h, i, j: s + learned[i])
    wanted = {
        "captured a tensor": dict(score_mod=score),
        "the documents|layout.packed": dict(cu_seqlens_q=starts),
        "all ranks must drop the same": dict(dropout_p=0.5),
        "differ from those of one process": dict(method="ring"),
        r"rank \d has 10 tokens of 20": dict(q=q[:, :9], k=q[:, :9], v=q[:, :9]),
    }
    for match, asked in wanted.items():
        given = dict(q=q, k=q, v=q, layout=layout) | asked
        with pytest.raises(Exception, match=match):
            compiled(td.attention)(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def two(rank):
    features(rank, ("bf16, sinks",))
    inside(rank)
    lengths(rank)
    refused(rank)


def every(rank):
    features(rank, ("causal", "lse and sinks", "documents, much"))
    features(rank, ("documents, mask_mod", "score_mod", "dropout"))
    ring(rank)


def test_two_ranks():
    run(two, 2)


@pytest.mark.slow
def test_every_way():
    run(every, 2)


def trained(rank):
    """A model under inductor, whose gradients are those of eager mode to rounding."""
    layout = td.zigzag(64)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.GELU(), torch.nn.Linear(96, 96))
    x = layout.shard(torch.randn(1, 64, 32))

    def loss(x):
        q, k, v = model(x).unflatten(-1, (3, 2, 16)).unbind(-3)
        return tilewise.attention(q, k, v, causal=True).square().sum()

    found = []
    for function in (loss, compiled(loss, "inductor")):
        with td.context_parallel(layout):
            value = function(x)
        found.append([value, *torch.autograd.grad(value, list(model.parameters()))])
    for eager, graph in zip(*found):
        torch.testing.assert_close(graph, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_inductor():
    run(trained, 2)
