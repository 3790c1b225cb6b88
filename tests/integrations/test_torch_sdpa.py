"""While `enable_sdpa` holds, torch's attention is tilewise's, with torch's results; then it is
torch's again, exactly.
"""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from integrations.torch_calls import CALLS, added, both, inputs, mask, noted, square
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import tilewise
from tilewise import PerformanceWarning, errors
from tilewise.integrations import torch_flash, torch_sdpa
from tilewise.ops import attention as ops

OPERATORS = [torch_sdpa.SDPA, *torch_sdpa.FAST_PATHS, *torch_flash.KERNELS]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    torch._dynamo.utils.counters.clear()
    yield
    tilewise.disable_sdpa()


@pytest.fixture
def calls(monkeypatch):
    """Which of our ways were taken since it was last cleared."""
    found = []
    for name in ("run_forward", "run_backward"):
        monkeypatch.setattr(ops, name, noted(name, getattr(ops, name), found))
    return found


FORWARD, BACKWARD = "run_forward", "run_backward"


def state():
    """All that enabling changes in torch."""
    tables = [
        torch._C._dispatch_dump(f"aten::{x}") for x in OPERATORS if hasattr(torch.ops.aten, x)
    ]
    tag = torch.compiler.config.cache_key_tag
    return *tables, tag, torch.backends.mha.get_fastpath_enabled(), current()


def current():
    return attention.current_flash_attention_impl()


def attend(q):
    return F.scaled_dot_product_attention(q, q, q)


# reached, and right


@pytest.mark.parametrize("name", CALLS)
def test_torchs_results(name, calls):
    expected = both(CALLS[name], *square())
    assert not calls
    with tilewise.enable_sdpa():
        found = both(CALLS[name], *square())
    assert calls == [FORWARD, BACKWARD]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    calls.clear()
    again = both(CALLS[name], *square())
    assert not calls and all(map(torch.equal, again, expected))


def test_a_learned_mask_gets_its_gradient(calls):
    tensors = *square(), *inputs((1, 4, 24, 24), seed=5)
    expected = both(F.scaled_dot_product_attention, *tensors)
    with tilewise.enable_sdpa():
        found = both(F.scaled_dot_product_attention, *tensors)
    assert calls == [FORWARD, BACKWARD]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_dropout_is_ours_and_follows_the_seed(calls):
    def drops(q, k, v):
        torch.manual_seed(3)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)

    def ours(q, k, v):
        torch.manual_seed(3)
        return tilewise.scaled_dot_product_attention(q, k, v, dropout_p=0.25)

    with tilewise.enable_sdpa():
        found = both(drops, *square())
    assert calls == [FORWARD, BACKWARD]
    assert all(map(torch.equal, found, both(ours, *square())))


def test_without_gradients_and_in_inference_mode(calls):
    q = square()[0].detach()
    expected = attend(q)
    with tilewise.enable_sdpa():
        for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(attend(q), expected, rtol=1e-9, atol=1e-9)
    assert calls == [FORWARD] * 3


def test_autocast_casts_as_ever(calls):
    q = torch.randn(1, 2, 20, 8)
    with tilewise.enable_sdpa(), torch.autocast("cpu", torch.bfloat16):
        assert attend(q).dtype == torch.bfloat16
    assert calls == [FORWARD]


@pytest.mark.parametrize("padded", [False, True])
def test_multihead_attention(padded, calls):
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    padding = torch.arange(12) >= torch.tensor([[12], [9]]) if padded else None

    def run(x):
        return module(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    expected = both(run, *inputs((2, 12, 32)))
    with tilewise.enable_sdpa():
        found = both(run, *inputs((2, 12, 32)))
    assert calls == [FORWARD, BACKWARD]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def encoder():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2).double()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_transformer_encoder_in_both_modes(mode, calls):
    module = getattr(encoder(), mode)()
    x, padding = inputs((2, 12, 32))[0].detach(), torch.arange(12) >= torch.tensor([[12], [9]])

    def run():
        with torch.set_grad_enabled(mode == "train"):
            return module(x, src_key_padding_mask=padding).detach()

    expected = run()
    with tilewise.enable_sdpa():
        found = run()
    assert calls == [FORWARD] * 2
    real = ~padding  # the fast path leaves zeros at padding
    torch.testing.assert_close(found[real], expected[real], rtol=1e-9, atol=1e-9)


def test_a_fast_path_that_is_turned_on_again_is_named(calls):
    module, x = encoder().eval(), inputs((2, 12, 32))[0].detach()
    with torch.no_grad(), tilewise.enable_sdpa():
        torch.backends.mha.set_fastpath_enabled(True)
        with pytest.warns(PerformanceWarning, match=r"the fast path of .*_encoder_layer_fwd"):
            module(x)
    assert not calls and torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("masked", [None, mask, added])
@pytest.mark.filterwarnings("ignore:enable_sdpa and torch.compile")
def test_compiled(masked, backend, calls):
    def run(q, k, v, seen):
        k, v = k[:, :2], v[:, :2]
        options = dict(is_causal=seen is None, enable_gqa=True)
        return F.scaled_dot_product_attention(q.sin(), k, v, seen, **options)

    q, k, v = square()
    seen = masked and masked(q, k)
    expected = [run(q, k, v, seen).detach(), *both(lambda *x: run(*x, seen), q, k, v)[1:]]
    torch.compiler.reset()
    with tilewise.enable_sdpa():
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        found = both(lambda *x: compiled(*x, seen), q, k, v)
        assert calls == [FORWARD, BACKWARD]
    torch.testing.assert_close(found, tuple(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("masked", [mask, added])
@pytest.mark.filterwarnings("ignore:enable_sdpa and torch.compile")
def test_compiled_for_any_length(masked, calls):
    torch.compiler.reset()
    with tilewise.enable_sdpa():
        attend = F.scaled_dot_product_attention
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
        for seqlen in (24, 40, 56):
            tensors = square(seqlen=seqlen)
            seen = masked(*tensors[:2])
            expected = both(lambda *x, seen=seen: attend(*x, seen), *tensors)
            found = both(lambda *x, seen=seen: compiled(*x, seen), *tensors)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert calls == [FORWARD, BACKWARD] * 6


@pytest.mark.filterwarnings("ignore:enable_sdpa and torch.compile")
def test_compiled_before_and_after(calls):
    """Each function keeps what it was compiled with, and is right throughout."""
    expected, made = both(attend, square()[0]), []
    for enabled in (False, True, False, True):
        torch.compiler.reset()
        with tilewise.enable_sdpa() if enabled else contextlib.nullcontext():
            made.append(torch.compile(lambda q: attend(q), backend="aot_eager", fullgraph=True))
            found = both(made[-1], square()[0])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert calls == [FORWARD, BACKWARD] * enabled
        calls.clear()


def test_what_was_compiled_before_is_said():
    torch.compiler.reset()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    with pytest.warns(PerformanceWarning, match=r"compiled before keep torch's.*compiler.reset"):
        tilewise.enable_sdpa()
    with pytest.warns(PerformanceWarning, match=r"compiled with tilewise keep it.*compiler.reset"):
        tilewise.disable_sdpa()


def test_an_exported_program_is_torchs(calls):
    """It runs where tilewise is not, and reaches us where we are enabled."""
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 12, 32)
    with torch.no_grad(), tilewise.enable_sdpa():
        program = torch.export.export(module, (x, x, x), dict(need_weights=False))
        assert not any("tilewise" in str(node.target) for node in program.graph.nodes)
        program.module()(x, x, x, need_weights=False)
    assert calls == [FORWARD]


def test_tensors_of_a_gpu_are_ours_too():
    """Told by the operator that a trace of them holds."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with tilewise.enable_sdpa(), FakeTensorMode():
        q = torch.empty(2, 4, 24, 16, device="cuda", dtype=torch.bfloat16)
        traced = make_fx(attend)(q)
    targets = [node.target for node in traced.graph.nodes]
    assert torch.ops.tilewise.flash_attn_forward.default in targets


def test_checkpointing_by_name_saves_us(calls):
    def policy(ctx, op, *args, **kwargs):
        is_attention = "flash_attn" in str(op)
        return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    def run(q):
        return checkpoint(attend, q, use_reentrant=False, context_fn=contexts)

    with tilewise.enable_sdpa():
        both(run, *inputs((1, 2, 20, 8)))
    assert calls == [FORWARD, BACKWARD]


# torch's own


def test_an_explicit_choice_of_kernel_is_kept(calls):
    with warnings.catch_warnings(), tilewise.enable_sdpa():
        warnings.simplefilter("error")
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            attend(square()[0])
        assert not calls
        attend(square()[0])
    assert calls == [FORWARD]


def test_what_is_refused_goes_to_torch_and_is_said(monkeypatch):
    def refuses(*given, **options):
        raise NotImplementedError("no such thing")

    q = square()[0].detach()
    expected = attend(q)
    monkeypatch.setattr(torch_sdpa.sdpa, "scaled_dot_product_attention", refuses)
    with tilewise.enable_sdpa():
        with pytest.warns(PerformanceWarning, match=r"torch's own kernel computes.*no such thing"):
            found = attend(q)
    assert torch.equal(found, expected)


def test_what_torch_refuses_too_is_torchs_error():
    q = torch.randn(1, 2, 5, 8)
    with tilewise.enable_sdpa(), pytest.raises(RuntimeError, match="Expected size"):
        F.scaled_dot_product_attention(q, q[..., :4], q)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functorch_transforms_are_named(calls):
    q = square()[0].detach()

    def loss(q):
        return attend(q).square().sum()

    for transform, x in ((torch.func.vmap(attend), q[None]), (torch.func.grad(loss), q)):
        errors._said.clear()
        expected = transform(x)
        with tilewise.enable_sdpa():
            with pytest.warns(PerformanceWarning, match="torch.func's transforms"):
                found = transform(x)
        torch.testing.assert_close(found, expected)
    assert not calls


# on and off


def test_torch_is_as_it_was():
    before = state()
    with tilewise.enable_sdpa():
        assert current() == "tilewise" and not torch.backends.mha.get_fastpath_enabled()
        assert state()[0] != before[0]
    assert state() == before
    tilewise.enable_sdpa()
    assert torch_sdpa.is_enabled()
    tilewise.disable_sdpa()
    tilewise.disable_sdpa()  # nothing to take back
    assert state() == before


def test_nested_blocks_end_with_the_outermost():
    before = state()
    with tilewise.enable_sdpa():
        within = state()
        with pytest.raises(ZeroDivisionError), tilewise.enable_sdpa():
            raise ZeroDivisionError
        assert state() == within
        tilewise.enable_sdpa()
        assert state() == within
    assert state() == before


class Handle:
    def remove(self):
        pass


@pytest.fixture
def other():
    attention.register_flash_attention_impl("other", register_fn=Handle)
    yield "other"
    if current() == "other":
        attention.restore_flash_attention_impl()
    attention._registry._FLASH_ATTENTION_IMPLS.pop("other")


def test_what_was_active_before_is_active_again(other):
    attention.activate_flash_attention_impl(other)
    with tilewise.enable_sdpa():
        with tilewise.enable_sdpa():
            assert current() == "tilewise"
    assert current() == other


def test_another_implementation_is_left_in_place(other, calls):
    """As torchtitan's varlen attention does with FA3, when a model is made."""
    with tilewise.enable_sdpa():
        with pytest.warns(PerformanceWarning, match=r"no longer tilewise's.*enable_sdpa\(\) again"):
            attention.activate_flash_attention_impl(other)
        attend(square()[0])
    assert not calls and current() == other


def test_warnings_that_are_errors_leave_nothing_half_done(other):
    before = state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tilewise.enable_sdpa()
        with pytest.raises(PerformanceWarning):
            attention.restore_flash_attention_impl()
    assert state()[:-1] == before[:-1] and not torch_sdpa.is_enabled()
    with tilewise.enable_sdpa():
        assert state() != before
    assert state() == before


def test_torchs_registry_knows_us(calls):
    assert "tilewise" in attention.list_flash_attention_impls()
    before = state()
    attention.activate_flash_attention_impl("tilewise")
    attend(square()[0])
    assert calls == [FORWARD]
    with pytest.warns(PerformanceWarning, match="no longer tilewise's"):
        attention.restore_flash_attention_impl()
    assert state() == before
