"""Wrong lengths and lists on a GPU, where their values are not checked: nothing outside the call's
own tensors changes, no address is illegal, and every kernel ends.

All tensors of a call, those that it allocates too, lie in one arena with canaries between them.
"""

import math

import pytest
import torch
from helpers.waits import until
from torch.overrides import TorchFunctionMode

from tilewise import mods
from tilewise.kernels.hopper.bwd import launch as hopper_backward
from tilewise.kernels.hopper.fwd import launch as hopper
from tilewise.kernels.hopper.tile_counter import counters
from tilewise.kernels.portable import launch as portable
from tilewise.mods.flatten import modifiers_of
from tilewise.problem import Extras, Saved, Scalars, describe
from tilewise.sparse import create_block_mask

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
pytestmark = pytest.mark.gpu

BACKENDS = ["portable", pytest.param("hopper", marks=needs_hopper)]
MEGABYTE, CANARY = 1 << 20, 0xA5
LARGEST = 2**31 - 1
TOTAL, ROOM, NHEADS, NHEADS_K = 3000, 700, 4, 2
RIGHT = (0, 900, 1000, 1000, TOTAL)
WRONG_STARTS = {
    "50 past the end": (0, 900, 1000, 1000, TOTAL + 50),
    "far past it": (0, 900, 10**6, LARGEST, TOTAL),
    "negative": (-50, 900, -(10**6), 1000, TOTAL),
    "least": (-LARGEST - 1, LARGEST, -LARGEST - 1, 0, LARGEST),
    "decreasing": (0, 2500, 100, 1000, TOTAL),
    "all over again": (0, TOTAL, 0, TOTAL, 0, TOTAL, 0, TOTAL),
}
WRONG_USED = {
    "past the room": (ROOM + 9, 3, 40),
    "far past it": (10**6, 10**6, 10**6),
    "largest": (LARGEST, 0, LARGEST),
    "negative": (-5, 50, -LARGEST - 1),
}
HOW = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, left=100),
    "deterministic": dict(deterministic=True),
    "causal-deterministic": dict(causal=True, deterministic=True),
}


class Arena(TorchFunctionMode):
    """Memory of which every new tensor gets a part, with MARGIN bytes of canaries around it."""

    MARGIN = 4 * MEGABYTE

    def __init__(self):
        super().__init__()
        self.memory = torch.full((512 * MEGABYTE,), CANARY, dtype=torch.uint8, device="cuda")
        self.is_free = torch.ones_like(self.memory, dtype=torch.bool)
        self.at = 0

    def take(self, shape, dtype):
        start, nbytes = self.at + self.MARGIN, math.prod(shape) * dtype.itemsize
        self.at = -(-(start + nbytes) // 256) * 256
        assert self.at + self.MARGIN <= self.memory.numel()
        self.is_free[start : start + nbytes] = False
        return self.memory[start : start + nbytes].view(dtype).view(shape)

    def put(self, x):
        return None if x is None else self.take(x.shape, x.dtype).copy_(x)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.empty_like and args[0].is_contiguous():
            return self.take(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        if func in (torch.Tensor.new_empty, torch.Tensor.new_zeros):
            shape = args[1] if isinstance(args[1], (tuple, list, torch.Size)) else args[1:]
            made = self.take(tuple(shape), kwargs.get("dtype") or args[0].dtype)
            return made.zero_() if func is torch.Tensor.new_zeros else made
        return func(*args, **kwargs)

    def is_whole(self):
        return bool(((self.memory == CANARY) | ~self.is_free).all())


def ends():
    """Waits for the device, with a timeout."""
    event = torch.cuda.Event()
    event.record()
    try:
        until(event.query, "a kernel ends", pause=0.001)
    except AssertionError as error:
        pytest.exit(f"{error}, and none can after it")


def call(backend, extras, shape, headdim=128, causal=False, left=-1, deterministic=False, names=()):
    """Forward and backward, twice, the second time by the launches that were kept."""
    batch, rows = shape
    arena = Arena()
    extras = Extras(*map(arena.put, extras[:8]), tuple(map(arena.put, extras.captured)))
    given = [
        arena.put(torch.randn(batch, rows, heads, headdim, device="cuda", dtype=torch.bfloat16))
        for heads in (NHEADS, NHEADS_K, NHEADS_K, NHEADS)
    ]
    q, k, v, dout = given
    before = [x.clone() for x in given]
    scalars = Scalars(headdim**-0.5, 0.0, left, 0 if causal else -1)
    problem = describe(q, k, v, extras, scalars, "bottom_right", deterministic, *names)
    forward = portable.prepare(problem, scalars, q, k)
    backward = portable.prepare_backward(problem, scalars)
    if backend == "hopper":
        forward = hopper.prepare(problem, scalars, q, k)
        backward = hopper_backward.prepare_backward(problem, scalars)
    for _ in range(2):
        with arena:
            out, lse = forward(q, k, v, extras)
            grads = backward(Saved(dout, None, q, k, v, out, lse), extras)
        ends()
    if backend == "hopper":
        stream = torch._C._cuda_getCurrentRawStream(q.device.index)
        assert counters(q.device, q.device.index, stream, count=1).item() == 0
    assert arena.is_whole()
    assert all(map(torch.equal, given, before))
    return out, lse, *grads[:4]


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def packed(starts_q=RIGHT, starts_k=RIGHT, used_q=None, used_k=None):
    used = (None if x is None else int32(x) for x in (used_k, used_q))
    if len(starts_q) != len(starts_k):  # what is right, as often
        longer = max(starts_q, starts_k, key=len)
        starts_q, starts_k = ((*x, *[x[-1]] * (len(longer) - len(x))) for x in (starts_q, starts_k))
    return Extras(None, torch.ones(NHEADS, device="cuda"), *used, int32(starts_q), int32(starts_k))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("side", ["q", "k", "qk"])
@pytest.mark.parametrize("name", WRONG_STARTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_starts(backend, name, side, how):
    wrong = {f"starts_{x}": WRONG_STARTS[name] for x in side}
    call(backend, packed(**wrong), (1, TOTAL), **HOW[how])


@pytest.mark.parametrize("headdim", [64, 256])
@pytest.mark.parametrize("name", WRONG_STARTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_starts_at_other_head_dims(backend, name, headdim):
    starts = WRONG_STARTS[name]
    for how in ("plain", "causal-deterministic"):
        call(backend, packed(starts, starts), (1, TOTAL), headdim, **HOW[how])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", WRONG_USED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_used_lengths(backend, name, how):
    """Of packed sequences; and of a batch, where one past the room is the room."""
    used = (*WRONG_USED[name], LARGEST)
    call(backend, packed(used_q=used, used_k=used), (1, TOTAL), **HOW[how])
    results = []
    for lengths in (int32(WRONG_USED[name]), int32(WRONG_USED[name]).clamp(0, ROOM)):
        torch.manual_seed(0)
        results.append(call(backend, Extras(seqused_k=lengths), (3, ROOM), **HOW[how]))
    for which, (mine, theirs) in enumerate(zip(*(x[:5] for x in results), strict=True)):
        if which != 2 or backend == "portable" or "deterministic" in how:
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("value", [10**6, -(10**6), LARGEST, -LARGEST - 1])
@pytest.mark.parametrize("what", ["counts", "indices", "both"])
@pytest.mark.parametrize("rows", [ROOM, 768])
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_lists_of_a_block_mask(backend, rows, what, value):
    sizes = 2, NHEADS, rows, rows
    blocks = create_block_mask(mods.sliding_window(200, 200), *sizes, device="cuda")
    modifiers = modifiers_of(None, None, blocks, sizes)
    changed = [
        torch.full_like(x, value) if what == "both" or what == ("counts", "indices")[i % 2] else x
        for i, x in enumerate(modifiers.captured)
    ]
    call(backend, Extras(captured=tuple(changed)), (2, rows), names=(modifiers.mods,))
