"""What Triton raises about the machine says what to do, and keeps its cause."""

import contextlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.tiers import sample
from helpers.waits import DEADLINE
from triton.runtime import build

from tilewise.kernels.common import building, program
from tilewise.kernels.portable import launch
from tilewise.problem import NO_EXTRAS, OPEN, Scalars, describe

CC = ["/usr/bin/gcc", "main.c"]
FAILURES = {
    "no right to write": (
        lambda folder: PermissionError(13, "Permission denied", f"{folder}/ab/tmp"),
        "TRITON_CACHE_DIR",
    ),
    "no right to make the folder": (
        lambda folder: PermissionError(13, "Permission denied", str(Path(folder).parent)),
        "TRITON_CACHE_DIR",
    ),
    "a read-only disk": (
        lambda folder: OSError(30, "Read-only file system", folder),
        "TRITON_CACHE_DIR",
    ),
    "a full disk": (lambda folder: OSError(28, "No space left on device"), "TRITON_CACHE_DIR"),
    "a file in its way": (
        lambda folder: NotADirectoryError(20, "Not a directory", folder),
        "TRITON_CACHE_DIR",
    ),
    "no folder": (
        lambda folder: RuntimeError("Could not create or locate cache dir"),
        "TRITON_CACHE_DIR",
    ),
    "no compiler": (
        lambda folder: RuntimeError("Failed to find C compiler. Please specify via CC"),
        "CC",
    ),
    "a compiler that is not there": (
        lambda folder: FileNotFoundError(2, "No such file or directory", "gcc-99"),
        "CC",
    ),
    "a compiler that may not run": (
        lambda folder: PermissionError(13, "Permission denied", "/opt/cc"),
        "CC",
    ),
    "a compiler that fails": (
        lambda folder: subprocess.CalledProcessError(1, CC),
        "Python's headers",
    ),
}


class Compiled:
    """A compiled kernel, which makes its launcher when it is asked for that."""

    def __init__(self, name, done):
        self.name, self.done = name, done

    @property
    def run(self):
        self.done.append(f"launcher of {self.name}")


def test_kernels_are_compiled_side_by_side():
    """Each waits for all others; what fails is left to its launch."""
    together, done = threading.Barrier(3), []

    def compilation(name, error=None):
        together.wait(DEADLINE)
        done.append(name)
        if error is not None:
            raise error
        return Compiled(name, done)

    compilations = [partial(compilation, name) for name in ("delta", "dkdv")]
    failing = partial(compilation, "dq", RuntimeError("out of registers"))
    building.side_by_side([*compilations, failing], torch.device("cpu"))
    expected = ["delta", "dkdv", "dq", "launcher of delta", "launcher of dkdv"]
    assert sorted(done) == expected


LAUNCHER = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


def test_each_kernel_keeps_its_own_launcher(tmp_path, monkeypatch):
    """Launchers that Triton loads again, as those of kernels with parameters of the same types;
    Python returns one module for all of them.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sources = [LAUNCHER.replace("NUMBER", str(number)) for number in range(3)] * 2
    loaded = [build.compile_module_from_src(x, "__triton_launcher") for x in sources]
    assert [x.launch() for x in loaded] == [0, 1, 2] * 2


def test_threads_load_one_launcher_at_a_time():
    """A module has the functions of the last that was loaded, until it is read."""
    module, turn = SimpleNamespace(), threading.Barrier(2)

    def load(name, path):
        module.path = path
        with contextlib.suppress(threading.BrokenBarrierError):
            turn.wait(0.1)  # for the other thread, if it may load meanwhile
        return module

    load_apart = partial(building.apart(load), "__triton_launcher")
    with ThreadPoolExecutor(2) as threads:
        assert [x.path for x in threads.map(load_apart, "ab")] == ["a", "b"]


def test_threads_take_quick_turns_only_meanwhile():
    """Also where two threads are inside, of which the first ends first."""
    before, intervals = sys.getswitchinterval(), []
    first, second = building.quick_turns(), building.quick_turns()
    for step in (first.__enter__, second.__enter__):
        step()
        intervals.append(sys.getswitchinterval())
    assert max(intervals) < 1e-3 <= before
    for inner in (first, second):
        inner.__exit__(None, None, None)
    assert sys.getswitchinterval() == before


class Fails:
    """A kernel whose first launch raises."""

    def __init__(self, error):
        self.error = error

    def __getitem__(self, grid):
        def run(*args, **options):
            raise self.error

        return run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton" / "cache"))
    return str(tmp_path / "triton" / "cache")


@pytest.mark.parametrize("name", FAILURES)
def test_a_remedy_stands_beside_the_cause(folder, monkeypatch, name):
    make, remedy = FAILURES[name]
    error = make(folder)
    monkeypatch.setattr(launch, "attn_fwd_kernel", Fails(error))
    monkeypatch.setattr(program, "on_device", lambda device: contextlib.nullcontext())
    q = torch.randn(1, 8, 2, 16)
    scalars = Scalars(0.25, 0.0, OPEN, OPEN)
    problem = describe(q, q, q, NO_EXTRAS, scalars, "bottom_right", False)
    with pytest.raises(RuntimeError, match="kernels of tilewise cannot be compiled") as refusal:
        launch.prepare(problem, scalars, q, q)(q, q, q, NO_EXTRAS)
    assert refusal.value.__cause__ is error
    assert remedy in str(refusal.value) and str(error) in str(refusal.value)
    if remedy == "TRITON_CACHE_DIR":
        assert folder in str(refusal.value)


def test_what_is_not_about_the_machine_passes():
    for error in (torch.OutOfMemoryError("out of memory"), RuntimeError("of a GPU"), KeyError("x")):
        with pytest.raises(type(error)) as found:
            building.first_launch(Fails(error), 1, (), {})
        assert found.value is error


INTERPRETED = """
import torch
from tilewise.kernels import hopper, portable
from tilewise.problem import NO_EXTRAS, OPEN, Scalars, describe

hopper._is_hopper = lambda device: True
q = torch.randn(1, 8, 2, 64).bfloat16()
problem = describe(q, q, q, NO_EXTRAS, Scalars(1.0, 0.0, OPEN, OPEN), "bottom_right", False)
for backend in (hopper, portable):
    print(backend.supports(problem, torch.device("cuda")))
"""


@pytest.mark.parametrize("value", sample(["1", "0"], "1"))
def test_interpreted_kernels_refuse_a_gpu(value):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": value}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True, check=True
    )
    reasons = done.stdout.splitlines()
    if value == "0":
        assert reasons == ["None", "None"]
    else:
        assert reasons == [building.INTERPRETED] * 2
        assert "TRITON_INTERPRET=1" in building.INTERPRETED
