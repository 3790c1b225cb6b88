"""Signals between the GPUs of a group, in memory that each maps of the others: a barrier that waits
on the device and not on the host, and says what each rank calls.

Each rank has a pad of two slots, used in turn, with a word for every rank:

    word = number of the barrier << 32 | fingerprint of the call

A rank writes its word into the pads of all and waits until its own pad has the number from each. A
rank can write the word of barrier n + 2 over that of n only after it has passed n + 1, for which
every other has finished waiting at n: so two slots suffice, and nothing is ever set back to 0.

The exchange releases, and the read acquires, at system scope: what a rank's stream did before the
barrier, copies into its own block of the arena among them, is seen by what the streams of others do
after it (PTX ISA, memory consistency model; launches of one stream are ordered and flush).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ..common.device_words import ARRIVED, FAILED, LATE
from ..common.device_words import WORDS as DEVICE_WORDS
from ..common.lengths import for_all_lengths
from .launches import programs_of

Tensor = torch.Tensor
LANES = 32  # of the warp that waits: a rank each
WORDS = 2 * LANES  # of a pad: two slots
POLLS = 1000  # a second, in the interpreter, which has no clock
RAISED = 1  # the fingerprint of a rank that raised an error and does not call
_FAILED, _ARRIVED, _LATE = tl.constexpr(FAILED), tl.constexpr(ARRIVED), tl.constexpr(LATE)
_LANES = tl.constexpr(LANES)
_BLOCK = 4096
_PROGRAMS = 128  # of the kernel that poisons: about one an SM


class Meeting(NamedTuple):
    """A barrier as one rank makes it."""

    pads: Any  # addresses of those of all ranks
    device_words: Any
    report: Any
    number: int
    fingerprint: int
    rank: int
    ranks: int
    limit: int  # of waiting, as `clock` counts


@triton.jit
def clock(polls, TIMED: tl.constexpr):
    """Nanoseconds on a GPU; in the interpreter how often was polled."""
    if TIMED:
        return globaltimer()
    else:
        return polls


@triton.jit
def read(words, is_rank):
    """Words that other GPUs write; what their writers did before comes before what follows."""
    zeros = tl.zeros(words.shape, tl.int64)
    return tl.atomic_add(words, zeros, mask=is_rank, sem="acquire", scope="sys")


@for_all_lengths(["meeting"])
@triton.jit
def barrier_kernel(meeting, WAITS: tl.constexpr, TIMED: tl.constexpr, THREADS: tl.constexpr):
    """Barrier `number` of a rank. Where a rank does not come within `limit`, or comes with another
    fingerprint, `failed` is set, and `report` gets the number and the words that were found.
    """
    pads, failed, report, number, fingerprint, rank, ranks, limit = meeting
    lane = tl.arange(0, THREADS)
    is_rank = lane < ranks
    word = (tl.cast(number, tl.int64) << 32) | tl.cast(fingerprint, tl.int64)
    slot = (number % 2) * _LANES
    theirs = tl.load(pads + lane, mask=is_rank, other=0).to(tl.pointer_type(tl.int64))
    words = tl.zeros([THREADS], tl.int64) + word
    tl.atomic_xchg(theirs + slot + rank, words, mask=is_rank, sem="release", scope="sys")
    if WAITS:
        tl.store(failed + _ARRIVED, 0)  # of what is pulled next
        mine = tl.load(pads + rank).to(tl.pointer_type(tl.int64)) + slot + lane
        has_failed = tl.load(failed)
        polls = tl.zeros([], tl.int64)
        begun = clock(polls, TIMED)
        waited = begun - begun
        missing = tl.sum((is_rank & (read(mine, is_rank) >> 32 != number)).to(tl.int32), 0)
        # Carries numbers and no blocks, on which Triton 3.6 fails. After a failure no rank waits
        # again: the host will raise at its next call
        while (missing > 0) & (waited < limit) & (has_failed == 0):
            missing = tl.sum((is_rank & (read(mine, is_rank) >> 32 != number)).to(tl.int32), 0)
            polls += 1
            waited = clock(polls, TIMED) - begun
        found = read(mine, is_rank)
        others = tl.sum((is_rank & (found != word)).to(tl.int32), 0)
        if (others > 0) & (has_failed == 0):
            tl.store(report + 1 + lane, found, mask=is_rank)
            tl.store(report, tl.cast(number, tl.int64))
            tl.store(failed, 1)


@triton.jit
def fill_nan(x, size, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """NaN in all of x."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    nan = tl.full([BLOCK], float("nan"), x.dtype.element_ty)
    for start in range(0, tl.cast(size, tl.int64), PROGRAMS * BLOCK):
        tl.store(x + start + offs, nan, mask=start + offs < size)


@triton.jit(do_not_specialize=["number"])
def poison_kernel(
    words,
    report,
    tensors,
    sizes,
    number,
    TENSORS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """NaN in all of TENSORS if a wait has failed: what was copied after it may be anything. Of a
    piece that did not come `report` gets the number and that of the call's barrier, negative,
    unless a barrier has failed before.
    """
    if tl.load(words + _FAILED) != 0:
        late = tl.cast(tl.load(words + _LATE), tl.int64)
        if (late > 0) & (tl.load(report) == 0):
            tl.store(report, -((tl.cast(number, tl.int64) << 32) | late))
        for i in tl.static_range(TENSORS):
            fill_nan(tensors[i], sizes[i], PROGRAMS, BLOCK)


barriers = programs_of(barrier_kernel, dict(meeting=Meeting), THREADS=LANES)
LISTS = dict(tensors="TENSORS", sizes="TENSORS")
poisons = programs_of(poison_kernel, LISTS, PROGRAMS=_PROGRAMS, BLOCK=_BLOCK)


class Signals:
    """The kernels of one group on one device. `pads` are those of all ranks, as this one maps
    them, int64.
    """

    def __init__(self, pads: list[Tensor], rank: int) -> None:
        self.device, self.rank, self.ranks = pads[rank].device, rank, len(pads)
        if self.ranks > LANES:
            raise NotImplementedError(f"{self.ranks} ranks of one machine: at most {LANES}")
        addresses = [x.data_ptr() for x in pads]
        self.pads, self.kept = torch.tensor(addresses, device=self.device), pads
        self.words = torch.zeros(DEVICE_WORDS, dtype=torch.int32, device=self.device)
        # The host reads it without waiting: the kernel writes it over PCIe, and only at a failure
        pinned = self.device.type == "cuda"
        self.report = torch.zeros(1 + LANES, dtype=torch.int64, pin_memory=pinned)
        self._reported = ctypes.c_int64.from_address(self.report.data_ptr())

    def barrier(
        self, number: int, fingerprint: int, seconds: float, *, waits=True, behind: Any = None
    ) -> None:
        """Barrier `number`, on the current stream; without `waits` it is only said that this rank
        has come. A launch that it is `behind` makes it.
        """
        is_timed = self.device.type == "cuda"
        limit = int(seconds * (1e9 if is_timed else POLLS))
        options: Any = dict(compiled_for=(limit < 2**31,), TIMED=is_timed)
        numbers = number, fingerprint, self.rank, self.ranks, limit
        meeting = self.pads, self.words, self.report, *numbers  # in the order of a `Meeting`
        if behind is None:
            barriers(self.device, 1, WAITS=waits, **options).run(meeting)
        else:
            behind(meeting=meeting, **options)

    def has_come(self, number: int) -> bool:
        """Whether this rank's last barrier has that number; nothing may be running."""
        return int(self.kept[self.rank][number % 2 * LANES + self.rank]) >> 32 == number

    @property
    def has_failed(self) -> bool:
        """Whether there is a report. Asks no device."""
        return self._reported.value != 0

    def poison(self, tensors: Sequence[Tensor], number: int) -> None:
        """NaN in dense tensors, if a wait before it on this stream has failed. `number` is that
        of the call's last barrier. All take one launch.
        """
        some, sizes, looks = [], [], []
        for x in tensors:
            if size := x.numel():
                some.append(x)
                sizes.append(size)
                looks.append((x.dtype, x.data_ptr() % 16, size == 1, size % 16, size < 2**31))
        if not some:
            return
        program = poisons(self.device, _PROGRAMS, compiled_for=tuple(looks), TENSORS=len(some))
        program.run((self.words, self.report, *some, *sizes, number))

    def late(self) -> tuple[int, int] | None:
        """The barrier of the first call of which a piece did not arrive, and that piece's number.
        Asks no device.
        """
        report = -int(self.report[0])
        return (report >> 32, report & 0xFFFFFFFF) if report > 0 else None

    def found(self) -> tuple[int, list[int]]:
        """The number of the barrier that failed, and the words that it found."""
        return int(self.report[0]), self.report[1 : 1 + self.ranks].tolist()

    def reset(self) -> None:
        """After a failure that all ranks have seen; nothing may be running."""
        self.report.zero_()
        self.words.zero_()
