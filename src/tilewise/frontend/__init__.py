"""What users call, until it is a `Problem`."""
