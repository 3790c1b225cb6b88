"""What the host side of the portable kernels decides before a launch."""

import itertools

import pytest
import torch

import tilewise
from tilewise.kernels.portable.plan import padded_headdims
from tilewise.ops import attention as ops
from tilewise.ops import calls, schema
from tilewise.problem import Call, Extras, Scalars, describe


@pytest.mark.parametrize("headdims", [(17, 5), (33, 17), (64, 16), (64, 32), (65, 17), (256, 1)])
def test_a_narrow_v_tile_is_as_wide_as_k(headdims):
    """Triton 3.6 compiles the narrower one wrongly for sm_90; only a GPU shows it."""
    block_d, block_dv = padded_headdims(problem_of(*headdims))
    assert block_dv >= min(block_d, 64)


def test_head_dims_are_padded_to_powers_of_two():
    for headdim, headdim_v in itertools.product((1, 16, 17, 64, 100, 129, 256, 300), repeat=2):
        block_d, block_dv = padded_headdims(problem_of(headdim, headdim_v))
        assert block_d in (16, 32, 64, 128, 256, 512) and headdim <= block_d < max(2 * headdim, 17)
        assert block_dv in (16, 32, 64, 128, 256, 512) and headdim_v <= block_dv
    assert padded_headdims(problem_of(192, 128)) == (256, 128)
    assert padded_headdims(problem_of(128, 64)) == (128, 64)
    assert padded_headdims(problem_of(16, 256)) == (16, 256)


def problem_of(headdim: int, headdim_v: int):
    q, v = torch.empty(1, 1, 1, headdim), torch.empty(1, 1, 1, headdim_v)
    return describe(q, q, v, Extras(), Scalars(1.0), "bottom_right", False)


def test_what_comes_through_the_operator_is_prepared_once(monkeypatch):
    """A compiled model calls the operator; what looks the same is one Call, with one launch."""
    launched, run = [], ops.run_forward

    def noted(call, *args, **named):
        launched.append(call)
        return run(call, *args, **named)

    monkeypatch.setattr(ops, "run_forward", noted)
    calls._entry.cache_clear()

    def attend(seqlen=9, nheads_k=2, **extras):
        q, k = torch.randn(1, seqlen, 4, 8), torch.randn(1, 9, nheads_k, 8)
        problem = describe(q, k, k, Extras(**extras), Scalars(1.0), "bottom_right", False)
        options = schema.options_of(Call(problem, Scalars(1.0), None))
        found, _ = torch.ops.tilewise.flash_attn_forward(q, k, k, *Extras(**extras), **options)
        torch.testing.assert_close(found, tilewise.attention(q, k, k, scale=1.0, **extras))
        return launched[-2]

    one = attend()
    assert attend() is one
    with_sinks = attend(sinks=torch.randn(4))
    assert attend(sinks=torch.randn(4)) is with_sinks
    others = attend(8), attend(nheads_k=4), attend(sinks=torch.randn(4).double())
    assert len({id(x) for x in (one, with_sinks, *others)}) == 5
