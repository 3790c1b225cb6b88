"""What each test costs and which lines it runs, for `make tiers`, which rewrites covered.txt.

    python -m helpers.watch -n 2  # with arguments of pytest; needs the coverage package
    python -m helpers.watch -n 2 tests/kernels tests/ptx  # a part, whose fast tests alone run

Tests run twice, for their seconds and for their lines, in the interpreter and the emulator also
those of kernels. Ranks that helpers/processes.py starts hand theirs over. Of a part, what was left
out before stays so, as tests that stay have all its lines.
"""

import contextlib
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from .covered import Seen, read, write

# Where the processes of a run leave what they saw: a folder whose name says what is looked at
FOLDER = "TILEWISE_SEEN_BY_TESTS"
# Set where a part of the tests is looked at
PART = "TILEWISE_SEEN_IS_A_PART"
SECONDS, LINES = "seconds", "lines"
# What no line shows: rules of the code, each feature in each backend, and examples at random
KEPT = (
    "tests/structure/",
    "tests/kernels/test_matrix.py",
    "tests/fuzz/",
    "tests/reference/test_properties.py",
)
PROGRAMS = ["src", "benchmarks", "examples", "tour"]
# CPU seconds of other processes from which on lines of this one are not all that a test runs
ELSEWHERE = 0.1


def is_hypothesis_test(item: pytest.Item) -> bool:
    """A test of examples that Hypothesis draws."""
    return hasattr(getattr(item, "obj", None), "hypothesis")


def seconds_elsewhere() -> float:
    """CPU time of processes that are over, those of the server of processes among them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    forked = 0.0
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    if server and server._forkserver_pid:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{server._forkserver_pid}/stat").read_text()
            forked = sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return used.ru_utime + used.ru_stime + forked / os.sysconf("SC_CLK_TCK")


class Lines:
    """Lines of this process from here on, by coverage, if the run looks at lines."""

    def __init__(self, folder: str):
        self.coverage = None
        if Path(folder).parent.name == LINES:
            from coverage import Coverage

            options = dict(data_file=None, config_file=False, messages=False)
            self.coverage = Coverage(branch=True, source=PROGRAMS, **options)
            self.coverage.start()

    def take(self) -> dict[str, set[int]]:
        """By file, numbers of the arcs that ran since the last look."""
        if not self.coverage:
            return {}
        arcs = self.coverage._collector.data  # what is public puts each into a data base
        taken = {file: set(numbers) for file, numbers in arcs.items()}
        arcs.clear()
        return taken


def folder_of_ranks() -> str | None:
    """Where the ranks that a test starts leave their lines, while `make tiers` runs."""
    return f"{os.environ[FOLDER]}/of-{os.getpid()}" if FOLDER in os.environ else None


@contextlib.contextmanager
def rank(folder: str | None):
    """A rank's program, whose lines go to that folder."""
    lines = folder and Lines(folder)
    yield
    if lines:
        Path(folder, f"{os.getpid()}.pickle").write_bytes(pickle.dumps(lines.take()))


class Watch:
    """The plugin of pytest, in each of its processes."""

    def __init__(self):
        self.folder, self.lines = Path(folder_of_ranks()), None
        self.seen, self.arcs = [], {}  # each arc once in memory

    def pytest_collection_finish(self):
        """Watches from here on."""
        self.folder.mkdir()
        self.lines = Lines(self.folder)

    def take_lines(self) -> list[dict[str, set[int]]]:
        """Those of this process and of each rank that it started."""
        taken = [self.lines.take()]
        for file in sorted(self.folder.iterdir()):
            taken.append(pickle.loads(file.read_bytes()))
            file.unlink()
        return taken

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """One test, with its fixtures."""
        self.take_lines()
        here, elsewhere = time.process_time(), seconds_elsewhere()
        result = yield
        here, elsewhere = time.process_time() - here, seconds_elsewhere() - elsewhere
        taken = self.take_lines()
        arcs = {(file, x) for lines in taken for file, of in lines.items() for x in of}
        in_processes = elsewhere > ELSEWHERE and len(taken) == 1
        self.seen.append(
            Seen(
                test=item.nodeid,
                seconds=here + elsewhere,
                is_kept=item.nodeid.startswith(KEPT) or is_hypothesis_test(item),
                runs_elsewhere=in_processes or "compile" in item.keywords,
                arcs=tuple(self.arcs.setdefault(arc, arc) for arc in arcs),
            )
        )
        return result

    def pytest_sessionfinish(self):
        """Leaves what this process saw, a worker or the only one."""
        if self.lines:
            self.folder.with_suffix(".pickle").write_bytes(pickle.dumps(self.seen))


def pytest_configure(config):
    """Of `-p helpers.watch`."""
    config.pluginmanager.register(Watch())


def looks_at_all() -> bool:
    """Whether this run is to find out which of all tests are fast."""
    return FOLDER in os.environ and PART not in os.environ


def run(folder: Path, arguments: list[str]) -> list[Seen]:
    """What each test of one run was seen to do; CalledProcessError if one fails."""
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu and not slow"]
    environment = os.environ | {FOLDER: str(folder)}
    subprocess.run([*command, "-p", "helpers.watch", *arguments], env=environment, check=True)
    files = sorted(folder.glob("*.pickle"))
    tests = [x for file in files for x in pickle.loads(file.read_bytes())]
    return [x for x in tests if x.test.startswith("tests/")]


if __name__ == "__main__":
    is_part = any(x.startswith("tests") for x in sys.argv[1:])
    if is_part:
        os.environ[PART] = "1"
    with tempfile.TemporaryDirectory() as folder:
        seconds, lines = (run(Path(folder, x), sys.argv[1:]) for x in (SECONDS, LINES))
    seconds = {x.test: x.seconds for x in seconds}
    write([x._replace(seconds=seconds[x.test]) for x in lines], read() if is_part else ())
