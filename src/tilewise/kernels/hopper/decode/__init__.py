"""Attention with a KV cache on Hopper: FlashDecoding in one launch."""
