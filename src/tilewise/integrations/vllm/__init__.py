"""tilewise as an attention backend of vLLM, which `tilewise_plugins.vllm` registers: what it
supports is in `backend`, a step's tensors are in `metadata`, and the calls of a layer in `impl`.
"""
