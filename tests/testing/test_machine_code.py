"""Hashes of machine code follow the code, and not its file, its lines or its comments."""

import importlib.util

import pytest
import torch
from helpers.machine_code import code_of, hash_of

from tilewise.testing import build

pytestmark = pytest.mark.compile

KERNEL = '''"""A kernel and a function that it calls."""
import triton
import triton.language as tl

@triton.jit
def doubled(x):
    return 2 * x

@triton.jit
def double_kernel(x, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offs, doubled(tl.load(x + offs, offs < n)), offs < n)
'''
COMMENTED = KERNEL.replace("@", "# The next line is a decorator\n\n@").replace(
    "    offs =", "    # why\n    offs ="
)


def compiled(path, text, target, block=64):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    kernel = next(value for name, value in vars(module).items() if name.endswith("_kernel"))
    return build(kernel, torch.empty(1), 100, on=target, BLOCK=block)


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_hashes_follow_the_code_alone(tmp_path, target):
    first = compiled(tmp_path / "first.py", KERNEL, target)
    lines = code_of(first).splitlines()
    assert any(".entry kernel(" in x or x == "kernel:" for x in lines)
    assert not [x for x in lines if "first.py" in x or ".loc" in x or "debug" in x]
    moved = compiled(tmp_path / "elsewhere" / "second.py", COMMENTED, target)
    renamed = compiled(
        tmp_path / "third.py", KERNEL.replace("double_kernel", "twice_kernel"), target
    )
    assert hash_of(first) == hash_of(moved) == hash_of(renamed)
    changed = compiled(tmp_path / "fourth.py", KERNEL.replace("2 *", "3 *"), target)
    assert hash_of(changed) != hash_of(first)
    larger = compiled(tmp_path / "fifth.py", KERNEL, target, block=512)
    assert hash_of(larger) != hash_of(first)
