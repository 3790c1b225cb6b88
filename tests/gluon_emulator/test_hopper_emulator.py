"""The emulator computes what kernels mean, whatever their names are called."""

import pytest
import torch
import triton
import triton.language as tl
from helpers import hopper_kernels, hopper_launches
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gluon_emulator.hopper import emulate
from tilewise.testing import build, stats
from tilewise.tile import bounds, softmax

pytestmark = pytest.mark.emulator


def run(launch, seed=0, **options):
    kernel = getattr(hopper_kernels, launch.name)
    emulate(kernel, seed, **options)[launch.grid](*launch.args, **launch.constants)
    launch.check()


LAUNCHES = {
    "copy": lambda: hopper_launches.copy(),
    "copy, ragged": lambda: hopper_launches.copy(rows=200, ctas=2, stages=3),
    "copy, fewer blocks than CTAs": lambda: hopper_launches.copy(rows=64, ctas=3),
    "matmul": lambda: hopper_launches.matmul(hopper_kernels, k=192, stages=2),
    "matmul, one stage": lambda: hopper_launches.matmul(hopper_kernels, m=128, stages=1),
    "attention": lambda: hopper_launches.attention(),
    "attention, not causal": lambda: hopper_launches.attention(100, 70, causal=False),
    "attention, rows without keys": lambda: hopper_launches.attention(192, 64),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_compute_what_torch_does(name):
    for seed in range(3):
        run(LAUNCHES[name](), seed)


def test_a_matmul_is_rounded_once():
    """To float32, so that a row's bits do not depend on where in its tile it is."""
    launch = hopper_launches.matmul(hopper_kernels, k=64)
    a, b, c = launch.args[0].base, launch.args[1].base, launch.args[2]
    expected = c + (a.double() @ b.double()).float()
    run(launch, 0)
    assert torch.equal(c, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_under_many_seeds(name):
    for seed in range(3, 60):
        run(LAUNCHES[name](), seed)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["copy", "matmul", "attention"])
def test_kernels_are_true_gluon(name):
    launch = LAUNCHES[name]()
    kernel = getattr(hopper_kernels, launch.name)
    found = stats(build(kernel, *launch.args, on="sm90", **launch.constants))
    assert found["UTMALDG"] > 0 and found["spill_stores"] == 0
    assert (found["HGMMA"] > 0) == (name != "copy") and not found["wgmma_serialized"]


def test_a_seed_is_one_order_of_events():
    def events(seed):
        torch.manual_seed(0)
        trace = []
        run(hopper_launches.copy(), seed, trace=trace)
        return trace

    first = events(3)
    assert first == events(3) != events(4)
    assert {cta for cta, *_ in first} == {(0, 0, 0), (1, 0, 0), (2, 0, 0)}
    kinds = {(partition, event) for _, partition, event, _ in first}
    assert {("copy_load", "TMA load"), ("copy_store", "TMA store"), ("copy_kernel", "init")} < kinds
    assert any(detail == "ring.full[1] phase 0" for *_, detail in first)


@pytest.mark.parametrize("resident", [1, 2, 64])
def test_ctas_move_in_as_others_end(resident):
    run(hopper_launches.copy(rows=640, ctas=10), resident=resident)
    run(hopper_launches.attention(), resident=resident)


def test_launches_without_gradients_and_in_inference_mode():
    launch = hopper_launches.copy()
    launch.args[0].base.requires_grad_()
    run(launch)
    with torch.inference_mode():
        run(hopper_launches.copy())


# How names find their meaning.


def doubled_by(constant):
    @gluon.jit
    def kernel(x):
        gl.store(x, gl.load(x) * constant)

    return kernel


def test_captured_variables():
    x = torch.ones(1)
    emulate(doubled_by(gl.constexpr(3.0)))[(1,)](x)
    assert x.item() == 3.0


@gluon.jit
def calling_kernel(x, FUNCTION: gl.constexpr, num_warps: gl.constexpr):
    gl.store(x, FUNCTION(gl.load(x)) + gl.num_warps() + num_warps)


@triton.jit
def halve(x):
    return tl.fdiv(x, 2.0)


def test_functions_as_constants_and_launch_options():
    x = torch.full((1,), 8.0)
    grid = lambda given: (given["num_warps"] - 7,)  # noqa: E731
    emulate(calling_kernel)[grid](x, FUNCTION=halve, num_warps=8, num_stages=3, maxnreg=128)
    assert x.item() == 20.0


@gluon.jit
def write_halves(x, out, at: gl.constexpr):
    """Calls itself, and passes a layout on."""
    if x.shape[0] > 8:
        low, high = gl.split(x.reshape([2, x.shape[0] // 2]).permute(1, 0))
        write_halves(low, out, at)
        write_halves(high, out, at + x.shape[0] // 2)
    else:
        gl.store(out + at + gl.arange(0, x.shape[0], x.type.layout), x)


@gluon.jit
def halves_kernel(x, out):
    write_halves(gl.load(x + gl.arange(0, 32, gl.AutoLayout())), out, 0)


def test_a_function_that_calls_itself():
    x, out = torch.arange(32.0), torch.zeros(32)
    emulate(halves_kernel)[(1,)](x, out)
    assert torch.equal(out, x)


raise_two = tl.exp2


@gluon.jit
def names_kernel(x, out):
    v = gl.load(x)
    gl.store(out, raise_two(v) + tl.math.exp2(v) + gl.exp2(v) + v.exp2())
    gl.store(out + 1, tl.sigmoid(v))  # Triton's own, rebuilt as a helper of ours would be
    gl.store(out + 2, softmax.lse_to_log2(v))
    gl.store(out + 3, bounds.clamp(v, 0, 1))
    barrier = gl.allocate_shared_memory(gl.int64, [1], gl.nvidia.hopper.mbarrier.MBarrierLayout())
    gl.nvidia.hopper.mbarrier.init(barrier, count=1)
    gl.nvidia.hopper.mbarrier.invalidate(barrier)


def test_a_builtin_is_known_by_any_name():
    x, out = torch.full((1,), 3.0), torch.zeros(4)
    emulate(names_kernel)[(1,)](x, out)
    expected = torch.tensor([32.0, 3.0, 3 * 1.4426950408889634, 1.0])
    expected[1] = x.sigmoid().item()
    torch.testing.assert_close(out, expected)


@gluon.jit
def unknown_kernel(x):
    gl.histogram(gl.load(x), 4)


def test_what_has_no_meaning_is_named():
    with pytest.raises(NotImplementedError, match="histogram"):
        emulate(unknown_kernel)[(1,)](torch.zeros(1))
    with pytest.raises(TypeError, match="expected a @gluon.jit kernel, got function"):
        emulate(halve.fn)
    with pytest.raises(NotImplementedError, match="clusters"):
        emulate(unknown_kernel)[(1,)](torch.zeros(1), num_ctas=2)
    with pytest.raises(ValueError, match="on meta"):
        emulate(unknown_kernel)[(1,)](torch.zeros(1, device="meta"))


@gluon.jit
def assembly_kernel(x):
    y = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [gl.load(x)], gl.float32, is_pure=True, pack=1
    )
    gl.store(x, y)


def test_assembly_is_given_by_the_user():
    x = torch.full((1,), 3.0)
    with pytest.raises(NotImplementedError, match="ex2.approx.ftz.f32"):
        emulate(assembly_kernel)[(1,)](x)
    emulate(assembly_kernel, asm={"ex2.approx.ftz.f32 $0, $1;": torch.exp2})[(1,)](x)
    assert x.item() == 8.0
