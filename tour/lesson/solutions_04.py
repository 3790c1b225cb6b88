"""The answer to the exercise of lesson 04, and its check."""

import torch

from . import Exercises, expect

exercises = Exercises("04")


def merge(out1, lse1, out2, lse2):
    """Attention over two sets of keys, of each set's output and lse.

    exp(lse) is the sum by which an output was divided. So each output counts with
    its share of the sum of both, and the lse of both is the logarithm of that sum.
    """
    lse = torch.logaddexp(lse1, lse2)
    out = (
        out1 * (lse1 - lse).exp()[..., None] + out2 * (lse2 - lse).exp()[..., None]
    )
    return out, lse


@exercises.check(1, merge)
def check_merge(answer):
    """Cuts keys at several places; compares merged halves with all keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(
        3, 2, 50, 16, generator=generator, dtype=torch.float64
    ).unbind(0)
    for scale, cut in ((1.0, 25), (1.0, 1), (300.0, 40)):
        s = scale * q @ k.mT
        halves = []
        for part in (slice(0, cut), slice(cut, 50)):
            p, lse = (
                torch.softmax(s[..., part], -1),
                torch.logsumexp(s[..., part], -1),
            )
            halves += [p @ v[:, part], lse]
        out, lse = answer(*halves)
        where = f"keys cut at {cut} of 50, scores times {scale:.0f}"
        expect(lse, torch.logsumexp(s, -1), f"lse, {where}", atol=1e-9)
        expect(out, torch.softmax(s, -1) @ v, f"out, {where}", atol=1e-9)
    return "any cut, and scores so large that exp(lse) overflows"
