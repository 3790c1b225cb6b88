"""The backends: hopper (Gluon, sm_90), portable (Triton, any GPU), cpu (plain torch)."""
