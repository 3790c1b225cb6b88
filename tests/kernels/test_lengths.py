"""Kernels of a KV cache are compiled once for each set of constants, whatever the lengths are."""

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
import triton
from helpers.cached_calls import check_cached
from triton.runtime.jit import compute_cache_key

from tilewise.kernels.common.appended import Append
from tilewise.kernels.common.decode_step import program_of
from tilewise.kernels.common.lengths import for_all_lengths
from tilewise.kernels.common.program import Launch, fake_args
from tilewise.kernels.hopper.decode import launch as decoding
from tilewise.kernels.hopper.fwd import cached as chunks
from tilewise.kernels.portable import append_launch, decode_launch
from tilewise.testing import offline
from tilewise.tile.rotary import Rotary

INT32, BF16 = torch.int32, torch.bfloat16
HEADS, KEY_HEADS, HEADDIM = 32, 8, 128
ROOMS = 1000, 1024, 4096


def looks_of(launch):
    """What a launch's kernel is compiled for: its name and constants, and how Triton looks at its
    arguments.
    """
    with offline._targeting(offline.TARGETS["sm90"]):
        *_, bind = launch.kernel.device_caches[0]
        _, looks, options = bind(*fake_args(launch), **launch.constants, **launch.options)
    constants = launch.kernel.__name__, str(launch.constants), str(options)
    return constants, compute_cache_key({}, looks, options)


def assert_compiled_once(launches, sets):
    """Launches with as many sets of constants are compiled as often."""
    found = {}
    for launch in launches:
        constants, looks = looks_of(launch)
        found.setdefault(constants, set()).add(looks)
    assert [len(looks) for looks in found.values()] == [1] * sets


def cached_call(batch, queries, room, page_size=0, is_packed=False, longest=0):
    """A call of so many queries for each sequence, with its `out` and `lse`."""
    shape = (batch * queries,) if is_packed else (batch, queries)
    q = torch.empty(*shape, HEADS, HEADDIM, dtype=BF16)
    pages = (3 * batch + room, page_size) if page_size else (batch, room)
    k, v = (torch.empty(*pages, KEY_HEADS, HEADDIM, dtype=BF16) for _ in "kv")  # never touched
    table = torch.zeros(batch, -(-room // page_size), dtype=INT32) if page_size else None
    starts = torch.zeros(batch + 1, dtype=INT32) if is_packed else None
    lengths = torch.ones(batch, dtype=INT32), starts
    numbers = True, None, (room // 2, 0), None, None
    cached = check_cached(q, k, v, table, lengths, (None, None, None), numbers)
    lse = torch.empty(HEADS * q.shape[:-2].numel())
    return cached._replace(longest=longest), torch.empty_like(q), lse


def launches_of(plan, *asked):
    """The launches of calls, each of which is one of every combination."""
    return [
        launch
        for one in itertools.product(*asked)
        for launch in program_of(*cached_call(*one), plan).launches
    ]


@pytest.mark.parametrize("page_size, is_packed", [*itertools.product((0, 16, 64), (False, True))])
def test_decodes(page_size, is_packed):
    asked = (1, 2, 3, 16, 32), (1, 2), ROOMS, (page_size,), (is_packed,)
    assert_compiled_once(launches_of(decoding.launches_of, *asked), sets=1)


@pytest.mark.parametrize("page_size", [0, 16])
def test_decodes_of_16_queries(page_size):
    """Of two warpgroups."""
    asked = (1, 3, 16), (16, 17, 512), ROOMS, (page_size,)
    assert_compiled_once(launches_of(decoding.launches_of, *asked), sets=1)


@pytest.mark.parametrize("page_size", [0, 16])
def test_chunks(page_size):
    """Of whole tiles, and of parts, which a launch folds, or a program, or both."""
    asked = (1, 2, 16), (128, 500, 512), ROOMS, (page_size,)
    assert_compiled_once(launches_of(chunks.launches_of, *asked), sets=3)


def test_steps_of_chunks_and_decodes():
    plan = functools.partial(chunks.launches_of, chunk=256)
    asked = (2, 3, 16), (300, 512), ROOMS, (16,), (True,), (512,)
    assert_compiled_once(launches_of(plan, *asked), sets=2)


def test_portable_decodes():
    plan = functools.partial(decode_launch.launches_of, sms=132)
    asked = (1, 2, 16, 48), (1,), (4000, 4096), (0,)
    assert_compiled_once(launches_of(plan, *asked), sets=2)


def test_appends():
    launches = []
    for batch, queries, pages in itertools.product((1, 2, 16), (1, 3, 16), (15, 16)):
        k_cache, v_cache = torch.empty(2, 100 * pages, 16, KEY_HEADS, HEADDIM, dtype=BF16)
        k, v = torch.empty(2, batch, queries, KEY_HEADS, HEADDIM, dtype=BF16)
        rotary = Rotary(*torch.empty(2, 1000 * pages, 32), interleaved=False)
        table = torch.empty(batch, pages, dtype=INT32)
        lengths = torch.ones(batch, dtype=INT32)
        asked = Append(k_cache, v_cache, k, v, table, lengths, None, None, rotary)
        launches.append(append_launch.launch_of(asked))
    assert_compiled_once(launches, sets=1)


class Pair(NamedTuple):
    """Two numbers and more."""

    first: int
    second: int
    rest: tuple


def test_only_what_is_named_is_plain():
    """Strides still select code, and so does a number of 64 bits."""

    @for_all_lengths(("pair.first", "pair.rest", "count"))
    @triton.jit
    def kernel(x, pair, step, count):
        pass

    def looks(*numbers):
        first, second, third, step, count = numbers
        args = dict(x=torch.empty(64), pair=Pair(first, second, (third, None)), step=step)
        return looks_of(Launch(kernel, 1, args | dict(count=count), {}, {}))[1]

    plain = looks(3, 16, 3, 16, 3)
    assert looks(1, 16, 1, 16, 1) == looks(16, 16, 32, 16, 16) == plain
    others = looks(3, 1, 3, 16, 3), looks(3, 16, 3, 1, 3), looks(3, 16, 2**40, 16, 3)
    assert len({plain, *others}) == 4
