"""Attention beside a cache on Hopper: FlashDecoding in one launch."""
