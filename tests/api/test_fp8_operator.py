"""Calls with FP8 products under torch.library: the operator, graphs, fake tensors, FLOPs."""

import pytest
import torch
from helpers.fp8_calls import SINKS, SLOPES, eight, starts, tensors

import tilewise
from tilewise import dispatch
from tilewise.kernels.common.quantized import FP8

BF16 = torch.bfloat16
CALL = torch.ops.tilewise.flash_attn_fp8_forward.default


def arguments(is_transposed, **features):
    q, k, v = eight()
    scales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    if is_transposed:
        v = tilewise.quantize(*tensors()).v_t
    given = dict.fromkeys(
        ("alibi_slopes", "sinks", "seqused_k", "seqused_q", "cu_seqlens_q", "cu_seqlens_k")
    )
    tensors_of = (
        *(q, k, v),
        *scales,
        torch.rand(2, 2, 16),
        torch.rand(()),
        *(given | features).values(),
    )
    numbers = 0.25, 0.0, -1, 0, "bottom_right", False
    return *tensors_of, is_transposed, *numbers, BF16, None


@pytest.mark.parametrize("is_transposed", [False, True])
def test_opcheck(is_transposed):
    # Its test of the schema adds noise to inputs, which torch does not for 8 bits
    tests = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    for features in ({}, dict(alibi_slopes=SLOPES, sinks=SINKS)):
        given = arguments(is_transposed, **features)
        before = [x.clone() for x in given[:3]]
        torch.library.opcheck(CALL, given, test_utils=tests)
        for x, y in zip(given, before):
            assert torch.equal(x.view(torch.int8), y.view(torch.int8))
    assert not CALL._schema.is_mutable


def test_a_compiled_graph_prepares_a_signature_once(monkeypatch):
    """Its calls do not pass through the functions, which cache them."""
    chosen, choose = [], dispatch.choose_fp8

    def counted(*asked):
        chosen.append(asked)
        return choose(*asked)

    monkeypatch.setattr(dispatch, "choose_fp8", counted)
    x = tilewise.quantize(*tensors(seqlen_q=61, seed=8), smooth=False)
    given = (*x[:3], *x.scales, None, None, *[None] * 6)
    options = [0.3, 0.0, -1, -1, "bottom_right", False, torch.float32, None]
    first = CALL(*given, True, *options)
    assert all(torch.equal(a, b) for a, b in zip(first, CALL(*given, True, *options)))
    assert len(chosen) == 1
    options[0] = 0.1
    assert not torch.equal(first[0], CALL(*given, True, *options)[0]) and len(chosen) == 2
    options[6] = BF16
    assert CALL(*given, True, *options)[0].dtype == BF16
    doubled = [x.scales.q * 2 if t is x.scales.q else t for t in given]
    assert not torch.equal(first[1], CALL(*doubled, True, *options)[1])


def test_the_operator_has_no_gradient():
    given = list(arguments(True))
    given[3] = given[3].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient"):
        CALL(*given)[0].sum().backward()


@pytest.mark.parametrize("options", [{}, dict(softcap=3.0), dict(alibi_slopes=SLOPES)])
def test_one_graph(options):
    torch._dynamo.reset()

    def step(q, k, v, scale):
        q, k, v = (x.to(FP8) for x in (q, k, v))
        return tilewise.attention(q, k, v, causal=True, k_descale=scale, return_lse=True, **options)

    given = *tensors(), torch.tensor(0.5)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for mine, eager in zip(compiled(*given), step(*given)):
        assert torch.equal(mine, eager)


def test_one_graph_for_every_length():
    torch._dynamo.reset()

    def step(q, k, v):
        return tilewise.attention(q, k, v, causal=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen_k in (150, 90):
        given = eight(*tensors(seqlen_k=seqlen_k))
        assert torch.equal(compiled(*given), step(*given))


def test_one_graph_of_quantising_and_attending():
    torch._dynamo.reset()
    cu = dict(cu_seqlens_q=starts(20, 40), cu_seqlens_k=starts(30, 30))

    def step(q, k, v, cu):
        x = tilewise.quantize(q, k, v, **cu)
        return tilewise.attention(x, causal=True, return_lse=True, **cu)

    given = *(x[0] for x in tensors(1, 60, 60)), cu
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for mine, eager in zip(compiled(*given), step(*given)):
        torch.testing.assert_close(mine, eager)


def test_fake_tensors_and_meta():
    given = [x.to("meta") for x in eight()]
    out, lse = tilewise.attention(*given, return_lse=True)
    assert out.is_meta and out.shape == (2, 70, 4, 16) and out.dtype == BF16
    assert lse.shape == (2, 4, 70)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_flops_are_counted(is_quantized):
    from torch.utils.flop_counter import FlopCounterMode

    given = tensors(headdims=(32, 16))
    with FlopCounterMode(display=False) as expected:
        tilewise.attention(*given, causal=True)
    inputs = [tilewise.quantize(*given)] if is_quantized else eight(*given)
    with FlopCounterMode(display=False) as counted:
        tilewise.attention(*inputs, causal=True)
    assert counted.get_total_flops() == expected.get_total_flops() > 0
