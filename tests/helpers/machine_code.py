"""Hashes of the machine code that tests/compile builds, one line per test in machine_code.txt.

`make machine-code` builds all and rewrites the file; `make machine-code BUILDS="..."`, with
arguments of pytest, rewrites the lines of some tests. Both print the tests whose code moved.
"""

import contextlib
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import triton
from triton.runtime.jit import JITFunction

FILE = Path(__file__).parents[1] / "compile" / "machine_code.txt"
# Of every test, or only of the fast ones and some slow ones: a slow test without hashes then passes
EVERY, SOME = "every test", "every fast test and some slow ones"
# Set while the file is rewritten: tests hand their hashes over and compare nothing
REWRITES = "TILEWISE_REWRITES_MACHINE_CODE"

# Labels of debug information, the lines that it is of, and where files are
_OF_DEBUGGING = re.compile(r"\s*(\.(loc|file|cfi_\w+)\b|(\.L|\$L__)(tmp|func_begin|func_end)\d+:)")
# What a launch or ptxas reads in addition to the text
_OPTIONS = (
    *("shared", "num_ctas", "enable_fp_fusion", "ptx_options", "launch_pdl"),
    *("launch_cooperative_grid", "global_scratch_size"),
)


def code_of(compiled) -> str:
    """PTX or AMDGCN of a kernel without comments, debug lines, paths and the kernel's name."""
    asm = compiled.asm
    is_amd = "amdgcn" in asm
    lines, in_debug_section = [], False
    for line in asm["amdgcn" if is_amd else "ptx"].splitlines():
        code = line.partition(";" if is_amd else "//")[0].strip()
        if code.startswith((".section", ".text", ".amdgpu_metadata")):
            in_debug_section = ".debug_" in code
        if code and not in_debug_section and not _OF_DEBUGGING.match(code):
            lines.append(code)
    lines += [f"{option} {getattr(compiled.metadata, option, None)}" for option in _OPTIONS]
    return re.sub(
        rf"(?<![A-Za-z0-9]){compiled.metadata.name}(?![A-Za-z0-9])", "kernel", "\n".join(lines)
    )


def hash_of(compiled) -> str:
    """Eight hexadecimal digits, equal for kernels whose machine code is equal."""
    return hashlib.sha256(code_of(compiled).encode()).hexdigest()[:8]


@contextlib.contextmanager
def recorded():
    """Collects what `tilewise.testing.build` returns, in the order of the calls."""
    kernels, warmup = [], JITFunction.warmup

    def record(self, *args, **options):
        compiled = warmup(self, *args, **options)
        kernels.append(compiled.result() if hasattr(compiled, "result") else compiled)
        return kernels[-1]

    with mock.patch.object(JITFunction, "warmup", record):
        yield kernels


class Hashes(NamedTuple):
    """The file: the Triton that built the kernels, the tests that it covers, and their hashes."""

    triton: str
    covers: str
    rows: dict[str, str]


def read() -> Hashes:
    """The hashes of the file, of each test in the order of its builds."""
    heading, *lines = FILE.read_text("utf-8").splitlines()
    version, covers = heading.removeprefix("# Triton ").split(": ")
    return Hashes(version, covers, dict(line.rsplit(": ", 1) for line in lines))


def write(hashes: Hashes) -> None:
    """Writes the file, sorted by test."""
    lines = [f"{test}: {row}" for test, row in sorted(hashes.rows.items())]
    heading = f"# Triton {hashes.triton}: {hashes.covers}"
    FILE.write_text("\n".join([heading, *lines, ""]), "utf-8")


class Rewriter:
    """A plugin of pytest that takes the hashes of the tests that pass."""

    def __init__(self):
        self.rows = {}

    def pytest_runtest_logreport(self, report):
        """One test is over, in this process or in a worker."""
        for name, hashes in report.user_properties if report.passed else ():
            if name == "machine_code":
                self.rows[test_of(report.nodeid)] = hashes


def test_of(nodeid: str) -> str:
    """A test's name within tests/compile."""
    return nodeid.partition("tests/compile/")[2]


test_of.__test__ = False  # a helper, whose name pytest would take for a test's


def rewrite(arguments: list[str]) -> int:
    """Runs the tests, writes their hashes and prints what moved."""
    old = read()
    os.environ[REWRITES] = "1"
    rewriter = Rewriter()
    status = pytest.main([*arguments, "-m", "", "-q"], plugins=[rewriter])
    rows, covers, kept = rewriter.rows, old.covers, {}
    if arguments[0] == "tests/compile" and not status:
        covers = EVERY
    elif old.triton == triton.__version__:
        kept = {test: row for test, row in old.rows.items() if test not in rows}
    else:
        covers = SOME
    write(Hashes(triton.__version__, covers, kept | rows))
    for test, row in sorted(rows.items()):
        if old.rows.get(test) != row:
            print(f"{test}: {old.rows.get(test, 'no hash')} -> {row}")
    for test in sorted(old.rows.keys() - kept.keys() - rows.keys()):
        print(f"{test}: removed")
    return int(status)


if __name__ == "__main__":
    sys.exit(rewrite(sys.argv[1:]))
