"""Which rank has which tokens, from lengths alone."""
