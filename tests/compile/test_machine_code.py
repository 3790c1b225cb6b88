"""The hashes in machine_code.txt are of this Triton and of tests that exist."""

import ast
from pathlib import Path

import pytest
import triton
from helpers import machine_code

HASHES = machine_code.read()


@pytest.mark.skipif(
    triton.__version__ != HASHES.triton,
    reason=f"machine code is compared with Triton {HASHES.triton} alone",
)
def test_every_hash_is_of_a_test():
    """A test that was renamed would no longer be compared."""
    tests = {
        f"{path.name}::{node.name}"
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert {test.partition("[")[0] for test in HASHES.rows} <= tests
