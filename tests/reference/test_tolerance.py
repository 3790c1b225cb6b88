"""The error budget lets roundings pass and nothing else."""

import math

import pytest
import torch
from helpers.tiers import every

from tilewise import attention_reference
from tilewise.testing import run, tolerance
from tilewise.testing.cases import CASES, Features, Sizes
from tilewise.testing.inputs import make_inputs, poisoned
from tilewise.testing.tolerance import assert_within, judge

CASE = {case.name: case for case in CASES}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=DTYPES, ids=str)
def three(request):
    """A good result, the oracle and the plain run."""
    inputs = make_inputs(Sizes(seqlen_q=100, seqlen_k=130), Features(), request.param)
    qkv = inputs[:3]
    oracle = attention_reference(*(x.double() for x in qkv))
    return attention_reference(*qkv), oracle, attention_reference(*qkv, upcast=False)


def test_a_good_result_passes(three):
    assert_within(*three)
    assert judge(*three).ok


def test_one_bad_element_fails(three):
    result, oracle, plain = three
    result = result.clone()
    verdict = judge(result, oracle, plain)
    result[0, 50, 1, 7] += 2 * verdict.max_bound + 0.01 * oracle.abs().max()
    assert judge(result, oracle, plain).max_error > verdict.max_bound
    with pytest.raises(AssertionError, match="out of its budget"):
        assert_within(result, oracle, plain)


def test_a_drift_below_the_maximum_fails(three):
    """Every element off by half of what one of them may be: the mean sees it."""
    result, oracle, plain = three
    bound = judge(result, oracle, plain).max_bound
    drifted = (oracle + 0.5 * bound).to(result.dtype)
    verdict = judge(drifted, oracle, plain)
    assert verdict.max_error <= verdict.max_bound
    assert verdict.mean_error > verdict.mean_bound
    assert not verdict.ok


def test_a_wrong_scale_fails(three):
    result, oracle, plain = three
    assert not judge(result * 1.05, oracle, plain).ok


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails(three, value):
    result, oracle, plain = three
    result = result.clone()
    result[0, 3, 0, 0] = value
    with pytest.raises(AssertionError, match="1 elements are not finite"):
        assert_within(result, oracle, plain)


def test_minus_infinities_are_matched_exactly():
    oracle = torch.tensor([0.5, -math.inf, 1.5], dtype=torch.float64)
    good = oracle.float()
    assert judge(good, oracle, good).ok
    for wrong in ([0.5, 0.0, 1.5], [0.5, math.inf, 1.5], [-math.inf, -math.inf, 1.5]):
        assert not judge(torch.tensor(wrong), oracle, good).ok


def test_shape_and_dtype_are_part_of_it():
    oracle = torch.zeros(4, dtype=torch.float64)
    assert not judge(torch.zeros(5), oracle, torch.zeros(4)).ok
    assert not judge(torch.zeros(4).half(), oracle, torch.zeros(4)).ok


def test_nothing_is_within_the_budget_of_nothing():
    empty = torch.empty(0, 3)
    assert judge(empty, empty.double(), empty).ok


def test_zero_has_to_be_zero():
    zero = torch.zeros(200)
    assert judge(zero, zero.double(), zero).ok
    assert not judge(zero + 1e-30, zero.double(), zero).ok


def test_the_band_is_a_few_roundings():
    x = torch.randn(1000, dtype=torch.float64)
    for dtype in DTYPES:
        band = tolerance.rounding_band(x, dtype).max().item()
        assert 0 < band < 3 * torch.finfo(dtype).eps * x.abs().max().item()


def test_errors_of_two_plain_runs_add():
    oracle = torch.ones(200, dtype=torch.float64)
    plain, result = oracle.float() + 1e-3, oracle.float() + 2e-3
    assert judge(result, oracle, plain, plain).ok
    assert not judge(result, oracle, plain).ok
    assert not judge(oracle.float() + 3e-3, oracle, plain, plain).ok


@pytest.mark.parametrize("name", ["239x1", "gqa-3", "everything", "layout-bhsd-dense"])
def test_the_recomputing_run_is_attention(name):
    case = CASE[name]
    inputs = make_inputs(case.sizes, case.features, torch.float64)
    found, oracle = run.recomputed(case, inputs), run.run(attention_reference, case, inputs)
    assert found.keys() == oracle.keys()
    for tensor in oracle:
        torch.testing.assert_close(found[tensor], oracle[tensor], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", every(3, ["gqa", "d128", "softcap", "1023x1024-causal", "gqa-3"]))
def test_a_wrong_factor_fails(name, dtype, monkeypatch):
    """With both runs: a per mille in any tensor in fp32, 5% in halves, which round more."""
    factor, real = 1.001 if dtype == torch.float32 else 1.05, run.judge
    assert all(record.verdict.ok for record in run.run_case(CASE[name], "cpu", dtype=dtype))
    monkeypatch.setattr(run, "judge", lambda x, *runs: real(x * factor, *runs))
    assert not any(record.verdict.ok for record in run.run_case(CASE[name], "cpu", dtype=dtype))


def test_poisoned_memory_is_nan_and_only_inside():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned():
        assert torch.empty(10).isnan().all()
        assert torch.randn(3, 4).transpose(0, 1).new_empty(7).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_inputs_are_equal_in_every_memory():
    sizes = Sizes(batch=2, seqlen_q=9, seqlen_k=9, nheads=4, nheads_k=2)
    dense = make_inputs(sizes, Features(), torch.float32)
    for memory in ("transposed", "sequence_first", "sliced", "packed"):
        other = make_inputs(sizes, Features(memory=memory), torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(dense[:4], other[:4]))
    assert not torch.equal(dense.q, make_inputs(sizes, Features(), torch.float32, seed=1).q)


def test_forced_logits_are_forced():
    inputs = make_inputs(Sizes(), Features(logits=100.0), torch.float64)
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs.q, inputs.k) * 32**-0.5
    assert 90 < scores.abs().min() and scores.abs().max() < 110
    _, lse = attention_reference(*inputs[:3], return_lse=True)
    assert lse.min() < -88
