"""Importing tilewise is cheap, and neither it nor attention on the CPU wants Triton, click or
tilewise.distributed.
"""

import os
import subprocess
import sys

SCRIPT = """
import torch
from helpers.work import at_most
with at_most(calls=100_000):  # 66 thousand, or 50 ms of a CPU
    import tilewise
import sys
q = torch.randn(1, 4, 2, 16, requires_grad=True)
unwanted = ("triton", "click", "transformers", "torch._dynamo", "torch._inductor")
after_import = [name for name in unwanted if name in sys.modules]
tilewise.attention(q, q, q, causal=True).sum().backward()
unwanted = ("triton", "click", "transformers", "tilewise.distributed")
after_call = [name for name in unwanted if name in sys.modules]
assert not after_import and not after_call, (after_import, after_call)
"""


def test_import_is_cheap_and_alone():
    """Beyond torch's import, which is many times as long."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", SCRIPT], env=env, check=True)
