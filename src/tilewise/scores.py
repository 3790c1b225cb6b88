"""Score functions: functions of a score and its positions, applied before the softmax.

Example::

    capped = score(lambda score, b, h, q_idx, kv_idx: 30 * torch.tanh(score / 30))

A score function takes (score, b, h, q_idx, kv_idx) and gives another score: FlexAttention's
score_mod (Dong et al. 2024, arXiv 2412.05496). `score` is the scaled product of query and key. The
backward multiplies by the derivative, which is found from the tree unless it is given.
"""

from .mods.scores import ScoreFunction, ScoreMod, alibi, relative_bias, score, softcapped

__all__ = ["ScoreFunction", "ScoreMod", "alibi", "relative_bias", "score", "softcapped"]
