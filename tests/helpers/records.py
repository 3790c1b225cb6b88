"""The records that tile functions take, with everything off unless asked."""

from tilewise.kernels.common.arguments import numbers_of
from tilewise.problem import Scalars
from tilewise.tile.types import Features, Lengths, Optionals, Sequence, Tile

NOTHING = Optionals(None, 0, None, None, None, None, None)


def features(**on):
    """Features of a plain call but for those named."""
    flags = dict.fromkeys(Features._fields, False)
    given = dict(HEADDIM=16, HEADDIM_V=16, GROUP=1, PRECISION="ieee", MASK_M=0, MASK_N=0)
    given |= dict(MASK_MOD=None, SCORE_MOD=None, SCORE_DERIVATIVE=None)
    given["NATURAL"] = bool(on.get("BIAS") or on.get("SCORE_MOD"))
    return Features(**(flags | given | on))


def tile_of(block_m, block_n):
    return Tile(block_m, block_n, 16, 16, False)


def sequence(seqlen_q, seqlen_k, diagonal=None, left=-1, right=-1, slope=0.0, **scores):
    """One head of one sequence; numbers as a launch of this size passes them."""
    diagonal = seqlen_k - seqlen_q if diagonal is None else diagonal
    scalars = Scalars(scores.get("scale", 1.0), scores.get("softcap", 0.0), left, right)
    numbers = numbers_of(scalars, seqlen_q, seqlen_k)
    return Sequence(Lengths(seqlen_q, seqlen_k, diagonal), slope, numbers)
