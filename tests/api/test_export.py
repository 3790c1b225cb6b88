"""torch.export, and what a program or a graph knows of functions that were made outside it."""

import os
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from helpers.tiers import sample

import tilewise
from tilewise.mods import expressions


class Module(torch.nn.Module):
    def forward(self, q, k, v):
        return tilewise.attention(q, k, v, causal=True, window=(5, 0))


def qkv(batch, seqlen):
    return tuple(torch.randn(batch, seqlen, heads, 16) for heads in (4, 2, 2))


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_a_dynamic_sequence(strict):
    batch, seqlen = torch.export.Dim("batch", min=2), torch.export.Dim("seqlen", min=2, max=4096)
    tensors = qkv(2, 8)
    shapes = ({0: batch, 1: seqlen},) * 3
    program = torch.export.export(Module(), tensors, dynamic_shapes=shapes, strict=strict)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.tilewise.flash_attn_forward.default in targets
    other = qkv(3, 37)
    torch.testing.assert_close(program.module()(*other), Module()(*other), rtol=0, atol=0)


class Masked(torch.nn.Module):
    """A mask and a score function that were made outside, one of them with a tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("doc", torch.tensor([0] * 7 + [1] * 9, dtype=torch.int32))
        self.mask = tilewise.mods.causal() & tilewise.mods.document(self.doc)
        self.score = tilewise.mods.score(lambda s, b, h, q_idx, kv_idx: s * (h + 0.5))

    def forward(self, q):
        return tilewise.attention(q, q, q, mask_mod=self.mask, score_mod=self.score)


_LOADED = """
import sys, torch, tilewise
program = torch.export.load(sys.argv[1])
q, want = torch.load(sys.argv[2])
torch.testing.assert_close(program.module()(q), want, rtol=0, atol=0)
"""


@pytest.mark.parametrize("strict", sample([True, False], False))
def test_an_exported_mask_is_known_in_another_process(strict, tmp_path):
    q, module = torch.randn(1, 16, 2, 8), Masked()
    program = torch.export.export(module, (q,), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save((q, module(q)), tmp_path / "tensors.pt")
    paths = [str(tmp_path / name) for name in ("program.pt2", "tensors.pt")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", _LOADED, *paths], check=True, env=env)


def test_a_graph_outlives_the_table_of_trees(monkeypatch):
    module = Masked()
    q = torch.randn(1, 16, 2, 8)
    compiled, want = torch.compile(module, backend="aot_eager", fullgraph=True), module(q)
    torch.testing.assert_close(compiled(q), want)
    monkeypatch.setattr(expressions, "_table", OrderedDict())
    torch.testing.assert_close(compiled(q), want)
