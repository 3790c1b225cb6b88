"""The forward for Hopper."""
