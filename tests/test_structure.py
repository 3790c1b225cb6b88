"""The rules of the source tree, read from its syntax: who imports whom, what stays small."""

import ast
from pathlib import Path

import pytest

import tilewise

ROOT = Path(tilewise.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
OF_LIBRARY = [name for name in TREES if not name.startswith(("testing/", "bench/", "cli/"))]

# From the outside in; a room imports from its own rank or a later one.
RANKS = [
    ["cli", "bench"],
    ["integrations", "ring"],
    ["__init__", "faces", "sdpa", "flex", "bert_padding", "kv_cache"],
    ["api", "cache"],
    ["cache_ops", "cache_steps"],
    ["ops"],
    ["learned"],
    ["dispatch", "batching", "flops", "sharded"],
    ["kernels"],
    ["tuning"],
    ["tile"],
    ["reference"],
    ["broadcasting", "chunks", "append_checks"],
    ["cache_checks"],
    ["checks", "qkv", "modifiers", "schema"],
    ["scalars", "cached"],
    ["problem", "sparse"],
    ["mods"],
    ["masks", "scores"],
    ["kept"],
    ["traced"],
    ["tracing", "symbols", "derivative", "serialize"],
    ["evaluation"],
    ["predicates", "expressions", "dropout", "paging", "splits", "rotary"],
    ["integers"],
    ["errors", "testing", "bytecode"],
]
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
# What lies against the grain, and why.
AGAINST = {
    ("ops", "integrations"): "late, when torch has loaded DTensor: it registers the rules of ops",
    ("tuning", "kernels"): "search launches one configuration after the other",
    ("testing", "reference"): "the matrix of cases is judged by it",
    ("testing", "sparse"): "the matrix has masks",
    ("testing", "mods"): "the matrix has masks",
    ("testing", "__init__"): "the matrix of cases calls the public functions",
}


def room_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def imports(name: str) -> set[str]:
    """The modules of ours that a file imports, as paths from the package, at any depth."""
    package = name.removesuffix(".py").split("/")[:-1]
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("tilewise").strip(".").replace(".", "/") or "__init__"
                for alias in node.names
                if alias.name.split(".")[0] == "tilewise"
            }
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
            elif (node.module or "").split(".")[0] == "tilewise":
                base, node.module = [], (node.module or "").partition(".")[2]
            else:
                continue
            base = base + (node.module.split(".") if node.module else [])
            if base:
                found.add("/".join(base))
            for alias in node.names:
                target = "/".join([*base, alias.name])
                if f"{target}.py" in FILES or f"{target}/__init__.py" in FILES:
                    found.add(target)
                elif not base:
                    found.add("__init__")
    return found


def test_every_file_is_read():
    assert {"api.py", "tile/mask.py", "kernels/portable/fwd.py"} <= FILES.keys()
    assert "problem" in imports("api.py")
    assert "kernels/outputs" in imports("kernels/portable/launch.py")


@pytest.mark.parametrize("name", [name for name in TREES if name != "__init__.py"])
def test_imports_point_inwards(name):
    room = room_of(name)
    assert room in RANK, f"{room} has no rank yet"
    for target in imports(name):
        other = room_of(target)
        if other == room or (room, other) in AGAINST:
            continue
        assert RANK[room] <= RANK[other], f"{name} imports {target}"


def test_every_exception_is_needed():
    pairs = {(room_of(name), room_of(target)) for name in TREES for target in imports(name)}
    assert AGAINST.keys() <= pairs


SHARED_BY_BACKENDS = (
    *("arguments", "building", "bwd_dbias", "bwd_delta", "bwd_step", "generated", "io", "outputs"),
    *("relaunch", "widths"),
)


def test_backends_never_import_each_other():
    for name in TREES:
        if name.startswith("kernels/") and name.count("/") > 1:
            mine = name.split("/")[1]
            others = {x.split("/")[1] for x in imports(name) if x.startswith("kernels/")}
            assert others <= {mine, *SHARED_BY_BACKENDS}, name


def test_triton_is_imported_where_kernels_are():
    """The rest imports without it."""
    for name, tree in TREES.items():
        at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = {a.name for n in at_import if isinstance(n, ast.Import) for a in n.names}
        modules |= {n.module or "" for n in at_import if isinstance(n, ast.ImportFrom)}
        if any(module.split(".")[0] == "triton" for module in modules):
            rooms = (
                *("kernels/portable/", "kernels/hopper/", "kernels/relaunch", "kernels/io"),
                "kernels/building",
                *("kernels/bwd_", "kernels/generated", "tile/", "testing/", "tuning/search"),
                "bench/matmul.py",
            )
            assert name.startswith(rooms), name


# Each loads numbers of a sequence or a head: a length, a slope, a sink.
LOADS = {
    *("bounds.py", "dropout.py", "ends.py", "score.py", "seqlen.py", "softmax.py", "varlen.py"),
}
CREATES = {"arange", "zeros", "full", "dot", "zeros_like", "full_like", "rand", "store"}


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith("tile/")])
def test_tile_functions_create_no_tensor(name):
    """That is what lets Triton, Gluon and the interpreter share them."""
    calls = {
        node.func.attr
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("tl", "gl", "language")
    }
    assert not calls & CREATES
    if name.removeprefix("tile/") not in LOADS:
        assert not calls & {"load", "make_block_ptr", "make_tensor_descriptor"}


@pytest.mark.parametrize("name", TREES)
def test_files_are_short_and_open_with_their_idea(name):
    assert len(FILES[name].read_text().splitlines()) < 400
    assert ast.get_docstring(TREES[name]), "a module opens with a docstring"


# Signatures that another library or a kernel's launch dictates.
WIDE = {
    "api.py": {"attention"},
    "faces.py": {"flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"}
    | {"flash_attn_varlen_func"},
    "kv_cache.py": {"flash_attn_with_kvcache"},
    "reference.py": {"attention_reference"},
    "ops.py": {"forward"},  # an autograd.Function's: every input is a parameter
    # Triton takes descriptors as arguments of their own, not in groups
    "kernels/hopper/fwd.py": {"hopper_fwd_kernel"},
    "kernels/hopper/bwd.py": {"hopper_bwd_kernel"},
    "kernels/hopper/bwd_wide.py": {"hopper_bwd_wide_kernel"},
}


@pytest.mark.parametrize("name", TREES)
def test_functions_take_twelve_parameters_at_most(name):
    for node in functions(TREES[name]):
        a = node.args
        count = len(a.posonlyargs + a.args + a.kwonlyargs)
        if node.name not in WIDE.get(name, ()):
            assert count <= 12, f"{node.name} takes {count}"


def functions(tree: ast.AST) -> list:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.mark.parametrize("name", OF_LIBRARY)
def test_users_meet_no_assert(name):
    """Wrong input is an ArgumentError with a remedy, and -O takes no check away."""
    for node in ast.walk(TREES[name]):
        assert not isinstance(node, ast.Assert), f"{name}:{node.lineno}"


@pytest.mark.parametrize("public", [x for x in tilewise.__all__ if x[0].islower()])
def test_public_functions_show_an_example(public):
    function = getattr(tilewise, public)
    assert ">>> " in (function.__doc__ or "")


def test_no_print_in_the_library():
    for name in OF_LIBRARY:
        calls = [n for n in ast.walk(TREES[name]) if isinstance(n, ast.Call)]
        printed = [n.lineno for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
        if name != "tuning/search.py":  # it prints rows ready to paste
            assert not printed, f"{name}:{printed}"
