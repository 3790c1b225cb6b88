"""Keys of known calls: no two lists of arguments have one, so that what is wrong is refused after
any call that was right.
"""

import random

import pytest
import torch

import tilewise
import tilewise.distributed as td
from tilewise.ops.calls import find

VALUES = (None, -1, 0, 1, True, False, 1.0, 0.0, "backend", "bounds", "cpu")
WINDOWS = (*VALUES, (), (None,), (1,), (1, 0), (None, None), (True, 0), (1.0, 0), (1, 0, 1))


def test_no_two_lists_of_arguments_have_one_key():
    """Words, then a window: of as many words, whatever they are."""
    q, rng = torch.randn(1, 8, 1, 16), random.Random(0)
    entries, count = {}, 4
    for _ in range(3000):
        words = tuple(rng.choice(VALUES) for _ in range(count))
        window = rng.choice(WINDOWS)
        entry, _ = find((q, q, q), ("a test", *words), window)
        key = tuple(map(repr, words)), repr(window)
        assert entries.setdefault(id(entry), (key, entry))[0] == key


def test_a_window_of_one_side_is_refused_after_none():
    q, k = torch.randn(1, 8, 1, 16), torch.randn(1, 8, 1, 16)
    functions = {
        "window": lambda x: tilewise.attention(q, k, k, window=x),
        "window with bounds": lambda x: tilewise.attention(q, k, k, window=x, max_seqlen_q=8),
        "window_size": lambda x: tilewise.flash_attn_func(q, k, k, window_size=x),
        "distributed": lambda x: td.attention(q, k, k, layout=td.zigzag(8, 1), window=x),
    }
    for function in functions.values():
        for _ in "12":
            function(None)
        with pytest.raises(ValueError, match="window"):
            function((None,))


def test_a_backend_is_no_window():
    q = torch.randn(1, 8, 1, 16)
    tilewise.attention(q, q, q, max_seqlen_q=4, max_seqlen_k=1)
    with pytest.raises(ValueError, match="backend='bounds' is unknown"):
        tilewise.attention(q, q, q, backend="bounds", window=(4, 1))
    tilewise.attention(q, q, q, backend="cpu", window=(4, 1))
