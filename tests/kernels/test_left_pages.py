"""Pages that a window has left behind may hold anything, and their entries say anything: on every
path over a cache, in the emulator, in the interpreter and on the CPU.
"""

import contextlib

import pytest
import torch
from helpers.left_pages import arguments, in_batch, leave
from helpers.tiers import sample_rows

import tilewise
from tilewise.kernels.hopper.decode import launch
from tilewise.kernels.hopper.fwd import cached as schedules
from tilewise.kernels.hopper.fwd import parts_launch
from tilewise.testing import use_emulator, use_interpreter

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
WHERE = {"hopper": use_emulator, "portable": use_interpreter, "cpu": contextlib.nullcontext}
LEFT = 110


@pytest.fixture
def chunks(monkeypatch):
    """Few queries are enough for the schedule of the training forward; how often a call took it."""
    served, launches_of = [], schedules.launches_of

    def noted(*asked, **options):
        served.append(True)
        return launches_of(*asked, **options)

    monkeypatch.setattr(schedules, "launches_of", noted)
    monkeypatch.setattr(schedules, "least_queries", lambda nheads, group: 9)
    monkeypatch.setattr(schedules, "parts_of", lambda cached, problem: 1)
    return served


def check(at, backend="hopper", left=LEFT, right=0, **options):
    """Bits of a call before and after pages were given away."""
    options = dict(window=(left, right), backend=backend, return_lse=True) | options
    with WHERE[backend]():
        expected = tilewise.attention(**at, **options)
        found = tilewise.attention(**leave(at, left), **options)
    assert expected[0].isfinite().all()
    for mine, exact in zip(found, expected, strict=True):
        assert torch.equal(mine, exact)


CHUNKS = [
    (16, torch.bfloat16, (4, 2), 0),
    (16, E4M3, (4, 2), 0),
    (8, torch.float16, (8, 1), 0),  # tiles of 16 queries
    (32, torch.bfloat16, (4, 2), 3),
    (64, INT8, (4, 2), None),
    (8, E4M3, (8, 1), 0),
    (128, torch.bfloat16, (4, 2), 0),
    (256, torch.bfloat16, (4, 2), 0),
    (256, E4M3, (4, 2), 0),
]


@pytest.mark.parametrize("page_size, dtype, heads, right", sample_rows(CHUNKS, *CHUNKS[:3]))
def test_chunks(page_size, dtype, heads, right, chunks):
    check(in_batch(arguments([70] * 2, [300, 505], page_size, dtype, heads)), right=right)
    assert len(chunks) == 2


@pytest.mark.parametrize("headdims", [(64, 128), (192, 128)])
@pytest.mark.slow
def test_headdims(headdims, chunks):
    check(in_batch(arguments([70], [300], 16, headdims=headdims)))
    assert len(chunks) == 2


@pytest.mark.parametrize("whole", [0, 1])
@pytest.mark.slow
def test_parts(whole, chunks, monkeypatch):
    """Programs share the keys of a tile, or one computes all parts."""
    monkeypatch.setattr(schedules, "parts_of", lambda cached, problem: 2)
    monkeypatch.setattr(parts_launch, "whole_of", lambda *asked, **named: whole * 4)
    check(in_batch(arguments([70], [1100], 16)), left=820)
    assert len(chunks) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.slow
def test_mixed_steps(dtype, chunks):
    at = arguments([1, 70, 3], [310, 300, 505], 16, dtype, heads=(4, 1))
    check(at, max_seqlen_q=70)
    assert len(chunks) == 2


@pytest.mark.slow
def test_one_page_for_all_keys(chunks):
    """Entries of the only page, whose rows past the last key are poisoned."""
    at = in_batch(arguments([9], [14], 16))
    at["k"], at["v"] = (x[at["page_table"][:1, 0].long()] for x in (at["k"], at["v"]))
    at["page_table"] = torch.zeros(1, 20, dtype=torch.int32)
    at["seqused_k"] += 16 * 18
    with use_emulator():
        expected = tilewise.attention(**at, window=(4, 0), backend="hopper")
    assert expected.isfinite().all()


PIECES = [
    ("hopper", 16, torch.bfloat16, 1),
    ("hopper", 16, torch.bfloat16, 2),
    ("hopper", 3, torch.bfloat16, 1),
    ("hopper", 192, torch.bfloat16, 2),
    ("hopper", 16, E4M3, 1),
    ("hopper", 16, INT8, 1),
    ("hopper", 3, E4M3, 1),
    ("portable", 16, torch.bfloat16, 1),
    ("portable", 3, torch.float32, 1),
    ("portable", 16, E4M3, 1),
    ("portable", 192, INT8, 1),
    ("cpu", 16, torch.bfloat16, 1),
    ("cpu", 3, torch.float32, 1),
    ("cpu", 16, E4M3, 1),
]


@pytest.mark.parametrize("backend, page_size, dtype, warpgroups", PIECES)
def test_pieces(backend, page_size, dtype, warpgroups, monkeypatch):
    """Of some queries, as each backend divides keys."""
    monkeypatch.setattr(launch, "warpgroups_of", lambda *asked, **named: warpgroups)
    check(arguments([1, 6, 40], [300, 171, 505], page_size, dtype), backend, right=3)
