"""The answer to the exercise of lesson 04b, and its check."""

from . import Exercises, expect

exercises = Exercises("04b")


def traffic(seqlen, headdim, b_c=256, b_r=128):
    """Bytes into and out of the SMs for one head in bf16, forward, no mask."""
    tensor = 2 * seqlen * headdim  # bytes of Q, K, V or O
    return {
        "standard": 4 * tensor + 4 * 2 * seqlen**2,
        "FA1": 2 * tensor + 3 * tensor * (seqlen // b_c),
        "FA2": 2 * tensor + 2 * tensor * (seqlen // b_r),
    }


@exercises.check(1, traffic)
def check_traffic(answer):
    """Compares with counts made by hand, in tensors and matrices of scores."""
    for seqlen, headdim, b_c, b_r in ((4096, 64, 256, 128), (1024, 128, 128, 64)):
        tensor, matrix = 2 * seqlen * headdim, 2 * seqlen**2
        found = answer(seqlen, headdim, b_c, b_r)
        by_hand = {
            # q, k, v, out; S and P written and read
            "standard": 4 * tensor + 4 * matrix,
            "FA1": (2 + 3 * (seqlen // b_c)) * tensor,
            "FA2": (2 + 2 * (seqlen // b_r)) * tensor,
        }
        for name, size in by_hand.items():
            expect(found[name], size, f"{name}, seqlen {seqlen}, headdim {headdim}")
    sizes = ", ".join(
        f"{x} {size / 1e6:.0f} MB" for x, size in answer(4096, 64, 256, 128).items()
    )
    return f"N = 4096, d = 64: {sizes}"
