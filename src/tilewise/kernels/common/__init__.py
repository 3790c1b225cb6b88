"""What the backends share."""
