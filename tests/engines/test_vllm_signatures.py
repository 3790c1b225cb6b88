"""Our classes have the methods and arguments that vLLM calls, in each wheel of vLLM that is there.
Its sources are read, not imported, as its compiled parts need a GPU's libraries.
"""

import ast
import os
import re
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("TILEWISE_WHEELS", ROOT / ".venv-vllm" / "wheels"))
WHEELS = sorted(FOLDER.glob("vllm*.whl"))
OURS = ROOT / "src" / "tilewise" / "integrations" / "vllm"
BACKEND = "vllm/v1/attention/backend.py"
BASES = {
    "TilewiseBackend": ["AttentionBackend"],
    "TilewiseBuilder": ["AttentionMetadataBuilder"],
    "TilewiseImpl": ["AttentionImpl", "AttentionImplBase"],
}
pytestmark = pytest.mark.slow
if not WHEELS:
    pytestmark = [pytestmark, pytest.mark.skip(reason="no wheel of vLLM: make test-engines")]


def classes(text):
    return {x.name: x for x in ast.parse(text).body if isinstance(x, ast.ClassDef)}


def methods(*owners):
    return {
        x.name: x
        for owner in reversed(owners)
        for x in owner.body
        if isinstance(x, ast.FunctionDef)
    }


def arguments(method):
    every = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
    return [x.arg for x in every]


def is_abstract(method):
    return any("abstractmethod" in ast.unparse(x) for x in method.decorator_list)


@pytest.fixture(params=WHEELS, ids=lambda path: path.name.split("-cp")[0])
def wheel(request):
    with zipfile.ZipFile(request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def ours():
    found = [classes(path.read_text()) for path in OURS.glob("*.py")]
    return {name: x for one in found for name, x in one.items()}


@pytest.mark.parametrize("name", BASES)
def test_every_abstract_method_is_there_and_takes_its_arguments(wheel, ours, name):
    theirs = classes(wheel.read(BACKEND).decode())
    expected, found = methods(*(theirs[x] for x in BASES[name])), methods(ours[name])
    assert {x for x, method in expected.items() if is_abstract(method)} <= found.keys()
    shared = found.keys() & expected.keys()
    assert len(shared) >= 2
    for method in shared:
        asked, has = arguments(expected[method]), arguments(found[method])
        if found[method].args.vararg:  # it takes the others, and does not read them
            asked = asked[: len(has)]
        assert has[: len(asked)] == asked, method
        assert set(has) - set(asked) <= {"sinks"}, method


def test_a_layer_takes_what_layers_of_vllm_pass(wheel, ours):
    """`do_kv_cache_update` and the argument of sinks are in no base class: Triton's backend."""
    text = wheel.read("vllm/v1/attention/backends/triton_attn.py").decode()
    theirs = methods(classes(text)["TritonAttentionImpl"])
    found = methods(ours["TilewiseImpl"])
    name = "do_kv_cache_update"
    assert arguments(found[name]) == arguments(theirs[name])
    mine = arguments(found["__init__"])
    assert arguments(theirs["__init__"])[: len(mine)] == mine


def test_what_is_imported_and_read_is_there(wheel, ours):
    names = set(wheel.namelist())
    for path in OURS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                stem = node.module.replace(".", "/")
                source = f"{stem}.py" if f"{stem}.py" in names else f"{stem}/__init__.py"
                text = wheel.read(source).decode()
                for alias in node.names:
                    is_module = f"{stem}/{alias.name}.py" in names
                    assert is_module or re.search(rf"\b{alias.name}\b", text), alias.name
    common = classes(wheel.read(BACKEND).decode())["CommonAttentionMetadata"]
    fields = {x.target.id for x in common.body if isinstance(x, ast.AnnAssign)}
    read = set(re.findall(r"\bcommon\.(\w+)", (OURS / "metadata.py").read_text()))
    assert len(read) > 5 and read <= fields


def test_the_entry_point_finds_what_it_calls(wheel):
    """The registry has the functions that the entry point calls."""
    text = wheel.read("vllm/v1/attention/backends/registry.py").decode()
    assert {"is_overridden", "get_path"} <= methods(classes(text)["AttentionBackendEnum"]).keys()
    assert {"CUSTOM", "CPU_ATTN"} <= set(re.findall(r"^    (\w+) = ", text, re.MULTILINE))
    assert re.search(r"^def register_backend\(", text, re.MULTILINE)
