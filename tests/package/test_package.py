"""What is in the wheel, and what it says of itself."""

import email
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers.bare import build

import tilewise

pytest.importorskip("hatchling")

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAME = f"tilewise-{tilewise.__version__}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_the_sources_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if not name.startswith(f"{NAME}.dist-info/")}
    sources = [x for x in SOURCE.rglob("*") if x.is_file() and "__pycache__" not in x.parts]
    assert inside == {path.relative_to(SOURCE).as_posix() for path in sources}
    assert {"tilewise/py.typed", "gluon_emulator/py.typed"} <= inside
    assert f"{NAME}.dist-info/licenses/LICENSE" in names


def test_the_wheel_says_what_the_project_says(wheel):
    inside = zipfile.ZipFile(wheel)
    said = email.message_from_bytes(inside.read(f"{NAME}.dist-info/METADATA"))
    assert (said["Name"], said["Version"]) == ("tilewise", tilewise.__version__)
    needed = [x for x in said.get_all("Requires-Dist") if "extra ==" not in x]
    assert [re.split("[>;]", x)[0] for x in needed] == ["torch", "triton"]
    assert said.get_payload().startswith("# tilewise\n")
    script = "tilewise = tilewise.cli.__main__:main"
    points = inside.read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert script in points
    assert "[vllm.general_plugins]\ntilewise = tilewise_plugins.vllm:register" in points
    assert "[sglang.srt.plugins]\ntilewise = tilewise_plugins.sglang:register" in points


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
    assert written == ["tilewise/__init__.py"]
