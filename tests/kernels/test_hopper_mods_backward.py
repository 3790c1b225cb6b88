"""The Hopper backward of masks, block masks, score functions, a bias and dropout.

The forward is the oracle's, so that each gradient is judged alone.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from helpers.backwards import gradients_of
from helpers.tiers import every, sample, sample_rows

from tilewise.errors import Avoidable
from tilewise.kernels import hopper
from tilewise.kernels.hopper.bias_memory import has_tiles
from tilewise.kernels.hopper.bwd import bias_pairs as bwd_pairs
from tilewise.kernels.hopper.bwd import launch as bwd_launch
from tilewise.mods.flatten import modifiers_of
from tilewise.problem import Extras, Problem, Saved, Scalars, describe
from tilewise.testing import use_emulator
from tilewise.testing.cases import Case, Features, PackedCase, Sizes
from tilewise.testing.inputs import Inputs, make_inputs, poisoned
from tilewise.testing.modified import modifiers
from tilewise.testing.packed import join, pack
from tilewise.testing.run import standards
from tilewise.testing.tolerance import judge

Tensor = torch.Tensor
BF16, FP16 = torch.bfloat16, torch.float16
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# Of a thread that computes with CUDA before torch has asked for a context
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
ON = [
    pytest.param("cpu", marks=pytest.mark.emulator),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_hopper]),
]
PAIR = Sizes(2, 130, 200, 4, 2, 64)
SQUARE = Sizes(2, 150, 150, 2, 2, 64)
TALL = Sizes(2, 210, 150, 4, 2, 64)
ONE = PAIR._replace(batch=1)
BLOCKS = (128, 128)


def _sizes(sizes: Sizes, headdim: int, headdim_v: int = 0) -> Sizes:
    return sizes._replace(headdim=headdim, headdim_v=headdim_v)


CASES = (
    # A mask that is asked for every pair
    Case("mask-prefix", PAIR, Features(mask="prefix")),
    Case("mask-by-head-window", PAIR, Features(mask="by-head", window=(60, 20), lse_grad=True)),
    Case("mask-holes", TALL, Features(mask="holes", sinks=True)),
    Case("mask-documents", PAIR, Features("top_left", mask="documents", seqused_k=(190, 90))),
    Case("mask-128", _sizes(PAIR, 128), Features(mask="by-head")),
    Case("mask-wide", _sizes(SQUARE, 256), Features(mask="documents", causal=True)),
    # By blocks
    Case("blocks-causal", SQUARE, Features(mask="causal", blocks=BLOCKS)),
    Case("blocks-documents", PAIR, Features(mask="documents", blocks=BLOCKS, lse_grad=True)),
    Case("blocks-by-head", TALL, Features(mask="by-head", blocks=BLOCKS, alibi="batch")),
    Case("blocks-holes", TALL, Features(mask="holes", blocks=(64, 128), softcap=3.0, sinks=True)),
    Case("blocks-long", Sizes(1, 500, 400, 2, 1), Features(mask="causal", blocks=BLOCKS)),
    Case("blocks-used", SQUARE, Features(mask="prefix", blocks=BLOCKS, seqused_k=(140, 0))),
    Case("blocks-128", _sizes(PAIR, 128), Features(mask="documents", blocks=BLOCKS)),
    Case("blocks-wide", _sizes(PAIR, 256), Features(mask="causal", blocks=(64, 64))),
    Case("blocks-three-quarters", _sizes(SQUARE, 192, 128), Features(mask="holes", blocks=BLOCKS)),
    # Score functions
    Case("score-tilted", PAIR, Features(score="tilted", lse_grad=True)),
    Case("score-table", PAIR, Features(causal=True, score="table")),
    Case("score-nonlinear", TALL, Features(score="nonlinear", alibi="heads")),
    Case("score-nonlinear-128", _sizes(PAIR, 128), Features(score="nonlinear", softcap=4.0)),
    Case("score-nonlinear-wide", _sizes(SQUARE, 256), Features(score="nonlinear")),
    Case("score-hiding", TALL, Features(score="hiding", sinks=True)),
    # A bias, in every way that it can be shared
    Case("bias", PAIR, Features(bias="bhqk")),
    Case("bias-heads", PAIR, Features(bias="hqk", causal=True, lse_grad=True)),
    Case("bias-keys", PAIR, Features(bias="bk", seqused_k=(170, 30))),
    Case("bias-queries", TALL, Features(bias="q", causal=True)),
    Case("bias-of-heads", SQUARE, Features(bias="h", sinks=True, alibi="heads", softcap=3.0)),
    Case("bias-128", _sizes(PAIR, 128), Features(bias="bhqk")),
    Case("bias-wide", _sizes(SQUARE, 256), Features(bias="qk")),
    Case("bias-window", PAIR, Features(bias="bhqk", window=(60, 20), alibi="heads")),
    Case("bias-blocks", PAIR, Features(bias="qk", mask="documents", blocks=BLOCKS)),
    Case("bias-used", PAIR, Features(bias="hqk", seqused_k=(170, 30), mask="prefix")),
    # Dropout
    Case("dropout", PAIR, Features(dropout=0.1, lse_grad=True)),
    Case("dropout-causal", TALL, Features(dropout=0.5, causal=True, sinks=True)),
    Case("dropout-128", _sizes(PAIR, 128), Features(dropout=0.3, causal=True)),
    Case("dropout-wide", _sizes(SQUARE, 256), Features(dropout=0.3)),
    Case("dropout-used", SQUARE, Features(dropout=0.2, seqused_k=(150, 70), softcap=3.0)),
    Case("dropout-nonlinear-wide", _sizes(SQUARE, 256), Features(dropout=0.3, score="nonlinear")),
    # All at once
    Case(
        "everything",
        PAIR,
        Features(
            window=(120, 60),
            softcap=3.0,
            alibi="batch",
            sinks=True,
            bias="hqk",
            mask="by-head",
            score="table",
            dropout=0.2,
            lse_grad=True,
        ),
    ),
    Case(
        "everything-in-blocks",
        _sizes(PAIR, 128),
        Features(
            softcap=3.0,
            bias="bqk",
            mask="documents",
            blocks=BLOCKS,
            score="nonlinear",
            dropout=0.2,
            seqused_k=(100, 200),
        ),
    ),
)
PACKED = (
    PackedCase("mask", (70, 0, 130), (90, 4, 150), Features(mask="prefix"), ONE),
    PackedCase("causal-mask", (70, 9, 130), (90, 4, 150), Features(True, mask="documents"), ONE),
    PackedCase("score", (70, 0, 130), (90, 4, 150), Features(True, score="tilted"), ONE, 9),
    PackedCase("dropout", (70, 0, 130), (90, 4, 150), Features(True, dropout=0.3), ONE, 9),
    PackedCase(
        "everything",
        (100, 60),
        (90, 150),
        Features(window=(90, 0), mask="by-head", score="nonlinear", dropout=0.3, alibi="batch"),
        _sizes(ONE, 128),
    ),
    PackedCase(
        "wide", (70, 30), (90, 5), Features(score="nonlinear", dropout=0.3), _sizes(ONE, 256)
    ),
)


class Given(NamedTuple):
    """A backward's arguments."""

    problem: Problem
    saved: Saved
    extras: Extras
    scalars: Scalars


def given_of(
    inputs: Inputs, sizes: Sizes, features: Features, forward: dict, deterministic=False, **lengths
):
    """The arguments of inputs and forward results, in (batch, seqlen, nheads, headdim) order."""
    tensors = inputs.dout, inputs.q, inputs.k, inputs.v, forward["out"], forward["lse"]
    dout, q, k, v, out, lse = (x.unsqueeze(0) if inputs.q.dim() == 3 else x for x in tensors)
    asked = modifiers(sizes, features, q.device)
    functions = (asked.get(name) for name in ("mask_mod", "score_mod", "block_mask"))
    shape = q.shape[0], q.shape[2], *((0, 0) if lengths else (q.shape[1], k.shape[1]))
    mods, captured = modifiers_of(*functions, shape)
    extras = inputs.extras._replace(
        dropout_rng=asked.get("dropout_rng"), captured=captured, **lengths
    )
    left, right = features.window or (-1, -1)
    right = 0 if features.causal else right
    numbers = q.shape[3] ** -0.5, features.softcap or 0.0, left, right, features.dropout
    scalars = Scalars(*numbers)
    align = "top_left" if features.causal == "top_left" else "bottom_right"
    flags = align, deterministic, mods, inputs.extras.bias is not None
    problem = describe(q, k, v, extras, scalars, *flags)
    results = out.to(q.dtype), lse.float()
    return Given(problem, Saved(dout, inputs.dlse, q, k, v, *results), extras, scalars)


def case_of(name):
    return next(case for case in CASES if case.name == name)


def call_of(case: Case, device="cpu", dtype=BF16, deterministic=False):
    """The arguments of a case, and what its results are judged by."""
    inputs = make_inputs(case.sizes, case.features, dtype, device, case.seed)
    oracle, *plain = standards(case, inputs)
    given = given_of(inputs, case.sizes, case.features, oracle, deterministic)
    return given, oracle, plain


def packed_call_of(case: PackedCase, device="cpu"):
    """The same of packed sequences. The n-th of them is judged as row n of a batch of its own."""
    rows, runs = [], []
    for n, part in enumerate(case.parts):
        part = part._replace(sizes=part.sizes._replace(batch=len(case.queries)))
        inputs = make_inputs(*part[1:], BF16, device, part.seed)
        extras = [None if x is None else x[n : n + 1] for x in inputs.extras.optional]
        row = [None if x is None else x[n : n + 1] for x in inputs[:5]]
        rows.append(Inputs(*row, Extras(*extras)))
        results = standards(part, inputs)
        runs.append([{name: x[n : n + 1] for name, x in run.items()} for run in results])
    inputs, lengths = pack(case, rows)
    oracle, *plain = (join(case, x) for x in zip(*runs))
    longest = case.sizes._replace(batch=len(rows), seqlen_q=max(case.queries))
    longest = longest._replace(seqlen_k=max(case.keys))
    return given_of(inputs, longest, case.features, oracle, **lengths), oracle, plain


def backward(given: Given, seed=0):
    """The gradients, their memory poisoned before, by name."""
    with use_emulator(seed), poisoned():
        grads = gradients_of(bwd_launch, *given)
    return {name: x for name, x in grads._asdict().items() if x is not None}


def assert_right(grads, oracle, plain):
    wanted = {name for name in oracle if name.startswith("d")}
    assert grads.keys() == wanted
    failures = []
    for name, grad in grads.items():
        grad = grad.view(oracle[name].shape)
        verdict = judge(grad, oracle[name], *(runs[name] for runs in plain))
        if not verdict.ok:
            failures.append(f"{name}: {verdict}")
    assert not failures, "\n".join(failures)


# One of each way through the kernels, of which `make test` takes every other
FAST = [
    *("mask-by-head-window", "mask-holes", "mask-wide"),
    *("blocks-causal", "blocks-used", "blocks-three-quarters"),
    *(
        "score-tilted",
        "score-table",
        "score-nonlinear",
        "score-nonlinear-128",
        "score-nonlinear-wide",
    ),
    *("bias", "bias-of-heads", "bias-blocks", "dropout-causal", "dropout-wide"),
]


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(
    "case", sample(CASES, *map(case_of, FAST[::2])), ids=lambda case: case.name
)
def test_gradients(case, device):
    given, oracle, plain = call_of(case, device)
    assert_right(backward(given), oracle, plain)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("case", every(2, PACKED), ids=lambda case: case.name)
def test_packed_sequences(case, device):
    """A mask, a score function and dropout know a sequence by its number."""
    given, oracle, plain = packed_call_of(case, device)
    assert_right(backward(given), oracle, plain)


SOME = ("bias-heads", "blocks-holes", "dropout-wide", "blocks-wide")


@pytest.mark.emulator
@pytest.mark.parametrize(
    "name, seed",
    sample_rows(itertools.product(SOME, range(8)), ("bias-heads", 1), ("blocks-holes", 2)),
)
def test_any_order_of_events(name, seed):
    """No metadata and no bias is read before it is written or after its buffer was reused."""
    given, oracle, plain = call_of(case_of(name))
    assert_right(backward(given, seed), oracle, plain)


ORDERED = [
    *("mask-by-head-window", "mask-wide", "score-table", "bias-heads", "dropout-causal"),
    "dropout-wide",
]


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("name", sample(ORDERED, "bias-heads"))
def test_deterministic(name, device):
    given, oracle, plain = call_of(case_of(name), device, deterministic=True)
    first, again = (backward(given, seed) for seed in (0, 3))
    assert_right(first, oracle, plain)
    assert all(torch.equal(first[name], again[name]) for name in again)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(
    "name", sample(["bias", "dropout-128", "blocks-wide", "everything"], "bias")
)
def test_half_precision(name, device):
    given, oracle, plain = call_of(case_of(name), device, FP16)
    assert_right(backward(given), oracle, plain)


@pytest.mark.parametrize("name", sample(["bias-heads", "bias-used"], "bias-used"))
def test_a_shared_bias_without_memory_for_sums(name, monkeypatch):
    """Its gradient takes a kernel of its own."""
    given, oracle, plain = call_of(case_of(name))
    monkeypatch.setattr(bwd_pairs, "MAX_DS_BYTES", 0)
    assert_right(backward(given), oracle, plain)


def test_a_bias_in_a_part_of_a_tensor():
    """Its gradient is a tensor of its own, with rows that TMA cannot write."""
    case = Case("sliced", PAIR._replace(seqlen_k=199), Features(bias="bhqk"))
    given, oracle, plain = call_of(case)
    bias = torch.zeros(2, 4, 130, 208, dtype=BF16)[..., :199]
    given = given._replace(extras=given.extras._replace(bias=bias.copy_(given.extras.bias)))
    grads = backward(given)
    assert_right(grads, oracle, plain)
    assert grads["dbias"].stride() == torch.empty_like(bias).stride()


def test_how_the_gradient_of_a_bias_comes_about(monkeypatch):
    """dS itself, a sum of it, or a kernel of its own."""

    def way_of(name, **changed):
        problem, saved, extras, _ = call_of(case_of(name))[0]
        problem = problem._replace(**changed)
        return bwd_pairs.way_of(
            problem, extras.bias, torch.empty_like(extras.bias), saved.q, saved.k
        )

    assert way_of("bias") == way_of("bias-window") == bwd_pairs.WRITTEN
    assert way_of("bias-heads") == way_of("bias-blocks") == bwd_pairs.SUMMED
    for name in ("bias-keys", "bias-of-heads", "bias-wide", "everything", "everything-in-blocks"):
        assert not way_of(name), name
    assert not way_of("bias", has_softcap=True) and not way_of("bias", has_dropout=True)
    monkeypatch.setattr(bwd_pairs, "MAX_DS_BYTES", 0)
    assert way_of("bias") and not way_of("bias-heads")


def test_which_biases_the_copy_engine_reads():
    """Those of every pair, of the inputs' dtype, with rows at multiples of 16 bytes."""
    q = torch.empty(2, 130, 4, 64, dtype=BF16)
    bias = torch.empty(2, 4, 131, 208, dtype=BF16)

    def is_copied(bias):
        return has_tiles(bias, q)

    whole = bias[:, :, 1:, :200]
    assert is_copied(whole) and is_copied(whole[:1]) and is_copied(whole[:1, :1])
    assert is_copied(bias[:, :, 1:, 8:])
    assert not is_copied(None) and not is_copied(whole.float())
    assert not is_copied(whole[:, :, :1]) and not is_copied(whole[..., :1])
    assert not is_copied(bias[:, :, 1:, 1:201])  # at 2 bytes
    assert not is_copied(torch.empty(2, 4, 200, 130, dtype=BF16).transpose(2, 3))
    assert not is_copied(whole[:1, :1].expand(2, 4, 130, 200))  # a stride of 0


@pytest.mark.parametrize("lengths", [(0, 9), (9, 0)], ids=str)
def test_a_bias_of_no_pairs(lengths):
    """It is there all the same where it is shared, and has gradient 0."""
    case = Case("none", Sizes(1, *lengths, 2, 2, 64), Features(bias="h"))
    inputs = make_inputs(*case[1:], BF16)
    forward = dict(out=inputs.q, lse=torch.full((1, 2, lengths[0]), -torch.inf))
    grads = backward(given_of(inputs, *case[1:], forward))
    assert all(grad.eq(0).all() for grad in grads.values())


def refusal_of(headdim=64, block=BLOCKS, deterministic=False):
    sizes = Sizes(1, 256, 256, 1, 1, headdim)
    features = Features(mask="causal", blocks=block)
    inputs = make_inputs(sizes, features, BF16)
    forward = dict(out=inputs.q, lse=torch.zeros(1, 1, 256))
    given = given_of(inputs, sizes, features, forward, deterministic)
    with use_emulator():
        return hopper.supports(given.problem, torch.device("cpu"))


def test_block_masks_that_are_not_served():
    """Blocks of the mask that are no multiple of a tile's, or an order of additions."""
    assert refusal_of() is None and refusal_of(block=(128, 256)) is None
    assert refusal_of(256, (128, 64)) is None
    for refused in (
        refusal_of(block=(32, 128)),
        refusal_of(block=(256, 128)),
        refusal_of(block=(64, 64)),
        refusal_of(256, (128, 32)),
        refusal_of(deterministic=True),
    ):
        assert isinstance(refused, Avoidable)
