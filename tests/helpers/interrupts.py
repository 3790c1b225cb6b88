"""An error of one rank at every step between the ranks' meetings: a line of tilewise.distributed
raises, in a call or its backward. What any rank returns is right, the others name the rank that
raised, at that meeting or at the next one, and the group goes on.
"""

import contextlib
import linecache
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tilewise
import tilewise.distributed as td
from tilewise.distributed.transport.arena import Reporting

from .device_arena import device_arena

ROOT = str(Path(td.__file__).parent)
ERRORS = KeyboardInterrupt, SystemExit, ValueError
ALL = 10**9


class Steps:
    """Counts the lines that a rank runs where others may wait for it, all or those of one function,
    and raises at one of them.
    """

    def __init__(self, last=ALL, error=None, function=""):
        self.last, self.error, self.count, self.depth = last, error, 0, 0
        self.function = function

    def __enter__(self):
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def enter(self, frame, event, arg):
        code = frame.f_code
        if code is Reporting.__enter__.__code__:
            self.depth += 1
        elif code is Reporting.__exit__.__code__:
            self.depth -= 1
        elif code.co_filename.startswith(ROOT) and code.co_qualname.endswith(self.function):
            return self.line
        return None

    def line(self, frame, event, arg):
        if event == "line" and self.depth and not is_exit(frame):
            self.count += 1
            if self.count == self.last:
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise self.error(f"at {where}")
        return self.line


def is_exit(frame):
    """Whether the block that reports errors is left: all of this call's meetings are behind it."""
    return "with reporting(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


class Calls:
    """A call and its backward, each time of other keys. False where results are NaN: a call of
    which the device knows that it has failed, and the host will at the next one.
    """

    def __init__(self, kind, **options):
        self.options, is_cuda = options, kind == "cuda"
        ranks = dist.get_world_size()
        seqlen, headdim = (256 * ranks, 64) if is_cuda else (7 * ranks, 8)
        self.layout, draw = td.zigzag(seqlen), torch.Generator().manual_seed(3)
        whole = torch.randn(4, 1, seqlen, ranks, headdim, generator=draw)
        self.whole = (whole.to("cuda", torch.bfloat16) if is_cuda else whole).unbind(0)
        self.bound = 0.01 if is_cuda else 1e-5  # other keys are off by 0.1 and more

    def __call__(self, number):
        def made(attend, share=lambda x: x):
            q, k, v, dout = map(share, self.whole)
            leaves = [x.clone().requires_grad_() for x in (q, k * (1 + number % 5), v)]
            out = attend(*leaves, causal=True)
            return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

        def attend(*tensors, **causal):
            return td.attention(*tensors, layout=self.layout, **self.options, **causal)

        sharded = made(attend, self.share)
        if any(x.isnan().any() for x in sharded):
            return False
        for x, y in zip(sharded, made(tilewise.attention)):
            exact = self.share(y).float()
            assert (x.float() - exact).norm() <= self.bound * exact.norm(), number
        return True

    def share(self, x):
        return self.layout.shard(x)


METHODS = {
    "stream": dict(method="stream"),
    "by runs": dict(method="stream", bitwise=False),
    "heads": dict(method="heads"),
    "ring": dict(method="ring", bitwise=False),
}


def interrupted(rank, seed, most, kind, names, function=""):
    """At most so many steps of each method, of all functions or one, on a rank drawn. `kind`
    is a device, or "interpreter": the arena of GPUs on a CPU. On GPUs autograd's thread is not
    traced.
    """
    if kind == "interpreter":
        device_arena()
    draw = random.Random(seed)
    for name in names:
        calls = Calls(kind, **METHODS[name])
        for _ in range(3):  # the last one is known
            with Steps(function=function) as steps:
                assert calls(1)
        ranks = dist.get_world_size()
        counts = [None] * ranks
        dist.all_gather_object(counts, steps.count)
        numbers = range(1, 2 * max(counts))  # after an error memory is made again: more steps
        count = 0
        for number in sorted(draw.sample(numbers, min(most, len(numbers)))):
            is_victim, error = draw.randrange(ranks) == rank, draw.choice(ERRORS)
            count += interrupted_at(number, is_victim, error, calls, kind=kind, function=function)
        assert count or rank or most < 10


def interrupted_at(number, is_victim, error, calls, *, kind, function):
    """How often this rank was told of it."""
    count = 0
    if is_victim:
        with contextlib.suppress(error), Steps(number, error, function):
            calls(number)
        assert calls(number + 1)
        return count
    for call in (number, number + 1):
        is_done = False
        while not is_done:
            try:
                is_done = calls(call)
                assert is_done or kind != "cpu"
            except td.RankMismatch as mismatch:
                assert f"raised {error.__name__}: at " in str(mismatch), number
                count += 1
            is_done |= call == number
    assert count <= 1
    return count
