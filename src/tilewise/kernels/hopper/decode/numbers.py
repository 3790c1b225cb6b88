"""Numbers of parts and slices: with which one each program begins, which follows, and how counters
are left. Beside chunks only some programs have any, and the others leave their SMs.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.split_schedule import LAST
from ..dependents import number_of_sm
from ..work import fetch_next_tile, fetched_tile, reset_counter

ENDED = gl.constexpr(1)  # the counter of programs that have ended, behind that of numbers


class Rates(NamedTuple):
    """How decodes and chunks share SMs."""

    COST_OF_CHUNK: float  # an SM's time for a key in a chunk's tile over that in one of decodes
    ENOUGH: float  # of the SMs, to decode at the rate of memory
    STEP: int = 1  # SMs that decode are a multiple of so many


@gluon.constexpr_function
def rates_of(cache, programs):
    """How a launch that has so many programs on an SM shares SMs with chunks: of an H100, whose
    best numbers of SMs these give (docs/design/decode.md).
    """
    if programs == 1:
        return Rates(1.0, 0.5)
    return Rates(1.7, 1 / 3, STEP=2) if cache == "" else Rates(1.4, 2 / 3, STEP=2)


@gluon.constexpr_function
def decodes_by_sm(chunk, programs):
    """Whether SMs decode, with all their programs, or are left by all: chunks need whole SMs."""
    return chunk > 0 and programs > 1


@gluon.jit
def first_number(programs, counters, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The number that a program begins with; none of those that leave their SM to chunks."""
    if decodes_by_sm(FEATURES.CHUNK, TILE.PROGRAMS):
        decodes = is_on_decoding_sm(programs, TILE=TILE)
        fetched = fetch_next_tile(counters, decodes)
        return gl.where(decodes, fetched_tile(fetched, 0), LAST)
    elif FEATURES.CHUNK > 0:
        return gl.where(gl.program_id(0) < programs, gl.program_id(0), LAST)
    else:
        return gl.program_id(0)


@gluon.jit
def is_on_decoding_sm(decoding, TILE: gl.constexpr):
    """Whether a program is on one of the SMs that decode, or the first, so that there is one.

    Only the hardware says which SM a program is on. 63 decodes of 8 bits and a chunk of 2Ki took an
    H100 1,120 us where the two SMs of a pair were of both kinds, and 740 where of one: they may
    share their way to memory. So pairs decode, evenly among all.
    """
    sms = gl.cdiv(gl.num_programs(0), TILE.PROGRAMS)
    pair = number_of_sm() // 2
    return (pair * decoding % sms < decoding) | (gl.program_id(0) == 0)


@gluon.jit
def next_number(fetched, programs, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The number after it."""
    if decodes_by_sm(FEATURES.CHUNK, TILE.PROGRAMS):
        return fetched_tile(fetched, 0)
    elif FEATURES.CHUNK > 0:
        return fetched_tile(fetched, programs)
    else:
        return fetched_tile(fetched)


@gluon.jit
def end_numbers(
    number, stop, programs, counters, FEATURES: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """Resets the counters for the next launch, by the program whose last number is the last of all;
    where SMs decode no program knows which that is, and those that end are counted.
    """
    if decodes_by_sm(FEATURES.CHUNK, TILE.PROGRAMS):
        ended = gl.atomic_add(counters.counter + ENDED, 1, sem="acq_rel")
        if ended == gl.num_programs(0) - 1:
            gl.atomic_xchg(counters.counter, 0, sem="relaxed")
            gl.atomic_xchg(counters.counter + ENDED, 0, sem="relaxed")
    elif FEATURES.CHUNK > 0:
        reset_counter(counters, number, tiles=stop, programs=programs)
    else:
        reset_counter(counters, number, tiles=stop)
