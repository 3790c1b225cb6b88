"""Each test's kernels are compared with their hashes in machine_code.txt, after it passed; and none
has a word of which ptxas leaves a half undefined.
"""

import os

import pytest
import triton
from helpers import machine_code
from helpers.equal_halves import equal_halves

HASHES = machine_code.read()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Hashes what a test builds, and compares where the file has hashes of this Triton."""
    with machine_code.recorded() as kernels:
        result = yield
    for kernel in kernels:
        assert not equal_halves(kernel.asm.get("ptx", "")), kernel.metadata.name
    rewrites = machine_code.REWRITES in os.environ
    if not kernels or (triton.__version__ != HASHES.triton and not rewrites):
        return result
    row = " ".join(map(machine_code.hash_of, kernels))
    pyfuncitem.user_properties.append(("machine_code", row))
    is_slow = pyfuncitem.get_closest_marker("slow") is not None
    default = row if is_slow and HASHES.covers == machine_code.SOME else "no hash"
    expected = HASHES.rows.get(machine_code.test_of(pyfuncitem.nodeid), default)
    if expected != row and not rewrites:
        pytest.fail(
            f"machine code moved: {expected} -> {row}. If that is meant, `make machine-code` "
            "rewrites tests/compile/machine_code.txt and prints what moved",
            pytrace=False,
        )
    return result
