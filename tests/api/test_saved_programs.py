"""A saved program is data: whatever its masks' texts were changed to, no code of theirs runs."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import zipfile

import pytest
import torch

import tilewise
from tilewise import ArgumentError, mods, scores
from tilewise.mods.flatten import modifiers_of
from tilewise.mods.serialize import serialize
from tilewise.problem import Extras
from tilewise.testing import use_interpreter

DOC = torch.tensor([0] * 7 + [1] * 9, dtype=torch.int32)
TABLE = torch.linspace(-1, 1, 2 * 16).view(2, 16)
MARK = "TILEWISE_TEXT_RAN"
RUNS = f"0], __import__('os').environ.setdefault('{MARK}', '1'), captured[0"


class Module(torch.nn.Module):
    """A mask and a score function, each with a tensor, in a kernel."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.register_buffer("doc", DOC.to(device))
        self.register_buffer("table", TABLE.to(device))
        self.mask = mods.causal() & mods.document(self.doc)
        self.score = scores.score(lambda s, b, h, q, k: s + self.table[h, k])

    def forward(self, q):
        modified = dict(mask_mod=self.mask, score_mod=self.score)
        return tilewise.attention(q, q, q, **modified, backend="portable")


def edited(path, name, change):
    """A copy of a saved program in which the text of one function is another."""
    target = path.with_name("edited.pt2")
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(target, "w") as after:
        found = 0
        for info in before.infolist():
            data = before.read(info)
            if info.filename.endswith(".json") and b"load" in data:
                told = json.loads(data)
                found += _edit(told, name, change)
                data = json.dumps(told).encode()
            after.writestr(info, data)
    assert found == 1
    return target


def _edit(value, name, change) -> int:
    """Changes the string argument of a name, at any depth; how many there were."""
    if isinstance(value, list):
        return sum(_edit(x, name, change) for x in value)
    if not isinstance(value, dict):
        return 0
    if value.get("name") == name and "as_string" in value.get("arg", {}):
        value["arg"]["as_string"] = json.dumps(change(json.loads(value["arg"]["as_string"])))
        return 1
    return sum(_edit(x, name, change) for x in value.values())


def with_slot(slot):
    """A change of the slot of every load."""
    return lambda told: [
        [op, inputs, [slot, value[1]] if op == "load" else value] for op, inputs, value in told
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "program.pt2"
    torch.export.save(torch.export.export(Module(), (torch.randn(1, 16, 2, 8),)), path)
    return path


CHANGES = {
    "a slot of source": (with_slot(RUNS), "loads from no captured tensor"),
    "a slot past the tensors": (with_slot(1), "reads captured tensor 1"),
    "another dtype": (
        lambda told: [[*s[:2], [0, "int64"]] if s[0] == "load" else s for s in told],
        "as torch.int64 by . ind",
    ),
    "an index far away": (
        lambda told: [["int", [], 10**12] if s[0] == "q_idx" or s[0] == "h" else s for s in told],
        "at 1000000000000",
    ),
    "an index below 0": (
        lambda told: [["int", [], -5] if s[0] == "q_idx" or s[0] == "h" else s for s in told],
        "at -5",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["mask_mod", "score_mod"])
def test_an_edited_text_is_refused(name, change, saved, monkeypatch):
    monkeypatch.delenv(MARK, raising=False)
    make, message = CHANGES[change]
    program = torch.export.load(edited(saved, name, make)).module()
    with pytest.raises(ArgumentError, match=message), use_interpreter():
        program(torch.randn(1, 16, 2, 8))
    assert MARK not in os.environ


def test_a_copy_is_taken(saved):
    """What edits texts changes nothing else."""
    program = torch.export.load(edited(saved, "mask_mod", lambda told: told)).module()
    q = torch.randn(1, 16, 2, 8)
    with use_interpreter():
        torch.testing.assert_close(program(q), Module()(q))


def arguments(mask=None, score=None, block_mask=None):
    """Of the forward operator after q, k and v: the extras, and what follows them."""
    made = modifiers_of(mask, score, block_mask, (1, 2, 16, 16))
    texts = [serialize(x) for x in made.mods[:3]]
    numbers = (0.3, 0.0, -1, -1, 0.0, "bottom_right", False)
    extras = Extras(captured=made.captured).arguments
    return list(extras), [*numbers, *texts, made.mods.block, False, False, None]


def called(extras, rest, way="forward", wanted=(0,)):
    q = torch.randn(1, 16, 2, 8)
    given = (q, q, q)
    if way != "forward":
        given = (q, None, *given, q, q[..., 0].transpose(1, 2).contiguous())
    operator = getattr(torch.ops.tilewise, f"flash_attn_{way}")
    return operator(*given, *extras, *rest, *([wanted] if way == "captured_grads" else []))


HEADS = torch.randn(2)
WRONG = {
    "no tensors": (lambda x, rest: x.__setitem__(-1, None), "0 are passed"),
    "another dtype": (lambda x, rest: x.__setitem__(-1, [HEADS.double()]), "torch.float64"),
    "another rank": (lambda x, rest: x.__setitem__(-1, [HEADS[None]]), "by 1 indices"),
    "too short": (lambda x, rest: x.__setitem__(-1, [HEADS[:1]]), "dimension 0 is too short"),
    "empty": (lambda x, rest: x.__setitem__(-1, [HEADS[:0]]), "dimension 0 is too short"),
    "no derivative": (lambda x, rest: rest.__setitem__(9, ""), "go together"),
    "a wrong derivative": (lambda x, rest: rest.__setitem__(9, "[]"), "no list of steps"),
    "a derivative of more": (
        lambda x, rest: rest.__setitem__(9, '[["load", [], [7, "float32"]]]'),
        "score_derivative reads captured tensor 7",
    ),
    "a block mask of none": (
        lambda x, rest: rest.__setitem__(10, [16, 16]),
        "1 captured tensors: a block mask has 8",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("way", ["forward", "backward", "captured_grads"])
def test_operators_check_their_tensors(name, way):
    change, message = WRONG[name]
    extras, rest = arguments(score=scores.score(lambda s, b, h, q, k: s * HEADS[h]))
    called(extras, rest, way)
    change(extras, rest)
    with pytest.raises(ArgumentError, match=message):
        called(extras, rest, way)
    with torch.device("meta"), pytest.raises(ArgumentError, match=message):
        called([_on_meta(x) for x in extras], rest, way)


def _on_meta(x):
    return [y.to("meta") for y in x] if isinstance(x, list) else x


@pytest.mark.parametrize("wanted", [[1], [-1], [0, 7]])
def test_gradients_are_of_what_is_learned(wanted):
    extras, rest = arguments(score=scores.score(lambda s, b, h, q, k: s * HEADS[h]))
    with pytest.raises(ArgumentError, match=r"wanted is .*must be of \[0\]"):
        called(extras, rest, "captured_grads", wanted)


def test_operators_check_the_lists_of_a_block_mask():
    blocks = tilewise.sparse.create_block_mask(mods.causal(), 1, 2, 16, 16, block=(16, 16))
    extras, rest = arguments(block_mask=blocks)
    called(extras, rest)
    for wrong in (extras[-1][0].long(), extras[-1][0][:, :, :0], extras[-1][0][0]):
        with pytest.raises(ArgumentError, match="they must be int32"):
            called([*extras[:-1], [wrong, *extras[-1][1:]]], rest)


_COMPILED = """
import sys, torch, tilewise
q, want = torch.load(sys.argv[2])
got = torch._inductor.aoti_load_package(sys.argv[1])(q)
torch.testing.assert_close(got, want)
"""


class Plain(torch.nn.Module):
    def __init__(self, device):
        super().__init__()

    def forward(self, q):
        return tilewise.attention(q, q, q, causal=True)


class Modified(Module):
    def forward(self, q):
        return tilewise.attention(q, q, q, mask_mod=self.mask, score_mod=self.score)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("module", [Plain, Modified])
def test_aot_inductor(module, device, tmp_path):
    """Compiled ahead of time, in this process and in another one."""
    if not _has_compiler():
        pytest.skip("AOTInductor needs a C++ compiler")
    if reason := _why_no_package(device):
        pytest.skip(f"AOTInductor of this torch cannot load a package of x.sin() here: {reason}")
    q, model = torch.randn(1, 16, 2, 8, device=device), module(device)
    program = torch.export.export(model, (q,))
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    want = model(q)
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(q), want)
    torch.save((q, want), tmp_path / "tensors.pt")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    given = [package, str(tmp_path / "tensors.pt")]
    subprocess.run([sys.executable, "-c", _COMPILED, *given], check=True, env=env)


_TRIVIAL = """
import sys, torch

class Trivial(torch.nn.Module):
    def forward(self, x):
        return x.sin()

x = torch.ones(4, device=sys.argv[1])
program = torch.export.export(Trivial(), (x,))
package = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[2])
torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), x.sin())
"""


@functools.cache
def _why_no_package(device: str) -> str:
    """Why a program of torch's own does not run as a package here; empty where it does. In a
    process of its own, as torch 2.11 for CUDA 13 ended ours by a segmentation fault.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _TRIVIAL, device, f"{folder}/trivial.pt2"]
        ran = subprocess.run(command, capture_output=True, text=True)
    lines = ran.stderr.strip().splitlines() or [""]
    return f"exit status {ran.returncode}, {lines[-1]}" if ran.returncode else ""


def _has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except Exception:  # torch's own InvalidCxxCompiler, which moved
        return False
