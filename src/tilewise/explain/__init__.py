"""What would happen to a call, and why: its backend, launches and roofline; no GPU."""
