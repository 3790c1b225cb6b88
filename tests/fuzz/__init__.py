"""A seeded fuzzer: features x shapes x backends, forward and backward, against an fp64 attention
that shares no code with the library.

    PYTHONPATH=src python -m tests.fuzz --cases 2000                     # this machine's CPU
    PYTHONPATH=src python -m tests.fuzz --cases 150 --backend hopper     # emulated, without a GPU
    PYTHONPATH=src python -m tests.fuzz --seed 1234 --backend portable --device cuda
    PYTHONPATH=src python -m tests.fuzz --cache --cases 100 --backend hopper
    PYTHONPATH=src python -m tests.fuzz --fp8 --cases 100 --backend hopper

`reference.py` is the oracle, `cases.py` says what is drawn and how often, `budget.py` what is
allowed. Calls with a KV cache (`cached_cases.py`) are held to the contract of docs/design/cache.md,
too; those with FP8 products (`fp8_cases.py`) have inputs that 8 bits represent exactly.
"""
