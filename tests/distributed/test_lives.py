"""Groups that are destroyed and made again on one store, and groups of some ranks among them."""

import pytest
import torch.distributed as dist
from helpers.lives import lives
from helpers.processes import run

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)


@pytest.mark.parametrize("kind", ["cpu", "interpreter"])
def test_groups_made_again(kind):
    run(lives, 3, 3, 11, kind)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_drawn_groups(seed):
    run(lives, 3 + seed % 2, 3 + seed % 2, seed, "interpreter" if seed % 4 == 0 else "cpu")
