"""The answer to the exercise of lesson 02b, and its check."""

import triton

from . import Exercises, expect

exercises = Exercises("02b")


def efficiency(n, block_m, block_n, sms):
    """The share of SM time that is used: tiles over the places in all waves."""
    tiles = triton.cdiv(n, block_m) * triton.cdiv(n, block_n)
    return tiles / (triton.cdiv(tiles, sms) * sms)


@exercises.check(1, efficiency)
def check_efficiency(answer):
    """Compares `answer(n, block_m, block_n, sms)` with waves counted by hand.

    A side of 2048 in tiles of 128 x 128 takes two waves: no better than 128 x 256
    in one, and it reads more. Sides of 2304 and 5120 suit 132 SMs less.
    """
    by_hand = {
        (4096, 128, 256, 132): 512 / 528,  # four waves, the last nearly full
        (2048, 128, 256, 132): 128 / 132,
        (2048, 128, 128, 132): 256 / 264,
        (1024, 128, 256, 132): 32 / 132,
        (1000, 128, 256, 132): 32 / 132,  # tiles at the edge count, too
        (2304, 128, 256, 132): 162 / 264,
    }
    for sizes, share in by_hand.items():
        expect(round(answer(*sizes), 6), round(share, 6), f"efficiency{sizes}")
    return "side 4096 uses 97 % of 132 SMs, side 1024 uses 24 %"
