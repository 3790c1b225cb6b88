"""The wheel and the sdist: what is in them, and that README's lines run where only they are."""

import email
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import tilewise

pytest.importorskip("hatchling")

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tilewise"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAME = f"tilewise-{tilewise.__version__}"


def build(target: str, into: Path, root: Path = ROOT) -> Path:
    """The file that hatchling makes of the project at `root`: a "wheel" or an "sdist"."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_the_sources_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if not name.startswith(f"{NAME}.dist-info/")}
    sources = [x for x in SOURCE.rglob("*") if x.is_file() and "__pycache__" not in x.parts]
    assert inside == {f"tilewise/{path.relative_to(SOURCE).as_posix()}" for path in sources}
    assert "tilewise/py.typed" in inside
    assert f"{NAME}.dist-info/licenses/LICENSE" in names


def test_the_wheel_says_what_the_project_says(wheel):
    inside = zipfile.ZipFile(wheel)
    said = email.message_from_bytes(inside.read(f"{NAME}.dist-info/METADATA"))
    assert (said["Name"], said["Version"]) == ("tilewise", tilewise.__version__)
    needed = [x for x in said.get_all("Requires-Dist") if "extra ==" not in x]
    assert [re.split("[>;]", x)[0] for x in needed] == ["torch", "triton"]
    assert said.get_payload().startswith("# tilewise\n")
    script = "tilewise = tilewise.cli.__main__:main"
    assert script in inside.read(f"{NAME}.dist-info/entry_points.txt").decode()


def test_the_version_stands_in_one_place():
    """`tilewise.__version__`: the build reads it there."""
    project = PYPROJECT["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["hatch"]["version"] == {"path": "src/tilewise/__init__.py"}
    written = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"^__version__ = ", path.read_text(), re.MULTILINE)
    ]
    assert written == ["__init__.py"]


@pytest.fixture
def installed(tmp_path):
    """Python of a new environment with a wheel that was built from the sdist.

    Of this environment it sees torch and the rest, but not tilewise: nothing is downloaded.
    """
    sdist = build("sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    wheel = build("wheel", tmp_path / "wheel", tmp_path / "unpacked" / NAME)
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = home / "bin" / "python"
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", purelib], check=True, capture_output=True, text=True)
    beside = {x for x in sys.path if x.endswith("-packages")} | {sysconfig.get_path("purelib")}
    (Path(site.stdout.strip()) / "beside.pth").write_text("\n".join(sorted(beside)))
    options = ["--quiet", "--no-index", "--no-deps", "--force-reinstall"]
    subprocess.run([python, "-I", "-m", "pip", "install", *options, str(wheel)], check=True)
    return python


def readme() -> str:
    """README's Python, one block after the other."""
    text = (ROOT / "README.md").read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


@pytest.mark.slow
def test_the_sdist_installs_and_readme_runs_from_elsewhere(installed, tmp_path):
    """Isolated (-I): neither PYTHONPATH nor the folder counts."""
    asked = "print(tilewise.__file__, tuple(out.shape), tilewise.__version__)"
    code = f"import tilewise\n{readme()}\n{asked}"
    command = [installed, "-I", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, rest = done.stdout.split(maxsplit=1)
    assert Path(file).is_relative_to(tmp_path / "venv")
    assert rest.strip() == f"(2, 1024, 8, 64) {tilewise.__version__}"
    info = [installed, "-I", installed.parent / "tilewise", "info", "--markdown"]
    done = subprocess.run(info, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert tilewise.__version__ in done.stdout
