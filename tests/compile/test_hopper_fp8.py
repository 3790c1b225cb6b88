"""The Hopper forward in FP8 compiles for sm_90: it fits, its wgmma overlap, it spills little."""

import pytest
import torch
import triton
from helpers import fp8
from helpers.driver import Driver, launchable, sizes_in
from helpers.sass import assert_maxima_by_integers, innermost_loops, spills_in
from helpers.tiers import sample, sample_rows

from tilewise.explain.launches import build_launch
from tilewise.kernels.common import direct, packed
from tilewise.kernels.common.operand import operands_of
from tilewise.kernels.common.results import FP8_FORWARD
from tilewise.kernels.hopper import launch as hopper
from tilewise.kernels.hopper.descriptors import DescriptorFields
from tilewise.kernels.hopper.fwd import fp8_launch
from tilewise.problem import Scalars
from tilewise.testing import stats
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
    v = call.v if transposes else read.v_t
    tensors = read.q, read.k, v, *read.scales, read.v_mean, read.v_drift, *call.extras.tensors
    operands = operands_of(FP8_FORWARD, tensors)
    program = fp8_launch.fp8_program(problem, scalars, out_dtype, transposes, **operands)
    (launch,) = program.launches
    return build_launch(launch, "sm90"), launch, program.names


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
    kernel, launch, names = made(128, transposes=transposes, causal=True)
    driver = Driver(sizes_in(kernel.asm["ptx"]))
    monkeypatch.setattr(packed, "driver", driver.functions)
    maps, of = {}, launchable(kernel)

    class Direct:
        def __init__(self, compiled, programs, launcher, packs):
            self.compiled, self.programs, self.launcher = compiled, programs, launcher

        def arguments(self, stream, args):
            return stream, *args

        def encode(self, which, x):
            encoded = packed.Map(bytes([len(maps) + 1] * 128))
            return [maps.setdefault((which, x.base.data_ptr()), encoded), *x.shape, *x.strides]

    monkeypatch.setattr(direct, "launcher_of", lambda compiled: (None, False))
    monkeypatch.setattr(hopper, "Direct", Direct)
    monkeypatch.setattr(hopper, "map_of", lambda encoded: encoded)
    moving = {name: 2**40 + 16 * n for n, name in enumerate(names)}
    found = launch.relaunch_of(of, {name: hopper.At(x) for name, x in moving.items()})
    found(7, [*moving.values()])
    ((_, _, values),) = driver.launched
    numbers = iter(values)
    read = [x for x in launch.args.values() if isinstance(x, DescriptorFields)]
    assert len(read) == 4 + transposes
    for n, x in enumerate(read):
        assert next(numbers) == bytes(maps[n, moving[x.base.name]])
        assert [int.from_bytes(next(numbers), "little") for _ in x.shape] == [*x.shape]
        assert [int.from_bytes(next(numbers), "little") for _ in x.strides] == [*x.strides]
    scales = launch.args["scales"]
    rest = [int.from_bytes(x, "little") for x in numbers]
    addresses = [moving[x.name] for x in (launch.args["lse"], *scales[:3])]
    tiles = moving["tile_counter"]
    assert rest[:5] == [*addresses, scales.nheads_k] and rest[5] == tiles  # None is no parameter
    assert rest.count(tiles) == 1
    if transposes:
        v_t, words = (moving[x.name] for x in launch.args["transposing"][:2])
        assert [x for x in rest if x in (v_t, words)] == [v_t, words]
