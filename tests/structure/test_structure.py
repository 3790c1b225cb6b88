"""The rules of the source tree, read from its syntax: imports point inwards, files stay small."""

import ast
import sys

import pytest
from helpers import import_graph
from helpers.import_graph import files, rooms
from helpers.sources import FILES, ROOT, nodes_of, tree_of

import tilewise

EMULATOR = sorted((ROOT.parent / "gluon_emulator").rglob("*.py"))
OF_LIBRARY = [x for x in FILES if not x.startswith(("testing/", "explain/", "cli/"))]

# From the outside in: a room imports from later ranks alone.
RANKS = [
    ["__main__", "cli"],
    ["explain"],
    ["testing", "distributed"],
    ["__init__"],
    ["faces", "cache", "scores", "sparse", "bert_padding", "integrations", "reference"],
    ["frontend"],
    ["ops"],
    ["dispatch"],
    ["kernels"],
    ["mods"],
    ["tile", "tuning", "emulation", "problem", "switches"],
    ["errors", "features", "hardware", "keywords", "bench"],
]
RANK = {room: rank for rank, beside in enumerate(RANKS) for room in beside}
# Of a folder the rooms, the floors and the arrows: `python tests/helpers/import_graph.py` counts.
COUNTS = {
    "": (28, 12, 115),
    "distributed": (5, 5, 9),
    "kernels": (5, 2, 3),
    "kernels/hopper": (25, 8, 71),
}


def packages(nodes) -> set[str]:
    """What the imports among these nodes name, without those of their own package."""
    nodes = list(nodes)
    modules = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    modules |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom) and not n.level}
    return {module.split(".")[0] for module in modules}


def test_every_file_is_read():
    assert {"frontend/attention", "tile/mask", "kernels/portable/fwd"} <= files().keys()
    assert "problem" in files()["frontend/attention"]
    assert "kernels/common/results" in files()["kernels/portable/launch"]
    assert "ops/flops" in files()["ops/late"]  # inside of a function
    assert "mods/trace" not in files()["mods/symbols"]  # for types alone


def test_imports_point_inwards():
    assert len(RANKS) <= 12
    assert rooms().keys() == RANK.keys()
    up = [
        f"{name} imports {other}"
        for name, others in files().items()
        for other in others
        if (mine := name.split("/")[0]) != (its := other.split("/")[0]) and RANK[mine] >= RANK[its]
    ]
    assert not up


def test_the_library_does_not_measure():
    """What users run stands outside of it, and measurements and examples outside of the wheel."""
    for name, others in files().items():
        if name.split("/")[0] not in ("explain", "cli"):
            assert not [x for x in others if x.startswith(("explain/", "cli/"))], name
    for name in FILES:
        assert not {"benchmarks", "examples"} & packages(nodes_of(name)), name


@pytest.mark.parametrize("folder", import_graph.folders())
def test_rooms_have_no_circle(folder):
    import_graph.in_order(rooms(folder))


def test_files_have_no_circle():
    import_graph.in_order(files())


def test_no_two_files_import_each_other_for_types_either():
    graph = {name: import_graph.imports(name, for_types=True) for name in files()}
    assert not [(a, b) for a, others in graph.items() for b in others if a in graph[b]]


@pytest.mark.parametrize("folder", COUNTS)
def test_a_change_of_the_layout_shows(folder):
    assert import_graph.counts(folder) == COUNTS[folder]


def test_backends_never_import_each_other():
    inside = rooms("kernels")
    assert all(inside[backend] <= {"common"} for backend in ("cpu", "portable", "hopper"))
    assert not inside["common"]


def test_a_sharded_call_goes_from_api_to_transport():
    inside = rooms("distributed")
    assert not inside["layouts"]
    assert inside["transport"] == {"layouts"}
    assert inside["methods"] == {"layouts", "transport"}
    assert inside["api"] == {"layouts", "methods", "transport"}


def test_hoppers_forward_and_backward_share_what_lies_beside_them():
    inside = rooms("kernels/hopper")
    assert "bwd" not in inside["fwd"] and "fwd" not in inside["bwd"]
    assert all(not others & {"fwd", "bwd"} for room, others in inside.items() if room != "__init__")


def test_the_emulator_imports_nothing_of_the_library():
    known = {"gluon_emulator", "numpy", "torch", "triton", *sys.stdlib_module_names}
    assert EMULATOR
    for path in EMULATOR:
        assert packages(ast.walk(ast.parse(path.read_text()))) <= known, path


def test_the_library_imports_the_emulator_where_a_kernel_runs():
    """Within functions, and in a module that is there for it."""
    imports = {x: packages(import_graph.statements(x)) for x in FILES}
    waits = {"kernels/hopper/fwd/runs.py", "kernels/hopper/fwd/transpose.py"}
    reach = {"emulation.py", "testing/hopper.py", *waits}
    assert {name for name, found in imports.items() if "gluon_emulator" in found} == reach
    at_import = {x for x in FILES if "gluon_emulator" in packages(tree_of(x).body)}
    assert at_import == {"testing/hopper.py"}


def test_triton_is_imported_where_kernels_are():
    """The rest imports without it."""
    where = (
        *("kernels/portable/", "kernels/hopper/", "kernels/common/direct", "kernels/common/io"),
        *("kernels/common/keys", "kernels/common/triton_key"),
        *("kernels/common/building", "kernels/common/bwd_", "kernels/common/program"),
        *("mods/codegen.py", "tile/", "testing/", "explain/sweep.py"),
    )
    for name in FILES:
        if "triton" in packages(tree_of(name).body):
            assert name.startswith(where), name


# Each loads numbers of a sequence or a head: a length, a slope, a sink.
LOADS = {
    *(
        "bounds.py",
        "dropout.py",
        "ends.py",
        "score.py",
        "seqlen.py",
        "softmax.py",
        "varlen.py",
        "split_schedule.py",
    ),
}
CREATES = {"arange", "zeros", "full", "dot", "zeros_like", "full_like", "rand", "store"}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("tile/")])
def test_tile_functions_create_no_tensor(name):
    """That is what lets Triton, Gluon and the interpreter share them."""
    calls = {
        node.func.attr
        for node in nodes_of(name)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("tl", "gl", "language")
    }
    assert not calls & CREATES
    if name.removeprefix("tile/") not in LOADS:
        assert not calls & {"load", "make_block_ptr", "make_tensor_descriptor"}


def test_files_are_short():
    measure = sorted((ROOT.parents[1] / "benchmarks").rglob("*.py"))
    for path in [*FILES.values(), *EMULATOR, *measure]:
        assert len(path.read_text().splitlines()) < 400, path


def test_files_open_with_their_idea():
    assert not [name for name in FILES if not ast.get_docstring(tree_of(name))]


# Signatures that another library or a kernel's launch dictates.
WIDE = {
    "frontend/attention.py": {"attention"},
    "distributed/api/attention.py": {"attention"},
    "frontend/flash_attn.py": {"flash_attn_func", "flash_attn_varlen_func"},
    "frontend/kv_cache.py": {"flash_attn_with_kvcache"},
    "reference.py": {"attention_reference"},
    "ops/attention.py": {"forward"},  # an autograd.Function's: every input is a parameter
    # Triton takes descriptors as arguments of their own, not in groups
    "kernels/hopper/fwd/kernel.py": {"hopper_fwd_kernel"},
    "kernels/hopper/fwd/fp8_kernel.py": {"hopper_fp8_fwd_kernel"},
    "kernels/hopper/bwd/kernel.py": {"hopper_bwd_kernel"},
    "kernels/hopper/bwd/mma_dq.py": {"hopper_bwd_query_kernel"},
}


def test_functions_take_twelve_parameters_at_most():
    for name in FILES:
        for node in functions(name):
            a = node.args
            count = len(a.posonlyargs + a.args + a.kwonlyargs)
            if node.name not in WIDE.get(name, ()):
                assert count <= 12, f"{name}: {node.name} takes {count}"


def test_records_name_what_they_are_made_of():
    """`_make` takes anything in any place: pyright compares it with no field."""
    for name in FILES:
        for node in nodes_of(name):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("._make"):
                items = getattr(node.args[0], "elts", None)
                is_named = items is None or any(isinstance(x, ast.Starred) for x in items)
                assert is_named, f"{name}:{node.lineno}"


def functions(name: str) -> list:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in nodes_of(name) if isinstance(node, kinds)]


def test_users_meet_no_assert():
    """Wrong input is an ArgumentError with a remedy, and -O takes no check away."""
    for name in OF_LIBRARY:
        for node in nodes_of(name):
            assert not isinstance(node, ast.Assert), f"{name}:{node.lineno}"


@pytest.mark.parametrize("public", [x for x in tilewise.__all__ if x[0].islower()])
def test_public_functions_show_an_example(public):
    function = getattr(tilewise, public)
    assert ">>> " in (function.__doc__ or "")


def test_no_print_in_the_library():
    for name in OF_LIBRARY:
        calls = [n for n in nodes_of(name) if isinstance(n, ast.Call)]
        printed = [n.lineno for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
        assert not printed, f"{name}:{printed}"


# Of which torch.compile traces no call, in one release of torch or another
UNTRACEABLE = {"locals", "vars", "globals", "dir", "eval", "exec"}
TRACED = "frontend/", "ops/", "mods/flat", "distributed/api/", "faces", "cache", "scores", "sparse"


def test_what_a_compiler_traces_looks_at_no_frame():
    for name in FILES:
        for function in functions(name) if name.startswith(TRACED) else ():
            calls = [x.func for x in ast.walk(function) if isinstance(x, ast.Call)]
            names = {x.id for x in calls if isinstance(x, ast.Name)}
            assert not names & UNTRACEABLE, f"{name}: {function.name}"
