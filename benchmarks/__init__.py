"""Experiments on tilewise, and the tables and figures that their rows give; run from a clone."""
