"""Triton's interpreter, with every address checked."""
