"""What `tilewise.mods.source` prints is Triton: it runs in the interpreter, and compiles."""

import importlib.util

import pytest
import random_masks as masks
import torch

from tilewise.mods import causal, chunked, dilated, document, mask, prefix_lm, source
from tilewise.testing import build, interpret

SHAPE, BLOCK = (2, 2, 32, 32), 32
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def printed_kernel(out, b, h, {names}BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    q_idx, k_idx = offs[:, None], offs[None, :]
    keep = {line}
    keep = tl.broadcast_to(keep, (BLOCK, BLOCK))
    tl.store(out + q_idx * BLOCK + k_idx, keep.to(tl.int8))
"""
DOC = masks.tensors(torch.int32)["doc"]
PREFIX = torch.tensor([3, 20], dtype=torch.int32)
MASKS = {
    "named": causal() & document(DOC) | ~chunked(7) & dilated(3),
    "prefix": prefix_lm(PREFIX),
    "documents": document(torch.stack([DOC, DOC.flip(0)])),
    "below zero": mask(lambda b, h, q, k: ((q - k) // 5 == (k - 20) % 6 - 3) | ((q - k) % -4 < -2)),
    "operators": masks.traced(
        "(flags[q] ^ (where(q < k, abs(q - k), maximum(doc[q], 2) << h) >= minimum(-k, ~q) + 9))"
    ),
    "past an end": mask(lambda b, h, q, k: DOC[q - 1] + 1 == DOC[(k >> 1) + 2 * b]),
    "floats": mask(lambda b, h, q, k: (q - k) * 0.5 < 3.25 - h),
}


def kernel_of(made, folder):
    names = [
        name
        for slot, x in enumerate(made.tensors)
        for name in (
            f"t{slot}",
            *(f"t{slot}_{what}{d}" for d in range(x.ndim) for what in ("size", "stride")),
        )
    ]
    file = folder / "printed.py"
    line = source(made.expr)
    file.write_text(KERNEL.format(names="".join(f"{name}, " for name in names), line=line))
    spec = importlib.util.spec_from_file_location("printed", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.printed_kernel


def arguments_of(made):
    for x in made.tensors:
        yield x
        for d in range(x.ndim):
            yield from (x.shape[d], x.stride(d))


@pytest.mark.parametrize("name", MASKS)
def test_the_interpreter_agrees(name, tmp_path):
    made = MASKS[name]
    kernel, expected = kernel_of(made, tmp_path), made.dense(*SHAPE)
    for b, h in ((0, 0), (1, 0), (0, 1), (1, 1)):
        out = torch.empty(BLOCK, BLOCK, dtype=torch.int8)
        interpret(kernel)[(1,)](out, b, h, *arguments_of(made), BLOCK=BLOCK)
        assert torch.equal(out.bool(), expected[b, h]), source(made.expr)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["operators", "past an end"])
def test_it_compiles(name, tmp_path):
    made = MASKS[name]
    out = torch.empty(BLOCK, BLOCK, dtype=torch.int8)
    build(kernel_of(made, tmp_path), out, 1, 1, *arguments_of(made), BLOCK=BLOCK, on="sm90")
