"""What an engine computed beside what transformers computed."""

CLEAR = 1e-3  # a gap between the two largest logits that no rounding of fp32 turns
CLOSE = 1e-4  # of log-probabilities in fp32


def tokens(found, expected):
    """(the smallest gap, the largest difference of log-probabilities) of greedy tokens, which may
    differ only from where the gap is not clear.
    """
    gaps, worst = [], 0.0
    assert len(found) == len(expected) > 0
    for (ours, scores), (theirs, expected_scores, between) in zip(found, expected):
        assert len(ours) == len(theirs) > 0
        for i, gap in enumerate(between):
            gaps.append(gap)
            if ours[i] != theirs[i]:
                assert gap <= CLEAR, f"token {i} is {ours[i]}, not {theirs[i]}, and the gap {gap}"
                break
            worst = max(worst, abs(scores[i] - expected_scores[i]))
    assert worst <= CLOSE, f"log-probabilities differ by {worst}"
    return min(gaps), worst


def largest(found, expected):
    """The largest difference of two nested lists of numbers, of one form."""
    if isinstance(found, list):
        assert len(found) == len(expected) > 0
        return max(map(largest, found, expected))
    return abs(found - expected)
