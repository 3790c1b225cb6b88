"""Bugs planted in kernels are found within twenty seeds, and none where there is none."""

import importlib.util
from pathlib import Path

import pytest
from helpers import hopper_kernels, hopper_launches

from gluon_emulator.hopper import HopperError, emulate

pytestmark = pytest.mark.emulator

SEEDS = 20
# A wrong result is an AssertionError; poison used as an index leaves memory or int32.
CAUGHT = (HopperError, AssertionError, IndexError, OverflowError)
SOURCE = Path(hopper_kernels.__file__).read_text()

LAUNCHES = {
    "copy": lambda module: hopper_launches.copy(),
    "matmul": hopper_launches.matmul,
    "attention": lambda module: hopper_launches.attention(nheads=1),
}

FULL = "        mbarrier.wait(ring.full.index(stage), phase)\n"
EMPTY = "        mbarrier.wait(ring.empty.index(stage), phase ^ 1)\n"
READ = "        x = ring.tiles.index(stage).load(LAYOUT)\n"
FREE = "        mbarrier.arrive(ring.empty.index(stage), count=1)\n"
MATMUL_DONE = "            acc = warpgroup_mma_wait(0, deps=[token])\n"
MATMUL_FREE = "            mbarrier.arrive(a_ring.empty.index(stage), count=1)\n"
BOTH_BYTES = "a_desc.block_type.nbytes + b_desc.block_type.nbytes"
DRAWN = 'gl.atomic_add(counter, 1, sem="relaxed")'
SENT = "        mbarrier.wait(messages.empty.index(slot), ((sent // 2) & 1) ^ 1)  # messages\n"
RECEIVED = "    mbarrier.wait(messages.full.index(slot), (n // 2) & 1)  # messages\n"
REPLIED = "    mbarrier.arrive(messages.empty.index(slot), count=1)  # messages\n"
SCORES = "        s = warpgroup_mma_wait(0, deps=[s_token])\n"
K_FREE = "        mbarrier.arrive(k_ring.empty.index(stage), count=1)\n"
V_FREE = "        mbarrier.arrive(v_ring.empty.index(stage), count=1)\n"
# What is planted, in which kernel, by which replacement.
BUGS = {
    "copy: no wait for an empty slot": (EMPTY, ""),
    "copy: no wait for a full slot": (FULL, ""),
    "copy: wrong phase of full": (FULL, FULL.replace("phase", "phase ^ 1")),
    "copy: wrong phase of empty": (EMPTY, EMPTY.replace("phase ^ 1", "phase")),
    "copy: slot freed before it is read": (READ + FREE, FREE + READ),
    "copy: slot never freed": (FREE, ""),
    "copy: full waits for two arrivals": (
        "mbarrier.init(full.index(i), count=1)",
        "mbarrier.init(full.index(i), count=2)",
    ),
    "copy: slot freed twice": (FREE, FREE.replace("count=1", "count=2")),
    "copy: more bytes expected": (
        "mbarrier.expect(ring.full.index(stage), x_desc",
        "mbarrier.expect(ring.full.index(stage), 2 * x_desc",
    ),
    "copy: fewer bytes expected": ("x_desc.block_type.nbytes)", "x_desc.block_type.nbytes // 2)"),
    "copy: no fence before the store": ("        fence_async_shared()  # before the copy\n", ""),
    "copy: staging overwritten while read": (
        "        tma.store_wait(0)  # of the block before\n",
        "",
    ),
    "copy: no wait for the last store": ("    tma.store_wait(0)  # of the last block\n", ""),
    "copy: no fence after the barriers": (
        "    fence_async_shared()  # the barriers of the copy\n",
        "",
    ),
    "matmul: no fence after the barriers": (
        "    fence_async_shared()  # the barriers of the matmul\n",
        "",
    ),
    "matmul: result never waited for": (MATMUL_DONE, "            acc = token\n"),
    "matmul: waits for all but one": (MATMUL_DONE, MATMUL_DONE.replace("0,", "1,")),
    "matmul: slot freed before the wait": (MATMUL_DONE + MATMUL_FREE, MATMUL_FREE + MATMUL_DONE),
    "matmul: slot free when one of two has read": ("K], A, 2)", "K], A, 1)"),
    "matmul: bytes of one operand expected": (BOTH_BYTES, "a_desc.block_type.nbytes"),
    "matmul: counter not atomic": (
        f"            tile = {DRAWN} + gl.num_programs(0)\n",
        "            drawn = gl.load(counter)\n"
        "            gl.store(counter, drawn + 1)\n"
        "            tile = drawn + gl.num_programs(0)\n",
    ),
    "matmul: message overwritten": (SENT, ""),
    "matmul: message read before it came": (RECEIVED, ""),
    "matmul: message not acknowledged": (REPLIED, ""),
    "matmul: accumulator of the tile before": (
        "        acc = gl.zeros([64, N], gl.float32, ACC)\n        for _",
        "        if received == 1:\n"
        "            acc = gl.zeros([64, N], gl.float32, ACC)\n        for _",
    ),
    "attention: scores never waited for": (SCORES, "        s = s_token\n"),
    "attention: no wait for v": ("        mbarrier.wait(v_ring.full.index(stage), phase)\n", ""),
    "attention: k freed before the wait": (SCORES + K_FREE, K_FREE + SCORES),
    "attention: v never freed": (V_FREE, ""),
    "attention: v freed as k": (V_FREE, K_FREE),
    "attention: no wait for q": ("    mbarrier.wait(q_ring.full.index(0), 0)\n", ""),
    "attention: accumulator not rescaled": (
        "        acc_o = acc_o * gl.convert_layout(step.alpha, ROW)[:, None]\n",
        "",
    ),
    "attention: no fence before the output": (
        "    q.store(acc_o.to(q.dtype))  # q is read no more\n    fence_async_shared()\n",
        "    q.store(acc_o.to(q.dtype))  # q is read no more\n",
    ),
}


def module_from(source, path):
    """A module of kernels: their source must lie in a file."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planted(bug, path):
    old, new = BUGS[bug]
    assert SOURCE.count(old) == 1, "the text to replace must be there once"
    return module_from(SOURCE.replace(old, new), path)


def run(module, name, seed):
    launch = LAUNCHES[name](module)
    emulate(getattr(module, launch.name), seed)[launch.grid](*launch.args, **launch.constants)
    launch.check()


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug, tmp_path):
    module = planted(bug, tmp_path / "hopper_planted.py")
    for seed in range(SEEDS):
        try:
            run(module, bug.split(":")[0], seed)
        except CAUGHT:
            return
    pytest.fail(f"{bug}: nothing wrong in {SEEDS} seeds")


@pytest.mark.parametrize("name", LAUNCHES)
def test_right_kernels_are_right_under_every_seed(name):
    for seed in range(SEEDS):
        run(hopper_kernels, name, seed)
