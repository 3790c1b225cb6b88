"""`python -m examples.generate`: a Llama served from a paged cache, with continuous batching."""
