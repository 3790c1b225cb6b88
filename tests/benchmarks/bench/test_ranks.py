"""Processes that a bench starts, on a CPU."""

import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

PROGRAM = """
import time
from benchmarks.bench.ranks import run_ranks

def main(tell):
    tell("begun")
    time.sleep(30)
    print("outlived", flush=True)

if __name__ == "__main__":
    run_ranks(main, 2, "cpu", tell=lambda line: print(line, flush=True))
"""


@pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not here")
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, "utf-8")
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, file], env=here, stdout=subprocess.PIPE) as started:
        assert started.stdout.readline() == b"begun\n"
        started.send_signal(signal.SIGKILL)
        assert started.stdout.read() == b""  # it ends with the last process that could write
