"""Parts of the gradients of keys that are pushed to their owners, one group of heads while the next
is computed: the bits of parts that are pulled in slices.
"""

import pytest
import torch
from helpers.device_arena import CPU, device_arena
from helpers.processes import run
from helpers.shards import Case

import tilewise.distributed as td
from tilewise.distributed.layouts.work import Band, KeyRun, keys_of
from tilewise.distributed.methods import packed_runs, pushed_sums, rows
from tilewise.distributed.transport.exchange import starts_of
from tilewise.distributed.transport.halves import Arena
from tilewise.testing import use_emulator

CAUSAL = Band(right=0)
LAYOUTS = (
    td.zigzag(200, 2),
    td.contiguous(37, 5),
    td.from_positions([torch.arange(7, 9), torch.arange(7), torch.arange(0)], 3),
    td.documents([0, 70, 70, 300], 2),
)


def runs_of(layout, band):
    """The runs of a rank's parts, and the keys that each sees: two that lie end to end, or one of
    the whole sequence.
    """
    packing = packed_runs.packing_of(layout, band) if len(layout.spans) == 2 else None
    if packing is None or packing.copied is None:
        return (KeyRun(0, 0, stop=layout.seqlen),), [keys_of(layout.spans, band)]
    return packing.copied, [keys_of([span], band) for span in layout.spans]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.kind)
@pytest.mark.parametrize("band", [CAUSAL, Band(20, 0), Band()])
def test_each_part_comes_to_the_owner_of_its_key(layout, band):
    """Parts are powers of two, of their rank and run: a sum says which were added."""
    layouts = [layout.at(rank) for rank in range(layout.ranks)]
    if not pushed_sums.serves(layout, band):
        assert any(len(x.spans) > 1 for x in layouts)
        return
    row_bytes, unwritten = (8, 8), 1 << 40
    room = pushed_sums.room_for(layout, band, row_bytes=row_bytes)
    halves = [torch.full((room // 8,), unwritten) for _ in layouts]
    expected = torch.zeros(layout.seqlen, dtype=torch.int64)
    parts = []
    for rank, here in enumerate(layouts):
        runs, seen = runs_of(here, band)
        part = torch.zeros(max(x.row + x.stop - x.start for x in runs), dtype=torch.int64)
        for i, (of_run, keys) in enumerate(zip(runs, seen)):
            for start, stop in keys:
                row = of_run.row + start - of_run.start
                part[row : row + stop - start] = 4**rank << i
                expected[start:stop] += 4**rank << i
        parts.append([part, -part])
        for piece in pushed_sums.pieces_of(here, band, runs=runs, row_bytes=row_bytes):
            first, offset, size = piece.start // 8, piece.offset // 8, piece.nbytes // 8
            target = halves[piece.rank][first : first + size]
            assert (target == unwritten).all()  # once
            target[:] = parts[rank][piece.target][offset : offset + size]
    for rank, here in enumerate(layouts):
        places = pushed_sums.places_on(here, band, runs=runs_of(here, band)[0], device=CPU)
        rows = pushed_sums.received_rows(layout, band, rank)[-1]
        for own, start, sign in zip(parts[rank], starts_of(row_bytes, rows), (1, -1)):
            total = torch.empty(here.tokens, dtype=torch.int64)
            received = halves[rank][start // 8 :][:rows]
            behind = layout.ranks - 1 - rank
            Arena.add_runs(
                None, own, places, None, total, received=received, before=rank, after=behind
            )
            assert torch.equal(total, sign * here.shard(expected, 0))


def test_which_layouts_are_pushed():
    assert pushed_sums.serves(td.zigzag(64, 2), CAUSAL)
    assert not pushed_sums.serves(td.zigzag(64, 4), CAUSAL)  # both runs see keys of others
    assert pushed_sums.serves(td.contiguous(64, 4), Band())
    assert not pushed_sums.serves(td.striped(64, 2, block=8), CAUSAL)


def gradients(layout, case, **more):
    q, k, v = (layout.shard(x).requires_grad_() for x in (case.q, case.k, case.v))
    out = td.attention(q, k, v, layout=layout, method="stream", **more)
    return torch.autograd.grad(out, (q, k, v), layout.shard(case.dout))


def made_in(layout, case, *, most_sharing, **more):
    """The gradients, by parts that are pushed, or pulled of all heads."""
    pushed_sums.MOST_SHARING = most_sharing
    return gradients(layout, case, **more)


def pushed(rank):
    """The bits of parts that are pulled, call after call."""
    pushed_sums.LEAST_ROWS = 1
    begun, begin = [], pushed_sums.PushedSums.begin

    def counting(self, *parts, **more):
        begun.append(self)
        begin(self, *parts, **more)

    pushed_sums.PushedSums.begin = counting
    for asked in (
        dict(causal=True),
        dict(causal=True, window=(60, 0)),
        {},
        dict(causal=True, dtype=torch.bfloat16),
        dict(causal=True, headdim_v=24),
        dict(causal=True, docs=(0, 40, 41, 41, 130, 300)),
    ):
        case = Case(8, 8, seqlen=300, **asked)
        layout = case.deal(td.zigzag(300))
        options = {x: y for x, y in asked.items() if x in ("causal", "window")}
        pulled = made_in(layout, case, most_sharing=0, **options)
        assert not begun
        for _ in range(3):
            found = made_in(layout, case, most_sharing=1, **options)
            assert all(map(torch.equal, found, pulled)), asked
        is_pushed = asked.get("causal", False)  # else both runs of a rank see all keys
        assert len(begun) == 3 * 4 * is_pushed, asked
        assert not any(x.parts for x in begun)
        begun.clear()


def test_two_ranks():
    run(pushed, 2)


def on_device_arena(rank):
    """What GPUs run but for streams: two runs of a rank in one launch, in the emulator."""
    pushed_sums.LEAST_ROWS, rows.working_dtype = 1, lambda x: x.dtype
    device_arena()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    draw, layout = torch.Generator().manual_seed(1), td.zigzag(520)
    tensors = [torch.randn(1, 520, 4, 64, generator=draw).bfloat16() for _ in range(4)]
    q, k, v, dout = (layout.shard(x) for x in tensors)

    def grads():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with use_emulator():
            out = td.attention(*leaves, layout=layout, method="stream", causal=True)
            return torch.autograd.grad(out, leaves, dout)

    pushed_sums.MOST_SHARING = 0
    pulled = grads()
    pushed_sums.MOST_SHARING = 1
    launches, made = [], rows.gradients_of
    rows.gradients_of = packed_runs.gradients_of = lambda *x, **y: (
        launches.append(0) or made(*x, **y)
    )
    for x, y in zip(grads()[1:], pulled[1:]):  # dQ is added up in any order
        assert torch.equal(x, y)
    assert len(launches) == 4


def test_the_arena_of_gpus():
    run(on_device_arena, 2)


def test_groups_of_heads():
    """The first and the last are small; long sequences alone, in the room that keys have had."""
    ask = dict(row_bytes=(512, 512), key_bytes=512)
    groups = pushed_sums._groups(td.zigzag(16384, 2), CAUSAL, 16, **ask)
    assert [len(x) for x in groups] == [2, 6, 6, 2] and groups[-1].stop == 16
    groups = pushed_sums._groups(td.zigzag(32768, 2), CAUSAL, 5, **ask)
    assert [len(x) for x in groups] == [1, 2, 1, 1]
    assert not pushed_sums._groups(td.zigzag(8192, 2), CAUSAL, 16, **ask)
    assert not pushed_sums._groups(td.contiguous(65536, 8), Band(), 16, **ask)
    assert not pushed_sums._groups(td.zigzag(65536, 4), CAUSAL, 16, **ask)
