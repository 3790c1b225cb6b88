"""What the host side of the portable kernels decides before a launch."""

import itertools

import pytest
import torch

from tilewise.kernels.portable.launch import padded_headdims
from tilewise.problem import Extras, Scalars, describe


@pytest.mark.parametrize("headdims", [(17, 5), (33, 17), (64, 16), (64, 32), (65, 17), (256, 1)])
def test_a_narrow_v_tile_is_as_wide_as_k(headdims):
    """Triton 3.6 compiles the narrower one wrongly for sm_90; only a GPU shows it."""
    block_d, block_dv = padded_headdims(problem_of(*headdims))
    assert block_dv >= min(block_d, 64)


def test_head_dims_are_padded_to_powers_of_two():
    for headdim, headdim_v in itertools.product((1, 16, 17, 64, 100, 129, 256), repeat=2):
        block_d, block_dv = padded_headdims(problem_of(headdim, headdim_v))
        assert block_d in (16, 32, 64, 128, 256) and headdim <= block_d < max(2 * headdim, 17)
        assert block_dv in (16, 32, 64, 128, 256) and headdim_v <= block_dv
    assert padded_headdims(problem_of(192, 128)) == (256, 128)
    assert padded_headdims(problem_of(128, 64)) == (128, 64)
    assert padded_headdims(problem_of(16, 256)) == (16, 256)


def problem_of(headdim: int, headdim_v: int):
    q, v = torch.empty(1, 1, 1, headdim), torch.empty(1, 1, 1, headdim_v)
    return describe(q, q, v, Extras(), Scalars(1.0), "bottom_right", False)
