"""What `explain --cache` finds: pieces, slots, programs and bytes, with no GPU."""

import pytest

from tilewise.explain.cache import cached_of, explain_cache
from tilewise.explain.cards import card_for
from tilewise.explain.steps import decode
from tilewise.tile.split_kv import pieces

LLAMA = 32, 8, 128


def explained(of, target="sm90", **options):
    pytest.importorskip("triton")
    card = None if target == "cpu" else card_for(target)
    return explain_cache(of, target, card, with_compiler=False, **options)


def test_pieces_slots_and_programs_of_a_batch():
    """Of 4 x 8 blocks' 16 pieces 512 would be two programs an SM, so one walks the first two."""
    found = explained(decode(4, 8192, LLAMA), backend="portable")
    assert found.backend == "portable"
    cut = found.pieces
    assert (cut.split_size, cut.of_longest, cut.total, cut.room) == (512, 16, 64, 16)
    assert cut.slots == 16 * 4 * 32 and cut.slot_bytes == 130 * 4 and cut.idle == 0
    splits, fold = found.launches
    assert splits.kernel == "attn_split_kernel" and splits.tiles == 4 * 8 * 15
    assert fold.kernel == "attn_fold_kernel" and fold.tiles == 4 * 8 * 4  # of 32 columns
    assert found.shape.kv_bytes == 2 * 4 * 8192 * 8 * 128 * 2
    assert found.pieces.state_bytes(found.shape) == 2 * cut.workspace * 15 // 16
    assert found.work.intensity < 4.0 < found.work.roof.ridge
    nbytes, roof = found.work.moved.once, found.work.roof
    assert found.work.least_ms == pytest.approx(nbytes / roof.bandwidth / 1e9)


def test_slots_are_as_the_plan_allocates_them():
    from tilewise.explain.cache import portable_launches

    for of in (decode(3, 5000, LLAMA, queries=5), decode(0, 0, (4, 2, 64), lengths="700,9000,3")):
        cached = cached_of(of, 256)
        partials = portable_launches(cached)[0].args["partials"]
        cut = explained(of, split_size=256, backend="portable").pieces
        numbers = [x.numel() for x in partials[:3]]
        assert sum(numbers) * 4 == cut.workspace and numbers[1] == cut.slots


def test_a_ragged_batch_has_programs_without_a_piece():
    of = decode(0, 0, (4, 2, 64), lengths="700,9000,3")
    found = explained(of, split_size=256, backend="portable")
    each = [len(pieces(0, n, 256)) for n in (700, 9000, 3)]
    assert found.pieces.total == sum(each) and found.pieces.of_longest == each[1]
    assert found.launches[0].tiles == 3 * 2 * each[1]
    assert found.pieces.idle == 2 * (3 * each[1] - sum(each))


def test_programs_that_walk_all_pieces_need_no_slots():
    """Of 32 sequences they are two an SM."""
    found = explained(decode(32, 8192, LLAMA), backend="portable")
    (one,) = found.launches
    assert one.tiles == 32 * 8 and found.pieces.slots == found.pieces.state_bytes(found.shape) == 0


def test_one_piece_and_too_many_need_no_slots():
    short = explained(decode(4, 300, LLAMA), backend="portable")
    assert (
        len(short.launches) == 1
        and short.pieces.slots == 0
        and short.pieces.state_bytes(short.shape) == 0
    )
    long = explained(decode(64, 1 << 15, LLAMA, queries=8), split_size=64, backend="portable")
    assert len(long.launches) == 1 and long.pieces.slots == 0


def test_hopper_divides_tiles_among_its_programs():
    found = explained(decode(32, 8192, LLAMA, page_size=16))
    assert found.backend == "hopper"
    (one,) = found.launches
    assert one.kernel == "hopper_decode_kernel" and one.is_persistent
    assert (one.block_m, one.block_n) == (8, 64)
    assert one.tiles == 32 * 8 * 16 and one.at_once == 132
    cut = found.pieces
    assert cut.slots == 16 * 32 * 32 and not cut.are_all_used
    assert (
        found.pieces.state_bytes(found.shape) == 0
    )  # of tiles that are whole; how many, lengths decide
    chunk = explained(decode(1, 1 << 15, LLAMA, queries=2048))
    assert chunk.launches[0].block_m == 128 and chunk.pieces.slots == 0


def test_a_backend_refuses_as_it_does_in_a_call():
    found = explained(decode(1, 1000, LLAMA), split_size=100)
    assert found.backend == "portable"
    (reason,) = [x.reason for x in found.answers if x.backend == "hopper"]
    assert reason == "split_size=100 is not a multiple of 64 keys"


def test_pages_are_counted_among_the_bytes():
    plain, paged = (decode(2, 1000, LLAMA, page_size=n) for n in (0, 16))
    assert paged.other_bytes - plain.other_bytes == 2 * 63 * 4
    assert paged.kv_bytes == plain.kv_bytes


def test_the_cpu_is_explained():
    found = explained(decode(1, 1000, (4, 2, 32), dtype="float32"), "cpu")
    assert found.backend == "cpu" and found.launches == [] and found.pieces.slots == 0
    assert found.pieces.split_size == 512 and found.pieces.state_bytes(found.shape) == 0


def test_nothing_serves_what_no_kernel_reads():
    found = explained(decode(1, 1000, (2, 2, 1024)))
    assert found.backend == "" and {x.kind for x in found.answers} == {"refuses"}


@pytest.mark.slow
@pytest.mark.compile
def test_the_compiler_is_asked():
    pytest.importorskip("triton")
    of = decode(2, 3000, (8, 2, 64), page_size=16)
    for one in explain_cache(of, "sm90", card_for("sm90")).launches:
        assert not one.failed and one.built.registers > 16
