"""Ranks of several nodes, which share no memory between them: every result and gradient has the
bits of the same ranks on one node, which other tests hold to one process.
"""

import functools
import importlib
import itertools
import random
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.device_arena import device_arena
from helpers.nodes import elsewhere, members_of
from helpers.processes import run
from helpers.shards import FEATURES, NAMES, OF_HEADS, Case, deals, merges
from helpers.tiers import sample, sample_rows

import tilewise
import tilewise.distributed as td
from tilewise.distributed.layouts.work import Band, keys_of
from tilewise.distributed.methods import heads, stream
from tilewise.distributed.methods.shard_call import ShardCall
from tilewise.distributed.transport.arena import arena_of
from tilewise.distributed.transport.halves import Arena
from tilewise.distributed.transport.links import Links

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

CPU = torch.device("cpu")
TWO_BY_TWO, UNEVEN, SINGLE, MIXED = (0, 0, 1, 1), (0, 1, 1), (0, 1), (0, 1, 0, 2)


class Pair:
    """One group of all ranks on one node, and another on several."""

    def __init__(self, rank, nodes):
        self.rank, self.nodes = rank, nodes
        self.one, self.several = dist.group.WORLD, dist.new_group(range(len(nodes)))

    def compare(self, case, layout, what, **options):
        """The call gives the same bits on both groups."""
        found = []
        for group in (self.one, self.several):
            dealt = case.deal(td.from_positions(positions_of(layout), group))

            def attend(*tensors, dealt=dealt, **given):
                return td.attention(*tensors, layout=dealt, **given, **options)

            with elsewhere(self.nodes, self.rank) if found else elsewhere([0] * 4, self.rank):
                found.append(case.run(attend, share=dealt.shard))
        for name, x, y in zip(NAMES, *found):
            assert torch.equal(x, y), f"{what}: {name} has other bits"

    def check(self):
        """The nodes were those."""
        nodes = arena_of(self.several, CPU).nodes
        assert nodes.members == members_of(self.nodes)
        assert arena_of(self.one, CPU).nodes is None


def positions_of(layout):
    """The positions of all ranks."""
    return [torch.cat([torch.arange(a, b) for a, b in (*x, (0, 0))]) for x in layout.runs]


def features(rank, nodes, part, parts):
    """Every feature by every method that serves it, by groups of heads, too."""
    if part % 2:
        stream.LEAST_ROWS = heads.LEAST_ROWS = 1
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    pair, n = Pair(rank, nodes), len(nodes)
    for i, (name, asked) in enumerate((FEATURES | OF_HEADS).items()):
        if i % parts != part:
            continue
        case, what = Case(4, 2, **asked), f"{name} on {nodes}"
        made = deals(case.seqlen, dist.group.WORLD)
        for _ in range(i % 4):
            next(made)
        pair.compare(case, next(made), f"{what}, stream", method="stream")
        by_runs = dict(bitwise=False, method="stream")
        pair.compare(case, next(made), f"{what}, stream by runs", **by_runs)
        if merges(case):
            ring = dict(bitwise=False, method="ring")
            pair.compare(case, next(made), f"{what}, ring", **ring)
        if name not in OF_HEADS:
            of_heads = Case(2 * n, n, **asked)
            by_heads = dict(method="heads", deterministic=True)
            pair.compare(of_heads, next(made), f"{what}, heads", **by_heads)
    pair.check()


def moved(rank):
    """Each byte enters a node once, and none does that no query there needs."""
    pair, seqlen, row = Pair(rank, TWO_BY_TWO), 160, 2 * 2 * 16 * 4  # bytes of K and V
    q, k, v = torch.randn(3, 1, seqlen, 2, 16).unbind(0)
    for window in (None, (12, 0), (0, 0)):
        for make in (td.zigzag, td.contiguous, functools.partial(td.striped, block=8)):
            layout = make(seqlen, pair.several)
            with elsewhere(TWO_BY_TWO, rank):
                arena = arena_of(pair.several, CPU)
                before = arena.received
                asked = dict(layout=layout, window=window, causal=True, method="stream")
                td.attention(*map(layout.shard, (q, k, v)), **asked)
            received: list = [None] * 4
            dist.all_gather_object(received, arena.received - before)
            for node in members_of(TWO_BY_TWO):
                band = Band(-1 if window is None else window[0], 0)
                spans = [x for reader in node for x in layout.at(reader).spans]
                own = sum(layout.counts[x] for x in node)
                seen = sum(b - a for a, b in keys_of(spans, band))
                assert sum(received[x] for x in node) == (seen - own) * row


def test_each_byte_enters_a_node_once():
    run(moved, 4)


def by_default(rank):
    """Stream, also where one node takes heads."""
    pair, chosen = Pair(rank, SINGLE), []
    module = importlib.import_module("tilewise.distributed.api.attention")
    choose = module.choose
    module.choose = lambda *x, **named: chosen.append(choose(*x, **named)) or chosen[-1]
    x = torch.randn(1, 32, 4, 16, requires_grad=True)
    for group, nodes in ((pair.several, SINGLE), (pair.one, (0, 0))):
        with elsewhere(nodes, rank):
            td.attention(x, x, x, layout=td.zigzag(64, group))
    assert chosen == ["stream", "heads"]


@pytest.mark.parametrize(
    "tokens, ranks, forward, backward", [(8192, 2, 2, 1), (16384, 2, 4, 1), (16384, 16, 4, 4)]
)
def test_groups_of_heads_between_nodes(tokens, ranks, forward, backward):
    """A backward of few keys per query takes fewer, as each group costs launches and exchanges."""
    spec, arena = ShardCall(td.zigzag(tokens * ranks, ranks)), SimpleNamespace(nodes=1)
    q, k = (torch.empty(1, tokens, n, 128, device="meta") for n in (32, 8))
    assert len(stream.groups_of(arena, spec, q, k=k, v=k)) == forward
    groups = stream.groups_of(arena, spec, q, k=k, v=k, parts_in=torch.float32)
    assert len(groups) == backward


def test_the_default_between_nodes():
    run(by_default, 2)


def delayed(rank, nodes):
    """Ranks that are late at random: what arrives never overwrites what another still reads."""
    draw = random.Random(rank)

    def late(owner, name):
        step = getattr(owner, name)

        def stepping(*x, **options):
            time.sleep(draw.choice([0, 0, 0.002, 0.01]))
            return step(*x, **options)

        setattr(owner, name, stepping)

    for owner, name in ((Links, "begin"), (Links, "finish"), (Arena, "meet"), (Arena, "publish")):
        late(owner, name)
    stream.LEAST_ROWS = heads.LEAST_ROWS = 1
    pair, n = Pair(rank, nodes), len(nodes)
    case = Case(2 * n, n, causal=True, sinks=True)
    methods = [dict(method="stream"), dict(method="heads", deterministic=True)]
    methods += [dict(method=x, bitwise=False) for x in ("stream", "ring")]
    for number in range(24):
        case.k = case.k.roll(1, 1)  # other keys in each call
        options = methods[number % len(methods)]
        layout = td.striped(case.seqlen, dist.group.WORLD, block=8 + number)
        pair.compare(case, layout, f"call {number}, {options}", **options)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [TWO_BY_TWO, UNEVEN, SINGLE])
def test_ranks_that_are_late(nodes):
    run(delayed, len(nodes), nodes)


def other_forms(rank):
    """Compiled, inside of the context, by a mesh, and without gradients."""
    torch.manual_seed(rank)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "rank"))
    for group in (dist.group.WORLD, mesh):
        layout = td.zigzag(40, group)
        q, k, v, dout = torch.randn(4, 1, layout.tokens, 4, 16).unbind(0)

        def attend(q, k, v, layout=layout):
            return td.attention(q, k, v, layout=layout, causal=True, method="stream")

        def inside(q, k, v, layout=layout):
            with td.context_parallel(layout, method="stream"):
                return tilewise.attention(q, k, v, causal=True)

        found = []
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        for call in (attend, compiled, inside):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = call(*leaves)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
            with torch.no_grad():
                assert torch.equal(call(q, k, v), out)
        assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other))
        assert arena_of(layout.group, CPU).nodes.members == ((0,), (1,))


def forms(rank):
    with elsewhere(SINGLE, rank):
        other_forms(rank)


@pytest.mark.slow
def test_other_forms():
    run(forms, 2)


def on_device(rank, nodes):
    """The arena of GPUs, with its barriers and sums in the interpreter."""
    torch.use_deterministic_algorithms(True)
    stream.LEAST_ROWS = stream.LEAST_PAIRS = 1
    pair, n = Pair(rank, nodes), len(nodes)
    with elsewhere(nodes, rank):
        device_arena(pair.several)
    for name in ("causal", "documents, much", "bf16, sinks", "fewer tokens than ranks"):
        case = Case(2 * n, n, **FEATURES[name])
        for layout in itertools.islice(deals(case.seqlen, dist.group.WORLD), 2):
            for method in ("stream", "heads"):
                what = dict(method=method, deterministic=method == "heads")
                pair.compare(case, layout, f"{name}, {method}", **what)
    pair.check()


@pytest.mark.parametrize("nodes", sample([SINGLE, TWO_BY_TWO, UNEVEN]))
def test_the_arena_of_gpus(nodes):
    run(on_device, len(nodes), nodes)


SHARES = [(nodes, part, 3) for nodes in (TWO_BY_TWO, UNEVEN, SINGLE, MIXED) for part in range(3)]


@pytest.mark.parametrize("nodes, part, parts", sample_rows([*SHARES, (MIXED, 5, 9)], (MIXED, 5, 9)))
def test_features(nodes, part, parts):
    run(features, len(nodes), nodes, part, parts)
