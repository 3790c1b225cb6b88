"""The fuzzer's cases of a KV cache, small ones, by the PTX that Triton makes of their kernels: the
compiler's choices of layouts and roundings, which the interpreter and the emulator do not see, may
change no bit that the contract promises.
"""

import pytest
from fuzz.cached_cases import CACHED_LANES, cached_case
from fuzz.cached_run import run_cached

from ptx import executing

pytestmark = pytest.mark.slow

CASES = [(name, seed) for name in ("portable-cpu", "hopper-cpu") for seed in range(3000, 3020)]


@pytest.mark.parametrize("name, seed", CASES)
def test_a_cache(name, seed, monkeypatch):
    with executing(monkeypatch):
        outcome = run_cached(cached_case(seed, CACHED_LANES[name]))
    assert not outcome.faults, str(outcome)
