"""The Hopper backward of sequences that have lengths of their own: packed ones, and `seqused_k`.

The forward is the oracle's, so that each gradient is judged alone.
"""

import math
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from helpers.backwards import gradients_of
from helpers.tiers import every, sample
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gluon_emulator.hopper import emulate
from tilewise.kernels.hopper import tile_counter
from tilewise.kernels.hopper.bwd import launch as bwd_launch
from tilewise.kernels.hopper.descriptors import GL_DTYPES, checked, ragged_by_head
from tilewise.kernels.hopper.layouts import shared
from tilewise.kernels.hopper.tma import load_ragged, store_ragged
from tilewise.kernels.portable import launch as portable
from tilewise.problem import Extras, Problem, Saved, Scalars, describe
from tilewise.testing import use_emulator
from tilewise.testing.cases import Case, Features, PackedCase, Sizes
from tilewise.testing.inputs import Inputs, guarded, make_inputs, poisoned
from tilewise.testing.packed import join, pack, share
from tilewise.testing.run import standards
from tilewise.testing.tolerance import judge

Tensor = torch.Tensor
BF16 = torch.bfloat16
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
ON = [
    pytest.param("cpu", marks=pytest.mark.emulator),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_hopper]),
]
SEEDS = sample(range(12), 0)
ONE_HEAD = Sizes(nheads=1, nheads_k=1, headdim=64)
GROUPS = Sizes(nheads=4, nheads_k=2, headdim=64)
PAIR = Sizes(nheads=2, nheads_k=1, headdim=64)

PACKED = (
    PackedCase("ragged", (70, 0, 130, 5), (90, 4, 150, 0), Features(lse_grad=True), PAIR),
    PackedCase("one", (5,), (7,), Features(causal=True), ONE_HEAD),  # fewer tiles than programs
    PackedCase("ones", (1,) * 5, (1, 200, 3, 0, 1), Features(causal=True), ONE_HEAD),
    PackedCase("whole-blocks", (128, 256), (256, 128), Features(causal=True), ONE_HEAD),
    # Keys that no query sees, of a sequence that fills its blocks
    PackedCase("unseen-keys", (128, 64), (300, 200), Features(causal="top_left"), ONE_HEAD),
    PackedCase("longer-queries", (200, 90), (70, 90), Features(causal=True), ONE_HEAD),
    PackedCase("window", (150, 60), (150, 200), Features(window=(40, 20)), ONE_HEAD),
    PackedCase("many", (3,) * 40 + (90,), (1,) * 40 + (100,), Features(), ONE_HEAD),
    PackedCase(
        "everything",
        (20, 0, 64),
        (25, 9, 100),
        Features(True, (50, 0), 3.0, alibi="batch", sinks=True, lse_grad=True),
        GROUPS,
        spare=5,
    ),
    PackedCase("sinks", (9, 140), (0, 30), Features(sinks=True), GROUPS),
    PackedCase("d128", (100, 60), (130, 40), Features(), PAIR._replace(headdim=128)),
    PackedCase(
        "d128-spare", (70, 0), (140, 9), Features(causal=True), PAIR._replace(headdim=128), 60
    ),
    PackedCase("tail", (70, 9), (90, 20), Features(causal=True), PAIR, tail=9),
    PackedCase(
        "tail-sinks", (50, 0), (60, 9), Features(sinks=True, lse_grad=True), GROUPS, 5, tail=150
    ),
    PackedCase("padded-heads", (50, 90), (70, 20), Features(), Sizes(1, 1, 1, 2, 2, 40, 72), 3),
    PackedCase("wide", (100, 0, 70), (70, 20, 9), Features(), PAIR._replace(headdim=248)),
    PackedCase("own-dq", (100, 0, 140), (70, 20, 9), Features(), PAIR._replace(headdim=256)),
    PackedCase(
        "own-dq-window",
        (20, 0, 164),
        (25, 9, 200),
        Features(True, (50, 0), sinks=True, lse_grad=True),
        GROUPS._replace(headdim=256),
        spare=5,
        tail=150,
    ),
    PackedCase(
        "wide-spare", (60, 0), (90, 20), Features(causal=True), PAIR._replace(headdim=256), 70
    ),
    PackedCase(
        "three-quarters", (90, 7), (70, 9), Features(causal=True), Sizes(1, 1, 1, 1, 1, 192, 128)
    ),
    PackedCase(
        "three-quarters-spare",
        (70, 0, 40),
        (150, 9, 60),
        Features(),
        Sizes(1, 1, 1, 2, 1, 160, 64),
        60,
    ),
)

SEQUSED = (
    Case("s", Sizes(3, 70, 300, 4, 2, 64), Features(seqused_k=(200, 0, 128), lse_grad=True)),
    Case("t", Sizes(2, 128, 150, 1, 1, 128), Features(True, seqused_k=(70, 150))),
    Case("u", Sizes(2, 100, 200, 2, 2, 256), Features(seqused_k=(90, 1), memory="sequence_first")),
    Case("v", Sizes(2, 64, 300, 2, 2), Features("top_left", seqused_k=(290, 40), layout="bhsd")),
    Case("w", Sizes(2, 70, 200, 2, 1, 192, 128), Features(seqused_k=(150, 1))),
)


class Given(NamedTuple):
    """A backward's arguments, q, k, v and what belongs to them as (batch, seqlen, nheads, ...)."""

    problem: Problem
    saved: Saved
    extras: Extras
    scalars: Scalars


def given_of(inputs: Inputs, forward: dict, features: Features, extras: Extras, deterministic):
    """The arguments, of inputs and forward results in the order of `attention`."""
    q, k, v, dout, out = inputs.q, inputs.k, inputs.v, inputs.dout, forward["out"].to(BF16)
    dlse, lse = inputs.dlse, forward["lse"].float()
    if q.dim() == 3:
        q, k, v, dout, out, lse = (x.unsqueeze(0) for x in (q, k, v, dout, out, lse))
        dlse = None if dlse is None else dlse.unsqueeze(0)
    elif features.layout == "bhsd":
        q, k, v, dout, out = (x.transpose(1, 2) for x in (q, k, v, dout, out))
    left, right = features.window or (-1, -1)
    right = 0 if features.causal else right
    scalars = Scalars(features.scale or q.shape[3] ** -0.5, features.softcap or 0.0, left, right)
    align = "top_left" if features.causal == "top_left" else "bottom_right"
    problem = describe(q, k, v, extras, scalars, align, deterministic)
    return Given(problem, Saved(dout, dlse, q, k, v, out, lse), extras, scalars)


def packed_call(case: PackedCase, deterministic=False, device="cpu"):
    """The arguments of a packed case, and what its results are judged by."""
    parts = [make_inputs(*part[1:], BF16, device, part.seed) for part in case.parts]
    parts = share(parts)
    inputs, lengths = pack(case, parts)
    if inputs.dlse is not None and case.spare:
        is_used = used_rows(case.queries, case.spare)
        inputs.dlse[:, : len(is_used)][:, ~is_used] = math.nan
    runs = zip(*(standards(*both) for both in zip(case.parts, parts)))
    oracle, *plain = (join(case, x) for x in runs)
    extras = Extras(inputs.extras.alibi_slopes, inputs.extras.sinks)._replace(**lengths)
    return given_of(inputs, oracle, case.features, extras, deterministic), oracle, plain


def used_rows(lengths, spare):
    return torch.cat([torch.arange(n + spare) < n for n in lengths])


def dense_call(case: Case, deterministic=False):
    """The same of a batch with `seqused_k`."""
    inputs = make_inputs(case.sizes, case.features, BF16, "cpu", case.seed)
    oracle, *plain = standards(case, inputs)
    extras = Extras(seqused_k=inputs.extras.seqused_k)
    return given_of(inputs, oracle, case.features, extras, deterministic), oracle, plain


def backward(given: Given, seed=0):
    """The gradients, their memory poisoned before, by name."""
    with use_emulator(seed), poisoned():
        grads = gradients_of(bwd_launch, *given)
    return {name: x for name, x in grads._asdict().items() if x is not None}


def assert_right(grads, oracle, plain, features=None):
    """As good as the standards ask, and 0 where nothing comes in."""
    for name, grad in grads.items():
        if grad.dim() == 4 and oracle[name].dim() == 3:
            grad = grad.squeeze(0)
        if grad.dim() == 4 and features and features.layout == "bhsd":
            grad = grad.transpose(1, 2)
        verdict = judge(grad, oracle[name], *(runs[name] for runs in plain))
        assert verdict.ok, f"{name}: {verdict}"


@pytest.mark.emulator
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", every(2, PACKED), ids=lambda case: case.name)
def test_packed_sequences(case, seed):
    """Each gets the gradients of a call of its own, in any order of events."""
    given, oracle, plain = packed_call(case)
    assert_right(backward(given, seed), oracle, plain)


@pytest.mark.emulator
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", SEQUSED, ids=lambda case: case.name)
def test_used_keys_of_a_batch(case, seed):
    given, oracle, plain = dense_call(case)
    assert_right(backward(given, seed), oracle, plain, case.features)


@pytest.mark.emulator
def test_batches_that_are_no_whole_number_of_heads_apart():
    """Such keys are copied: a descriptor has no dimension left for batches."""
    given, oracle, plain = dense_call(SEQUSED[0])
    k = torch.full((2, 3, 300, 72), math.nan, dtype=BF16)[..., :64].permute(1, 2, 0, 3)
    k = k.copy_(given.saved.k)
    assert k.stride(0) % k.stride(2)
    given = given._replace(saved=given.saved._replace(k=k))
    assert_right(backward(given), oracle, plain)


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["d128", "wide", "three-quarters"])
@pytest.mark.parametrize("value", sample([math.nan, math.inf], math.nan))
def test_what_one_sequence_holds_reaches_no_other(name, value):
    case = next(case for case in PACKED if case.name == name)
    given, oracle, plain = packed_call(case)
    rows, keys = slice(0, case.queries[0]), slice(0, case.keys[0])
    read = given.saved
    for x, where in ((read.q, rows), (read.dout, rows), (read.k, keys), (read.v, keys)):
        x[:, where] = value
    grads = backward(given)
    for name, after in (("dq", rows.stop), ("dk", keys.stop), ("dv", keys.stop)):
        of_others = [x[name][after:] for x in (oracle, *plain)]
        assert judge(grads[name][0, after:], *of_others).ok
        assert grads[name][0, :after].isnan().any()


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["d128-spare", "wide-spare", "three-quarters-spare"])
def test_keys_that_are_not_used_have_gradient_0_whatever_queries_hold(name):
    case = next(case for case in PACKED if case.name == name)
    given, *_ = packed_call(case)
    given.saved.dout[:, : case.queries[0]] = math.nan
    grads = backward(given)
    unused = ~used_rows(case.keys, case.spare)
    assert grads["dk"][0, unused].eq(0).all() and grads["dv"][0, unused].eq(0).all()


ORDERED = [case for case in PACKED if case.name in ("ragged", "unseen-keys", "d128-spare", "wide")]


@pytest.mark.emulator
@pytest.mark.parametrize("case", sample(ORDERED, *ORDERED[::2]), ids=lambda case: case.name)
def test_deterministic_in_any_order_of_events(case):
    given, oracle, plain = packed_call(case, deterministic=True)
    first, again = (backward(given, seed) for seed in (0, 2))
    assert_right(first, oracle, plain)
    assert all(torch.equal(first[name], again[name]) for name in again)


@pytest.mark.emulator
@pytest.mark.parametrize("deterministic", sample([False, True], True))
@pytest.mark.parametrize("keys", every(2, [(0, 0), (5, 0), (200, 40), (9,) * 6]), ids=str)
def test_the_counter_of_tiles_is_back_at_zero(keys, deterministic):
    """However few of the tiles that there could be there are."""
    case = PackedCase("counted", (3,) * len(keys), keys, Features(), ONE_HEAD, spare=1)
    given, oracle, plain = packed_call(case, deterministic)
    counter = torch.zeros(1, dtype=torch.int32)
    with mock.patch.object(tile_counter, "counters", lambda *_, count: counter):
        for seed in range(3):
            assert_right(backward(given, seed), oracle, plain)
            assert counter.item() == 0


def test_no_rows_at_all():
    empty = PackedCase("empty", (0, 0), (0, 0), Features(), ONE_HEAD)
    given, *_ = packed_call(empty)
    assert all(grad.numel() == 0 for grad in backward(given).values())
    for queries, keys in (((0, 0), (3, 9)), ((3, 9), (0, 0))):
        case = PackedCase("half-empty", queries, keys, Features(sinks=True), ONE_HEAD)
        given, oracle, plain = packed_call(case)
        assert_right(backward(given), oracle, plain)


@gluon.jit
def copy_sequences_kernel(x_desc, y_desc, starts, used, row, ROWS: gl.constexpr, D: gl.constexpr):
    """A block of each sequence and head, from a row of the sequence on."""
    sequence, head = gl.program_id(0), gl.program_id(1)
    layout: gl.constexpr = shared(ROWS, D, x_desc.dtype)
    block = gl.allocate_shared_memory(x_desc.dtype, [ROWS, D], layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    start, stop = gl.load(starts + sequence), gl.load(starts + sequence + 1)
    size = gl.load(used + sequence)
    mbarrier.expect(full, x_desc.block_type.nbytes)
    load_ragged(x_desc, start + size, size, head, row, full, block)
    mbarrier.wait(full, 0)
    store_ragged(y_desc, stop, stop - start, head, row, block)
    tma.store_wait(0)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("row", [0, 3, 64, 127])
def test_copies_are_cut_where_a_sequence_ends(row, device):
    """Rows that are not used read as zeros, and rows of the next sequence are not written."""
    lengths, used, rows, headdim = (5, 0, 130, 64, 1, 70), (3, 0, 130, 64, 0, 66), 64, 40
    starts = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    x = torch.full((1, sum(lengths), 3, headdim), math.nan, dtype=BF16, device=device)
    for start, n in zip(starts.tolist(), used):
        x[:, start : start + n] = torch.randn(1, n, 3, headdim, device=device).to(BF16)
    x, y = guarded(x), guarded(torch.full_like(x, 7.0))
    expected = torch.full_like(y, 7.0)
    for start, size, n in zip(starts.tolist(), lengths, used):
        stop = min(row + rows, size)
        if row < stop:
            expected[:, start + row : start + stop] = 0
        if row < (last := min(stop, n)):
            expected[:, start + row : start + last] = x[:, start + row : start + last]
    block = [1, 1, 1, rows, 64]
    layout = gl.NVMMASharedLayout.get_default_for(block, GL_DTYPES[BF16])
    args = (ragged_by_head(x, block, layout), ragged_by_head(y, block, layout))
    args = checked((*args, starts, torch.tensor(used, dtype=torch.int32, device=device), row))
    copy = emulate(copy_sequences_kernel) if device == "cpu" else copy_sequences_kernel
    copy[(len(lengths), 3)](*args, ROWS=rows, D=64, num_warps=4)
    assert torch.equal(y, expected)


def gpu_call(queries, keys, headdim, deterministic=False, causal=True):
    """The arguments of packed sequences on the GPU, after the portable forward: of as many heads as
    headdim 256 takes for a kernel of dQ.
    """
    heads = 8 if headdim == 256 else 4
    q = torch.randn(1, sum(queries), heads, headdim, device="cuda", dtype=BF16)
    k, v = (torch.randn(1, sum(keys), heads // 2, headdim, device="cuda", dtype=BF16) for _ in "kv")
    v = v[..., :128] if headdim == 192 else v
    extras = Extras(cu_seqlens_q=starts_of(queries), cu_seqlens_k=starts_of(keys))
    scalars = Scalars(headdim**-0.5, right=0 if causal else -1)
    problem = describe(q, k, v, extras, scalars, "bottom_right", deterministic)
    out, lse = portable.prepare(problem, scalars, q, k)(q, k, v, extras)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    return Given(problem, Saved(dout, dlse, q, k, v, out, lse), extras, scalars)


def starts_of(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)


QUERIES = (700, 0, 128, 1, 2100, 64, 333, 5) * 5
KEYS = (700, 9, 300, 200, 1900, 0, 64, 5) * 5


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
def test_agrees_with_the_portable_kernels(headdim, causal, deterministic):
    """At lengths, and at a number of tiles, that the emulator does not reach, twice in a row."""
    torch.manual_seed(0)
    given = gpu_call(QUERIES, KEYS, headdim, deterministic, causal)
    expected = gradients_of(portable, *given)
    for _ in range(2):
        for a, b in zip(gradients_of(bwd_launch, *given)[:3], expected):
            assert (a.float() - b.float()).norm() < 0.01 * b.float().norm()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_same_bits_300_times(headdim):
    torch.manual_seed(0)
    given = gpu_call(QUERIES, KEYS, headdim, deterministic=True)
    first = gradients_of(bwd_launch, *given)[:3]
    differ = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(300):
        again = gradients_of(bwd_launch, *given)[:3]
        differ |= torch.stack([(a != b).any() for a, b in zip(first, again)]).any()
    assert not differ.item()


@pytest.mark.gpu
@needs_hopper
def test_one_graph_serves_any_lengths():
    """Of one total and number of sequences: nothing but the device looks at them."""
    torch.manual_seed(0)
    given = gpu_call((300, 500, 100), (300, 500, 100), 64, deterministic=True)
    gradients_of(bwd_launch, *given)  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients_of(bwd_launch, *given)
    for lengths in ((300, 500, 100), (0, 900, 0), (1, 0, 899), (128, 128, 644)):
        for starts in (given.extras.cu_seqlens_q, given.extras.cu_seqlens_k):
            starts.copy_(starts_of(lengths))
        saved = given.saved
        inputs = saved.q, saved.k, saved.v
        prepared = portable.prepare(given.problem, given.scalars, *inputs[:2])
        forward = prepared(*inputs, given.extras)
        saved.out.copy_(forward[0]), saved.lse.copy_(forward[1])
        eager = gradients_of(bwd_launch, *given)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(eager[:3], captured[:3]))
