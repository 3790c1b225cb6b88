"""The Hopper forward in FP8 compiles for sm_90: it fits, its wgmma overlap, it spills little."""

from types import SimpleNamespace

import pytest
import torch
import triton
from helpers import fp8
from helpers.driver import Driver, launchable, sizes_in
from helpers.sass import assert_maxima_by_integers, innermost_loops, spills_in
from helpers.tiers import sample, sample_rows

from tilewise.kernels.common import packed
from tilewise.kernels.hopper.descriptors import checked
from tilewise.kernels.hopper.fwd import fp8_launch
from tilewise.kernels.hopper.fwd.fp8_kernel import hopper_fp8_fwd_kernel
from tilewise.problem import Scalars
from tilewise.testing import build, stats
from tilewise.testing.offline import SMEM_LIMIT

IS_MEASURED = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="spills are those of Triton 3.6"
)
pytestmark = IS_MEASURED

FEATURES = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, left=100),
    "softcap": dict(softcap=30.0),
    "alibi": dict(causal=True, alibi_slopes=torch.ones(4)),
    "sinks": dict(sinks=torch.ones(4)),
    "packed": dict(causal=True, packed=True),
    "used": dict(spare=1),
    "mean": dict(v_mean=True),
    "fp32": dict(out_dtype=torch.float32),
}
# Bytes a thread may spill. Most do it where one tile joins the next: the mean of V, which the
# epilogue adds, and lengths of packed sequences
SPILLS = {(64, "packed"): 16, (128, "window"): 12, (128, "softcap"): 40, (256, "fp32"): 164}
WIDE_SPILLS = 116
HALVES_SPILLS = 40
TRANSPOSING_SPILLS = 68  # of addresses and lengths, by the warps that transpose or load
CASES = [(headdim, name) for headdim in (64, 128, 256) for name in FEATURES]
# Not those that leave no shared memory, or no registers, at headdim 128
TRANSPOSING = [(64, name) for name in FEATURES if name not in ("packed", "mean")]
TRANSPOSING += [(128, name) for _, name in TRANSPOSING if name not in ("fp32", "softcap")]
HALVES = [name for name in FEATURES if name != "mean"]


def compiled_stats(*args, **asked):
    return stats(compiled(*args, **asked))


def compiled(headdim, **asked):
    return made(headdim, **asked)[0]


def made(
    headdim,
    out_dtype=torch.bfloat16,
    causal=False,
    left=-1,
    softcap=0.0,
    transposes=False,
    **asked,
):
    sequences = 2 if asked.get("packed") else 1
    lengths = [[256] * sequences] * 2
    call = fp8.normal_call(*lengths, fp8.Heads(4, 2, headdim, headdim), **asked)
    scalars = Scalars(headdim**-0.5, softcap, left, 0 if causal else -1)
    problem, read = fp8.problem_of(call, scalars), call.quantized
    plan = fp8_launch.plan_for(problem, read, call.extras, out_dtype, transposes)
    out = torch.empty(*read.q.shape[:3], headdim, dtype=out_dtype)
    lse = torch.empty(read.q.shape[0], 4, read.q.shape[1])
    values = call.v if transposes else None
    args = fp8_launch.arguments(problem, plan, read, values, call.extras, scalars, out, lse)
    constants = dict(FEATURES=plan.features, TILE=plan.tile, num_warps=4)
    kernel = build(hopper_fp8_fwd_kernel, *checked(args), on="sm90", **constants)
    return kernel, plan, args, call.extras


@pytest.mark.parametrize("headdim, name", sample_rows(CASES, (128, "causal")))
def test_compiles(headdim, name):
    """Of 256 columns both loops: without its mean V may be summed in one level."""
    asked = FEATURES[name] | (dict(v_mean=True) if headdim == 256 else {})
    most = SPILLS.get((headdim, name), WIDE_SPILLS if headdim == 256 else 0)
    kernel = compiled(headdim, **asked)
    check(stats(kernel), most)
    if headdim == 256:
        assert_loops_keep_registers(kernel, 4)


@pytest.mark.parametrize("name", sample(HALVES))
def test_halves_compile(name):
    """No spills in the loop, which has no S in flight while a half of P V is."""
    kernel = compiled(256, **FEATURES[name])
    check(stats(kernel), HALVES_SPILLS)
    assert_loops_keep_registers(kernel, 2)


@pytest.mark.parametrize("headdim, name", sample_rows(TRANSPOSING))
def test_compiles_with_values_of_its_own(headdim, name):
    """Beside two warps that transpose V, each of 40 registers a thread; nothing in the loop of the
    matmuls is spilled, by either warpgroup.
    """
    kernel = compiled(headdim, transposes=True, **FEATURES[name])
    check(stats(kernel), TRANSPOSING_SPILLS)
    assert_loops_keep_registers(kernel, 2)


def assert_loops_keep_registers(kernel, count):
    """Nothing is spilled in so many loops of matmuls. Longer ones, behind them, are jumps back from
    what ptxas put at the end.
    """
    loops = innermost_loops(kernel, "QGMMA")
    loops = [x for x in loops if sum("MUFU.EX2" in line for line in x) >= 32]
    assert sum(map(spills_in, sorted(loops, key=len)[:count])) == 0 and len(loops) >= count


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "causal"])
@pytest.mark.parametrize("headdim", [64, 128])
def test_maxima_of_rows(headdim, name):
    for loop in innermost_loops(compiled(headdim, **FEATURES[name]), "QGMMA")[:2]:
        assert_maxima_by_integers(loop, 32)


def check(found, most):
    """What compiled spills at most so many bytes, and is as it should be."""
    assert found["smem"] <= SMEM_LIMIT["sm90"], found
    assert found["QGMMA"] > 0 and found["HGMMA"] == 0 and found["UTMALDG"] > 0, found
    assert not found["wgmma_serialized"] and not found["copies_apart"], found
    assert not found["idle_barriers"], found
    assert found["spill_stores"] <= most, found


def test_p_is_an_operand_without_a_move():
    """No shuffle but those of the maxima, and no byte that is packed into another register."""
    stats = compiled_stats(128, **FEATURES["causal"])
    assert stats["PRMT"] == 0, stats


@pytest.mark.parametrize("transposes", sample([False, True], False))
def test_what_is_launched_past_triton_are_the_parameters_of_the_kernel(transposes, monkeypatch):
    """As many as its PTX has, as large, and each in its place."""
    kernel, plan, args, extras = made(128, transposes=transposes, causal=True)
    driver = Driver(sizes_in(kernel.asm["ptx"]))
    monkeypatch.setattr(packed, "driver", driver.functions)
    maps = {}

    class Described:
        def __init__(self, kernel, read):
            self.read = read

        def opened(self, addresses):
            gaps = [object() for _ in addresses]
            parts = [[gap, *x.shape, *x.strides] for gap, x in zip(gaps, self.read)]
            return gaps, [part for x in parts for part in x], True

        def moved(self, which, address):
            return maps.setdefault(address, packed.Map(bytes([len(maps) + 1] * 128)))

    monkeypatch.setattr(fp8_launch, "Descriptors", Described)
    of = SimpleNamespace(compiled=launchable(kernel), programs=132, launcher=None)
    of.arguments = lambda stream, args: (stream, *args)
    found = fp8_launch.how_to_relaunch(of, plan, args, extras)
    assert isinstance(found.call, packed.Packed)
    read = [x for x in args[:5] if x is not None]
    row = [found.moved(n, 16 * n) for n in range(len(read))]
    moving = [2**40 + 16 * n for n in range(9 if transposes else 7)]
    if args.scales.v_mean is None:
        moving[-2:] = 0, 0
    found.call(7, [*row, *moving])
    ((_, _, values),) = driver.launched
    numbers = iter(values)
    for n, x in enumerate(read):
        assert next(numbers) == bytes(row[n])
        assert [int.from_bytes(next(numbers), "little") for _ in x.shape] == [*x.shape]
        assert [int.from_bytes(next(numbers), "little") for _ in x.strides] == [*x.strides]
    v_t = moving[:2] if transposes else []
    lse, tiles, *scales = moving[len(v_t) : len(v_t) + 5]
    rest = [int.from_bytes(x, "little") for x in numbers]
    assert rest[:5] == [lse, *scales, args.scales.nheads_k]
    assert rest[5] == tiles and (not transposes or v_t == [x for x in rest if x in v_t])
    assert rest.count(tiles) == 1
