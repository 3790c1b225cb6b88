"""The backends: portable (Triton, any GPU), cpu (plain torch)."""
