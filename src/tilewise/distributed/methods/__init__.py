"""The ways to compute a rank's rows: stream, heads and ring, and what they share."""
