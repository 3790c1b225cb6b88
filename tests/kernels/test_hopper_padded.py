"""Head dims that are no multiple of 8, by the Hopper kernels: what is read where it lies, what is
copied, when, and that nothing beside a row reaches what comes back.
"""

import pytest
import torch
from helpers.tiers import sample

import tilewise
from tilewise import dispatch, errors
from tilewise.errors import PerformanceWarning, Slower
from tilewise.kernels import hopper
from tilewise.kernels.common.arguments import aligned
from tilewise.kernels.common.operand import operand_of
from tilewise.kernels.common.program import Program
from tilewise.kernels.common.workspace import Workspace
from tilewise.kernels.hopper import copy_rows, padded
from tilewise.kernels.hopper.bwd import launch as bwd_launch
from tilewise.problem import NO_EXTRAS, Between, Extras, Saved, Scalars, describe
from tilewise.testing import use_emulator, use_interpreter
from tilewise.testing.cases import Case, Features, PackedCase, Sizes
from tilewise.testing.run import run_case

CPU = torch.device("cpu")
BF16 = torch.bfloat16
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")

VARIANTS = {
    "causal": Case("a", Sizes(2, 150, 170, 4, 2, 100), Features(causal=True, lse_grad=True)),
    "odd": Case("b", Sizes(1, 130, 140, 2, 1, 65, 33), Features(softcap=3.0, sinks=True)),
    "shared": Case("c", Sizes(2, 9, 300, 8, 2, 36), Features(causal=True)),
    "wide": Case("d", Sizes(1, 100, 140, 2, 2, 201, 255), Features(window=(30, 10))),
    "used": Case("e", Sizes(2, 90, 130, 2, 2, 100), Features(seqused_k=(0, 77), layout="bhsd")),
    "sliced": Case("f", Sizes(2, 90, 130, 2, 2, 72, 100), Features(memory="sliced")),
    "expanded": Case("g", Sizes(2, 90, 130, 2, 2, 100), Features(memory="expanded")),
    "three-warpgroups": Case("i", Sizes(1, 200, 300, 2, 2, 52), Features(lse_grad=True)),
    "wide-flat": Case("j", Sizes(1, 100, 140, 2, 2, 180, 132), Features(causal=True)),
    "odd-heads": Case("k", Sizes(2, 70, 130, 3, 3, 116), Features(window=(40, 0))),
    "packed": PackedCase(
        "l", (70, 0, 130, 5), (90, 4, 150, 0), Features(causal=True), Sizes(1, 1, 1, 2, 2, 100)
    ),
    "spare": PackedCase(
        "m", (50, 0, 70), (20, 30, 160), Features(), Sizes(1, 1, 1, 2, 2, 36, 68), spare=9
    ),
    "flat-by-two": Case("n", Sizes(1, 70, 140, 4, 4, 250), Features(lse_grad=True)),
    "flat-by-one": Case("o", Sizes(1, 70, 140, 8, 8, 33), Features(causal=True)),
    "values-by-head": Case("p", Sizes(2, 70, 130, 2, 2, 100, 104), Features()),
    "values-alone": Case("q", Sizes(2, 70, 130, 4, 2, 104, 100), Features(causal=True)),
    "dropped": Case("h", Sizes(1, 150, 140, 2, 1, 100), Features(dropout=0.2, bias="hqk")),
}


def problem_of(headdim, headdim_v=0, seqlen_q=8, seqlen_k=8, nheads_k=2):
    q = torch.empty(1, seqlen_q, 2, headdim, dtype=BF16)
    k = torch.empty(1, seqlen_k, nheads_k, headdim, dtype=BF16)
    v = torch.empty(1, seqlen_k, nheads_k, headdim_v or headdim, dtype=BF16)
    problem = describe(q, k, v, NO_EXTRAS, Scalars(1.0), "bottom_right", False)
    return problem, q, k, v


def gradients(q, k, v, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = tilewise.attention(*leaves, **options)
    return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize("name", sample(VARIANTS, "causal", "odd", "sliced"))
def test_within_the_budget(name):
    records = run_case(VARIANTS[name], "hopper", "cpu", BF16)
    failures = [str(record) for record in records if not record.verdict.ok]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("deterministic", [False, True])
def test_zeros_in_the_padding_change_no_bit(deterministic):
    """The kernels compute the same of a head that the caller padded."""
    q, k, v = (torch.randn(1, 130, 2, 100, dtype=BF16) for _ in "qkv")
    wide = [torch.nn.functional.pad(x, (0, 4)) for x in (q, k, v)]
    options = dict(causal=True, scale=0.1, backend="hopper", deterministic=deterministic)
    with use_emulator():
        found, expected = gradients(q, k, v, **options), gradients(*wide, **options)
    for mine, theirs in zip(found, expected):
        assert torch.equal(mine, theirs[..., :100]) and mine.is_contiguous()


@pytest.mark.parametrize("headdim, keys", [(100, 8), (64, 8), (64, 0)])
def test_keys_that_arrive_late_and_gradients_that_are_read_at_once(headdim, keys):
    """A caller whose k and v are filled by `before_keys` finds what it reads in `after_keys`."""
    problem, *given = problem_of(headdim, seqlen_k=keys)
    q, k, v = (torch.randn_like(x) for x in given)
    lse, dout = torch.zeros(1, 2, 8), torch.randn_like(q)
    late = [torch.full_like(x, torch.nan) for x in (k, v)]
    read = []

    def arrive():
        for x, whole in zip(late, (k, v)):
            x.copy_(whole)

    between = Between(arrive, lambda grads: read.extend(x.clone() for x in (grads.dk, grads.dv)))
    back = bwd_launch.prepare_backward(problem, Scalars(1.0))
    with use_emulator():
        expected = back(Saved(dout, None, q, k, v, q, lse), NO_EXTRAS)
        found = back(Saved(dout, None, q, *late, q, lse), NO_EXTRAS, between)
    assert all(map(torch.equal, read, (expected.dk, expected.dv)))
    assert all(map(torch.equal, found[:3], expected[:3]))


def test_the_scale_is_that_of_the_true_headdim():
    q, k, v = (torch.randn(1, 40, 1, 36, dtype=BF16) for _ in "qkv")
    with use_emulator():
        found = tilewise.attention(q, k, v, backend="hopper")
        assert torch.equal(found, tilewise.attention(q, k, v, scale=36**-0.5, backend="hopper"))


def watch_copies(monkeypatch):
    """How many tensors each launch of copies takes."""
    real, counts = padded.launch_of, []
    monkeypatch.setattr(padded, "launch_of", lambda pairs: counts.append(len(pairs)) or real(pairs))
    return counts


def test_rows_that_are_padded_already_are_read_where_they_lie(monkeypatch):
    """The padding is NaN and is not read."""
    memory = [torch.full((2, 70, 2, 104), torch.nan, dtype=BF16) for _ in "qkv"]
    q, k, v = (x[..., :100].normal_() for x in memory)
    copied = watch_copies(monkeypatch)
    with use_emulator():
        found = gradients(q, k, v, backend="hopper")
        assert copied == [1, 2], "the gradient that comes in; dK and dV"
        expected = gradients(*(x.contiguous() for x in (q, k, v)), backend="hopper")
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_values_are_read_where_they_lie(monkeypatch):
    """Of an even number of heads; what lies between them is NaN, and does not come back."""
    counts = watch_copies(monkeypatch)
    memory = [torch.full((2, 70, 4, 108), torch.nan, dtype=BF16) for _ in "qkv"]
    given = [x[..., :100].normal_() for x in memory]
    dense = [x.contiguous() for x in given]
    with use_emulator(), torch.no_grad():
        found, expected = (tilewise.attention(*x, backend="hopper") for x in (given, dense))
        assert counts == [2, 2], "q and k, by one launch"
        monkeypatch.setattr(padded, "is_flat", lambda *_, **named: False)
        copied = tilewise.attention(*given, scale=0.1, backend="hopper")
    assert found.is_contiguous() and found.isfinite().all()
    assert torch.equal(found, expected) and torch.equal(found, copied)


@pytest.mark.parametrize("seed", sample(range(9), 0, 1, 2))
def test_any_order_of_events(seed):
    """Tiles of one block and of more, heads that share keys, and O in halves."""
    for d, e, heads in ((100, 100, 2), (36, 132, 4)):
        q = torch.randn(1, 150, heads, d, dtype=BF16)
        k, v = (torch.randn(1, 150, 2, n, dtype=BF16) for n in (d, e))
        with use_emulator(seed), torch.no_grad():
            found = tilewise.attention(q, k, v, causal=True, backend="hopper")
        expected = tilewise.attention_reference(*(x.double() for x in (q, k, v)), causal=True)
        torch.testing.assert_close(found.double(), expected, atol=0.03, rtol=0.03)


def test_which_values_are_flat():
    def flat(columns, heads=2, step=0, start=0, problem=None):
        step = step or columns
        memory = torch.empty(64 * step * heads, dtype=BF16)[start:]
        v = memory.as_strided((2, 8, heads, columns), (8 * heads * step, heads * step, step, 1))
        return padded.is_flat(problem or problem_of(columns)[0], v)

    assert flat(100) and flat(100, step=108) and flat(250, heads=4) and flat(33, heads=8)
    assert not flat(100, heads=3), "rows are no whole number of 16 bytes apart"
    assert not flat(100, start=4), "the first is at no multiple of 16 bytes"
    assert not flat(104) and not flat(100, step=104), "TMA reads heads"
    assert not flat(126, heads=4), "with the head before it is wider than a tile"
    assert not flat(100, step=106, heads=4), "O would be shifted by half a piece"
    assert not flat(100, problem=problem_of(100)[0]._replace(has_seqused_k=True))


def test_copies_are_said_once(monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    q = torch.randn(1, 1024, 1, 36, dtype=BF16)
    problem, *_ = problem_of(36)
    with use_emulator():
        with pytest.warns(PerformanceWarning, match="headdim 36 is not a multiple of 8") as said:
            for _ in range(2):
                assert dispatch.choose_for(problem, q, q, q, NO_EXTRAS, None).NAME == "hopper"
        assert len(said) == 1


@pytest.mark.filterwarnings("ignore::tilewise.PerformanceWarning")
def test_few_queries_or_keys_are_not_worth_a_copy():
    def asked(*lengths, packed=0, **sizes):
        problem, q, k, v = problem_of(36, 0, *lengths, **sizes)
        starts = torch.zeros(packed + 1, dtype=torch.int32) if packed else None
        return problem, q, k, v, Extras(cu_seqlens_q=starts)

    def chosen(*given):
        return dispatch.choose_for(*given, None).NAME

    with use_emulator():
        assert chosen(*asked(1024, 1024)) == chosen(*asked(512, 4096, nheads_k=1)) == "hopper"
        for given in (asked(1, 4096), asked(4096, 1000), asked(4096, 4096, packed=5)):
            assert chosen(*given) == "cpu"
            assert dispatch.choose_for(*given, "hopper") is hopper
        assert isinstance(dispatch.ask("hopper", problem_of(36)[0], CPU, False, False), Slower)
        assert chosen(*problem_of(40), NO_EXTRAS) == "hopper", "nothing to copy"


@pytest.mark.parametrize("headdims", [(100, 100), (40, 33), (33, 40)])
def test_no_keys_and_no_queries(headdims):
    d, e = headdims
    q, k, v = (torch.randn(1, *n, dtype=BF16) for n in ((5, 2, d), (0, 2, d), (0, 2, e)))
    o = torch.randn(1, 5, 2, e, dtype=BF16)
    with use_emulator():
        for given in ((q, k, v), (k, q, o)):
            out, *grads = gradients(*given, backend="hopper")
            assert all(x.eq(0).all() for x in (out, *grads))


def copy_all(tensors, copies):
    """Runs a program that copies tensors into others."""
    both = [*tensors, *copies]
    operands = [operand_of(f"tensor {n}", x) for n, x in enumerate(both)]
    pairs = list(zip(operands, operands[len(copies) :]))
    program = Program([x.name for x in operands], padded.copies_of(pairs), Workspace(CPU))
    with use_interpreter():
        program(both)


@pytest.mark.parametrize("columns", [1, 33, 36, 100])
@pytest.mark.parametrize("memory", ["dense", "heads-first", "sliced", "one"])
def test_copied_rows(memory, columns):
    shape = (1, 1, 1) if memory == "one" else (2, 37, 3)
    x = torch.randn(*shape, columns + 7, dtype=BF16)[..., :columns]
    if memory != "sliced":
        x = x.contiguous()
    if memory == "heads-first":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    turned = x.transpose(1, 3).contiguous().transpose(1, 3)  # columns are no neighbours
    for given in ((x,), (x, x[:, :, :1]), (x, turned, x[:, :5], x[..., :1])):
        widths = (padded.padded_width(x.shape[-1]) for x in given[:3])
        copies = [x.new_empty(*x.shape[:-1], n) for x, n in zip(given, widths)]
        copy_all(given[:3], copies)
        for one, copy in zip(given, copies):
            assert torch.equal(copy[..., :columns], one) and aligned(copy)
            assert copy.shape[-1] % 8 == 0 and copy[..., columns:].eq(0).all()
    back = torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
    copy_all([copies[0][..., :columns]], [back])
    assert torch.equal(back, x)


def test_units():
    x = torch.empty(2, 5, 3, 100, dtype=BF16)
    assert copy_rows.unit_of(x) == 4 and copy_rows.unit_of(x[..., :99]) == 4
    assert copy_rows.unit_of(x[:, :, :1]) == 4 and copy_rows.unit_of(x[:1, :1, :1]) == 8
    assert copy_rows.unit_of(torch.empty(2, 5, 3, 33)) == 1


@pytest.mark.gpu
@needs_hopper
@pytest.mark.filterwarnings("ignore:the hopper kernels compute on copies")
@pytest.mark.parametrize("headdims", [(100, 100), (33, 65), (250, 72)])
@pytest.mark.parametrize("causal", [False, True])
def test_by_default_on_hopper(headdims, causal):
    """Without a name the call goes to these kernels, again and again, in any memory."""
    torch.manual_seed(0)
    d, e = headdims
    sizes = (2048, 4, d), (2100, 2, d), (2100, 2, e)
    for _ in range(3):
        q, k, v = (torch.randn(2, *n, device="cuda", dtype=BF16) for n in sizes)
        found = gradients(q, k, v, causal=causal)
        for backend in ("hopper", "portable"):
            for mine, theirs in zip(found, gradients(q, k, v, causal=causal, backend=backend)):
                torch.testing.assert_close(mine, theirs, atol=0.05, rtol=0.05)
        assert torch.equal(found[0], tilewise.attention(q, k, v, causal=causal, backend="hopper"))
