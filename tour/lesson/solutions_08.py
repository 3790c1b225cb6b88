"""Answers to the exercises of lesson 08, and their checks."""

import torch

from . import DEVICE, Exercises, expect
from .pictures_08 import in_pages

exercises = Exercises("08")


def state_share(n, group, headdim):
    """D + 2 fp32 numbers per query head, twice, over n keys and values in bf16.

    For a large D that is 2 G / n: n of about 125 G makes it 1.6 %.
    """
    return 2 * group * 4 * (headdim + 2) / (4 * n * headdim)


@exercises.check(1, state_share)
def check_state_share(answer):
    """Compares `answer(n, group, headdim)` with counts by hand."""
    from tilewise.tile.split_kv import default_split_size

    by_hand = {
        (512, 4, 128): 2 * 4 * 520 / (512 * 512),
        (256, 1, 64): 2 * 264 / (256 * 256),
        (1, 1, 2): 4.0,  # 16 bytes written, 16 read, for 8 of one key and value
    }
    for sizes, share in by_hand.items():
        expect(round(answer(*sizes), 9), round(share, 9), f"state_share{sizes}")
    sizes = {group: default_split_size(group) for group in (1, 4, 8, 16)}
    worst = max(answer(size, group, 128) for group, size in sizes.items())
    return (
        f"the library's splits by group, {sizes}, cost at most {100 * worst:.2f} %"
    )


def share_prefix(table, pages):
    """The table, with the first `pages` pages of sequence 0 for sequence 1, too."""
    shared = table.clone()
    shared[1, :pages] = shared[0, :pages]
    return shared


@exercises.check(2, share_prefix)
def check_share_prefix(answer, decode):
    """Compares the bits of `decode` with and without `answer(table, pages)`."""
    generator = torch.Generator().manual_seed(0)
    first, tail = (
        [torch.randn(n, 2, 64, generator=generator) for _ in "kv"]
        for n in (700, 60)
    )
    second = [torch.cat([x[:640], new]) for x, new in zip(first, tail)]
    pools = [
        in_pages([x.bfloat16(), y.bfloat16()], 16) for x, y in zip(first, second)
    ]
    (k, table), (v, _) = pools
    q = torch.randn(2, 8, 64, generator=generator).to(DEVICE, torch.bfloat16)
    used = torch.tensor([700, 700], dtype=torch.int32, device=DEVICE)
    own = decode(q, k, v, table, used, 128)
    shared = answer(table.clone(), 40)
    saved = table.unique().numel() - shared.unique().numel()
    expect(saved, 40, "pages saved")
    for sequence in (0, 1):
        same = torch.equal(
            decode(q, k, v, shared, used, 128)[sequence], own[sequence]
        )
        expect(same, True, f"sequence {sequence} has the bits of its own pages")
    return (
        f"{saved} of {table.unique().numel()} pages are saved, and no bit changes"
    )
