"""The backward for Hopper."""
