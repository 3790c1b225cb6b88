"""Importing tilewise is cheap, and neither it nor attention on the CPU wants Triton or click."""

import os
import subprocess
import sys

SCRIPT = """
import time
start = time.process_time()
import torch
of_torch = time.process_time() - start
import tilewise
seconds = time.process_time() - start - of_torch
import sys
q = torch.randn(1, 4, 2, 16, requires_grad=True)
unwanted = ("triton", "click", "transformers", "torch._dynamo", "torch._inductor")
after_import = [name for name in unwanted if name in sys.modules]
tilewise.attention(q, q, q, causal=True).sum().backward()
after_call = [name for name in ("triton", "click", "transformers") if name in sys.modules]
print(seconds, of_torch, after_import, after_call, sep=";")
"""


def test_import_is_cheap_and_alone(record_property):
    """Aimed at 50 ms of the CPU; held to a share of torch's import in the same process, the least
    of five, so that neither a slow machine nor a busy one decides.
    """
    least = float("inf")
    for _ in range(5):
        found = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.split(";")
        seconds, of_torch = map(float, found[:2])
        assert [x.strip() for x in found[2:]] == ["[]", "[]"]
        least = min(least, seconds / of_torch)
        if least < 0.15:
            break
    print(f"import tilewise: {seconds * 1e3:.0f} ms beyond torch")
    record_property("import_ms", seconds * 1e3)
    assert least < 0.15
