"""`python -m examples.demo`: a real model computes with tilewise; its Q, K and V grow long."""
