"""Code that the backends share."""
