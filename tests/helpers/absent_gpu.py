"""An arena of two ranks whose streams, driver and kernels are replaced, and counted."""

import collections
import datetime
import sys
from types import SimpleNamespace

import torch

import tilewise.distributed as td
from tilewise import dispatch
from tilewise.distributed.methods import heads, one_launch, rows
from tilewise.distributed.transport import arena as arenas
from tilewise.distributed.transport.device_arena import EVENTS, DeviceArena
from tilewise.distributed.transport.device_barrier import PAD, DeviceBarrier
from tilewise.distributed.transport.links import Links
from tilewise.distributed.transport.nodes import Nodes
from tilewise.kernels.common.outputs import empty_out
from tilewise.kernels.common.program import Program
from tilewise.kernels.common.results import outputs_of
from tilewise.kernels.common.workspace import Workspace
from tilewise.kernels.hopper.fwd import runs_launch
from tilewise.kernels.hopper.fwd.runs_launch import FORWARD, INTO
from tilewise.problem import Grads

from .device_arena import CPU
from .waits import SHORT

TOKENS = 256  # of a rank
counts: collections.Counter = collections.Counter()


class Event:
    """One of a GPU that is not there."""

    def record(self, stream):
        counts["recorded"] += 1

    def wait(self, stream):
        counts["waited for"] += 1


class Host:
    """The other rank, which always comes."""

    rank, ranks, lost, epoch, number = 0, 2, None, 0, 0
    timeout = datetime.timedelta(seconds=SHORT)
    store = SimpleNamespace(set=lambda key, text: None, delete_key=lambda key: True)

    def wait(self, signature, note=""):
        return [note, note]

    def announce(self, signature):
        self.number += 1
        counts["announced"] += 1

    def meet(self, signature):
        counts["met"] += 1

    def named(self, ranks):
        return f"ranks {ranks}"


class Nccl:
    """Between two nodes."""

    def _get_backend(self, device):
        return self

    def alltoall(self, outputs, inputs, options):
        counts["exchanges"] += 1
        counts["sent"] += sum(map(torch.numel, inputs)) > 0
        counts["received"] += sum(map(torch.numel, outputs)) > 0
        return SimpleNamespace(wait=lambda: None)


class Blocks:
    """Memory that both ranks map."""

    def allocate(self, barrier, nbytes, signature):
        return [torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]


def arena_without_gpu(monkeypatch, nodes=False):
    """Yields a layout of the ranks, which may be two nodes."""
    words = dict(stream_id=0, device_index=0, device_type=1, wait_stream=lambda other: None)
    stream = SimpleNamespace(cuda_stream=5, **words)

    def current_stream(device=None):
        counts["current_stream"] += 1
        return stream

    def forward_program(problem, scalars, q, out=None, **given):
        names, outputs = (FORWARD, outputs_of(problem, q)) if out is None else (INTO, ())
        program = Program(names, [], Workspace(CPU), outputs)
        program.again = [lambda stream, row: counts.update(["attention"])]
        return program

    def small(program, values):
        """Programs of one small kernel, which is not run."""
        (launch,) = program.launches
        counts[launch.kernel.__name__] += 1

    def backward_of(call, q, k, v, extras):
        def gradients(saved, extras, between):
            if between is not None:
                between.before_keys()
            parts = (torch.empty(x.shape, dtype=torch.float32) for x in (saved.k, saved.v))
            grads = Grads(torch.empty_like(saved.q), *parts)
            counts["gradients"] += 1
            if between is not None:
                between.after_keys(grads)
            return grads

        return gradients

    def whole(spec, q, k, v):
        counts["attention"] += 1
        return empty_out(q, v.shape[3])

    def counted(owner, name):
        body = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *x, **y: counts.update([name]) or body(*x, **y))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (0, 0, 1), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", lambda **given: None, raising=False)
    monkeypatch.setattr(runs_launch, "forward_program", forward_program)
    monkeypatch.setattr(Program, "run", small)
    monkeypatch.setattr(dispatch, "backward_of", backward_of)
    monkeypatch.setattr(rows, "working_dtype", lambda x: x.dtype)
    monkeypatch.setattr(rows, "_backend_of_runs", lambda *args, **named: "hopper")
    monkeypatch.setattr(heads.whole, "attend", whole)
    monkeypatch.setattr(heads, "LEAST_ROWS", 1)
    monkeypatch.setattr(one_launch, "LEAST_BYTES", 0)
    for cached in (one_launch.groups_of, one_launch._forward_of):
        cached.cache_clear()
    for name in ("sharded_call", "choose"):
        counted(attention_module_of(), name)
    counted(one_launch, "PreparedLaunch")
    counted(heads, "rows_to_heads")
    pads = [torch.zeros(PAD, dtype=torch.uint8) for _ in range(2)]
    if nodes:
        pads[1] = None
    barrier = DeviceBarrier(Host(), CPU, pads, None)
    arena = DeviceArena(barrier, Blocks(), CPU)
    arena.has_streams, arena.side = True, SimpleNamespace(cuda_stream=9, **words)
    arena.ready, arena.events = Event(), [Event() for _ in range(EVENTS)]
    arena.driver = SimpleNamespace(
        write=lambda *given: counts.update(["write"]),
        copy=lambda *given, **rows: counts.update(["copy"]),
    )
    arena.counts_pieces = not nodes
    if nodes:
        arena.links = Links(barrier.host, Nodes(((0,), (1,)), 0), group=Nccl(), device=CPU)
        arena.nodes, arena.links.own = arena.links.nodes, True
        arena.parts = 2
        monkeypatch.setattr(arena.links, "open", lambda: None)
    counts.clear()
    layout = td.zigzag(2 * TOKENS, 2)
    object.__setattr__(layout, "group", "two ranks")
    arenas._hosts["two ranks"] = barrier.host
    arenas._arenas["two ranks", CPU] = arena
    yield layout
    del arenas._arenas["two ranks", CPU], arenas._hosts["two ranks"]
    for cached in (one_launch.groups_of, one_launch._forward_of):
        cached.cache_clear()


def attention_module_of():
    """The module, whose name in the package is its function's."""
    return sys.modules["tilewise.distributed.api.attention"]
