"""Programs that use tilewise, run from a clone."""
