"""What lesson 07 runs in the emulator, measures and draws."""

import collections

import torch
import torch.nn.functional as F

import tilewise
from tilewise.testing import use_emulator
from tilewise.testing.hopper import HopperError

from . import ON_GPU, show
from .hopper_parts import attend, needs, prepare, verdict_of
from .hopper_timeline import Rates, Replay, busy, draw, draw_speeds, event_lines

ON_HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
HEADDIM = 128
RECORDED_AS = {"2 two stages": "2 two slots"}  # what rows call a step


def small_inputs(seqlen=512):
    """q, k, v of one head."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 1, seqlen, HEADDIM, generator=generator).bfloat16()


def print_events(events):
    """What the emulator recorded of the first program."""
    print(*event_lines(events, partitions=False), sep="\n")


def verify(steps):
    """Runs every step under three orders of events and compares with fp64."""
    small = small_inputs()
    for name, step in steps.items():
        for seed in range(3):
            verdict = verdict_of(attend(step, *small, seed=seed), *small)
            assert verdict.ok, f"{name}, seed {seed}: {verdict}"
        print(f"{name:18}{verdict}")


def timelines(steps):
    """Replays the events of every step with a clock; draws the first five."""
    panels, free = {}, {}
    for name, step in steps.items():
        events = []
        attend(step, *small_inputs(), trace=events)
        panels[name], without_copies = (
            Replay(events, keys=128, headdim=HEADDIM, rates=rates).run()
            for rates in (Rates(), Rates(copy_bytes=1e9, copy_latency=0))
        )
        free[name] = busy(without_copies)
        shares = f"{busy(panels[name]):4.0%}, with free copies {free[name]:4.0%}"
        print(f"{name:18}tensor cores at work {shares}")
    chosen = {name: panels[name] for name in list(steps)[:5]}
    show(draw(chosen, free, "One program, four blocks of keys"), "07-timeline")
    return panels


def outcome(step, seed):
    """The outcome of a run of 256 keys under one seed, in a word, and any error."""
    short = small_inputs(256)
    try:
        is_right = verdict_of(attend(step, *short, seed=seed), *short).ok
    except HopperError as error:
        return type(error).__name__, error
    return "right" if is_right else "wrong numbers", None


def outcomes(step, seeds=20):
    """How often each outcome was seen."""
    return collections.Counter(outcome(step, seed)[0] for seed in range(seeds))


def needed(steps):
    """Prints registers, spills, shared memory and programs per SM of every step."""
    print(f"{'':18}registers  spills  shared memory  programs")
    for name, step in steps.items():
        found = needs(step, HEADDIM)
        assert not found["wgmma_serialized"], (
            f"{name}: the compiler waits for every product"
        )
        line = f"{name:18}{found['registers']:9}{found['spill_stores']:8}"
        print(f"{line}{found['smem'] / 1024:11.0f} KiB{found['programs']:10}")


def library(q, k, v):
    """The library's Hopper kernel."""
    return tilewise.attention(
        q[None], k[None], v[None], layout="bhsd", backend="hopper"
    )[0]


def checked_calls(steps, seqlen, heads):
    """Launches to be timed, compared with fp64 before; without Hopper, none."""
    if not ON_HOPPER:
        return dict.fromkeys([*steps, "tilewise", "SDPA"])
    x = torch.randn(3, heads, seqlen, HEADDIM, device="cuda").bfloat16()
    for name, step in steps.items():
        verdict = verdict_of(attend(step, *x), *x)
        assert verdict.ok, f"{name} at {seqlen}: {verdict}"
    assert verdict_of(library(*x), *x).ok
    calls = {name: prepare(step, *x)[0] for name, step in steps.items()}
    calls["tilewise"] = lambda: library(*x)
    calls["SDPA"] = lambda: F.scaled_dot_product_attention(*x[:, None])
    return calls


def speeds(figures, steps):
    """Times every step, the library's kernel and SDPA; prints and draws TFLOP/s."""
    with use_emulator(seed=1):
        small = small_inputs()
        print("tilewise", verdict_of(library(*small), *small))
    found = {}
    for seqlen in (4096, 16384) if ON_HOPPER or not ON_GPU else ():
        heads = 262144 // seqlen
        flops = 4 * heads * seqlen**2 * HEADDIM
        shape = dict(seqlen=seqlen, heads=heads, headdim=HEADDIM, dtype="bfloat16")
        calls = checked_calls(steps, seqlen, heads)
        recorded = {
            RECORDED_AS.get(name, name): call for name, call in calls.items()
        }
        times = figures.times(shape, recorded, flops)
        names = [name for name in calls if RECORDED_AS.get(name, name) in times]
        rates = {
            name: flops / times[RECORDED_AS.get(name, name)] * 1e-9
            for name in names
        }
        found[seqlen] = rates
        for name, tflops in rates.items():
            print(f"{seqlen:6} {name:18}{tflops:6.0f} TFLOP/s")
    print(figures.machine)
    if any(found.values()):
        show(draw_speeds(found, figures.machine), "07-speed")
