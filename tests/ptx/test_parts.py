"""Parts of tiles in machine instructions: the last of a tile has all states to fold.

Not slow as those of `test_decode` are: what a kernel's loop carries from one part to the next,
neither the emulator nor the compiler's figures show.
"""

import torch
from helpers.caches import sequences

from .test_decode import BF16, assert_right, cache_of, run


def test_parts_are_folded(monkeypatch):
    s = sequences([1, 3], [390, 260], (2, 1), (64, 64), BF16)
    q = torch.cat(s.q)
    found = run(monkeypatch, q, cache_of(s, 16), causal=True)
    assert_right(q, cache_of(s, None), found, causal=True)
