"""What a cell may come to."""

EQUAL = "equal"  # to eager
REFUSED = "refused"  # in a sentence of tilewise's
OWN = "own attention"  # the name is ignored
NONE = "no attention"
THEIRS = "eager fails"
WRONG = "wrong"
BARE = "bare error"
SERVED = (EQUAL, REFUSED, OWN, NONE, THEIRS)
NEVER = (WRONG, BARE)
