"""Pages are true where nothing but the wheel is installed, and what they say is installed: each of
their blocks, commands and names runs.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib

import pytest
from helpers.bare import RUN_BLOCKS, Bare, build
from helpers.pages import ROOT, installed_by, lines_of
from helpers.waits import DEADLINE
from structure.test_public_paths import PUBLIC

import tilewise
from tilewise.cli.machine import triton_version
from tilewise.errors import EXTRAS

PAGES = ["README.md", "README.zh-CN.md", "docs/install.md"]
PAGES += ["docs/quickstart.md", "docs/zh/quickstart.md", "tour/README.md"]
# A page names a command; here it is asked for little
LITTLE = {
    "explain": "--no-compile",
    "mask": "causal",
    "verify": "--quick --device cpu -k 64x64",
}
OF_AN_EXTRA = r"transformers|diffusers|use_interpreter"
NO_GPU = 3  # the exit code of a command that needs one
OF_A_CLONE = r"make |git |python -m (benchmarks|examples)\b"
# What needs an extra, and says so where it is missing
USES = {
    "cli": "import runpy, sys\nsys.argv = ['', '--version']\n"
    "runpy.run_module('tilewise', run_name='__main__')",
    "tour": "import torch, tilewise\nq = torch.randn(1, 16, 1, 16)\n"
    "with tilewise.testing.use_interpreter(): tilewise.attention(q, q, q, backend='portable')",
    "hf": "import tilewise\ntilewise.integrations.transformers.register()",
    "diffusers": "import tilewise\ntilewise.integrations.diffusers.register()",
}
LACKS = """
import sys
hidden = set(sys.argv[2].split(","))

class Lacking:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *rest):
        return None if name.split(".")[0] in hidden else self.finder.find_spec(name, *rest)

sys.meta_path[:] = map(Lacking, sys.meta_path)
"""


def python_of(page):
    """Blocks and names of a page that need no extra."""
    for line in lines_of(page):
        if line.kind != "command" and not re.search(OF_AN_EXTRA, line.text):
            yield page, line.number, code_of(line)


def code_of(line):
    return line.text if line.kind == "python" else f"import tilewise\n{line.text}"


def raised_by(use):
    """A block that holds the error of a use to name the extra."""
    return f"""
try:
    exec(compile({USES[use]!r}, {use!r}, "exec"), {{}})
except (ModuleNotFoundError, SystemExit) as error:
    assert "`pip install 'tilewise[{use}]'`" in str(error), error
else:
    raise AssertionError("nothing was raised")
"""


def test_pages_and_public_modules_need_no_extra(tmp_path):
    """Extras are hidden here; `make test-bare` has an environment without them."""
    modules = [*(name for name in PUBLIC if name.count(".") == 1), "tilewise.integrations.dtensor"]
    modules += [f"tilewise.integrations.{name}" for name in ("diffusers", "hub", "transformers")]
    enough = f"import tilewise\nfor name in {modules}: assert eval(name).__doc__, name"
    enough += "\nassert not tilewise.integrations.transformers.is_registered()"
    blocks = {text: (page, number) for page in PAGES for page, number, text in python_of(page)}
    said = [(use, 1, raised_by(use)) for use in USES if use != "tour" or find_triton()]
    asked = [("import", 1, enough), *((*where, text) for text, where in blocks.items()), *said]
    assert len(blocks) > 10
    (tmp_path / "blocks.json").write_text(json.dumps(asked))
    hidden = ",".join([*EXTRAS, "numpy", "accelerate", "pytest"])
    command = [sys.executable, "-c", LACKS + RUN_BLOCKS, str(tmp_path / "blocks.json"), hidden]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr


def find_triton():
    return triton_version() != "none"


def test_extras_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for package, extra in EXTRAS.items():
        names = [re.split("[<>=]", one)[0].replace("-", "_") for one in extras[extra]]
        assert package in names
    install = (ROOT / "docs" / "install.md").read_text()
    assert set(extras) == set(re.findall(r"^\| `(\w+)` \|", install, re.MULTILINE))


def test_the_tour_needs_its_extra_alone():
    found = set()
    for path in (ROOT / "tour").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    own = {path.stem for path in (ROOT / "tour").rglob("*")}
    assert found - own - sys.stdlib_module_names <= {
        *("torch", "triton", "tilewise"),
        *("matplotlib", "numpy"),
        "benchmarks",  # where rows are recorded
    }


# In an environment of its own: `make test-bare`


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel that was built from the sdist."""
    for needed in ("hatchling", "packaging", *EXTRAS, "numpy"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(build("sdist", folder / "sdist")) as packed:
        packed.extractall(folder, filter="data")
    return build("wheel", folder / "wheel", folder / f"tilewise-{tilewise.__version__}")


@pytest.fixture
def bare(wheel, tmp_path):
    return Bare(tmp_path, wheel)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_line_runs(page, bare):
    """In the page's order, after what the page installs."""
    blocks, ran = [], 0
    if not any(installed_by(line) == set() for line in lines_of(page)):
        bare.install()

    def run_blocks():
        nonlocal ran
        if len(blocks) > ran:
            bare.blocks(blocks)
        ran = len(blocks)

    for line in lines_of(page):
        if line.kind != "command":
            blocks.append((page, line.number, code_of(line)))
            continue
        run_blocks()
        extras = installed_by(line)
        if extras is not None:
            bare.install(*sorted(extras))
            if "hf" in extras:
                blocks.append((page, line.number, "path = " + repr(bare.model())))
        elif not re.match(OF_A_CLONE, line.text):
            done = bare.run(*command_of(line))
            assert done.returncode in (0, NO_GPU), f"{page}:{line.number}: {done.stderr}"
    run_blocks()


def command_of(line):
    """The command, small where it measures."""
    first, second, *rest = shlex.split(line.text)
    if first == "tilewise":
        return first, second, *rest, *shlex.split("" if rest else LITTLE.get(second, ""))
    return first, *((str(ROOT / x) if (ROOT / x).exists() else x) for x in (second, *rest))


@pytest.mark.slow
def test_what_the_wheel_brings(bare):
    bare.install()
    assert not bare.packages() & {"numpy", "click", "rich", "matplotlib", "transformers"}
    (file,) = bare.python("-c", "import tilewise\nprint(tilewise.__file__)").stdout.split()
    assert file.startswith(str(bare.home))


@pytest.mark.slow
@pytest.mark.parametrize("extra", USES)
def test_the_remedy_of_an_error_is_one(extra, bare):
    bare.install()
    failed = bare.python("-c", USES[extra])
    (remedy,) = re.findall(r"`pip install '(tilewise)\[(\w+)\]'`", failed.stderr)
    assert failed.returncode == 1 and remedy == ("tilewise", extra)
    bare.install(extra, name="tilewise")
    done = bare.python("-c", USES[extra])
    assert done.returncode == 0, done.stderr
