"""A seeded fuzzer: features x shapes x backends, forward and backward, against an fp64 attention
that shares no code with the library.

    PYTHONPATH=src python -m tests.fuzz --cases 2000                     # this machine's CPU
    PYTHONPATH=src python -m tests.fuzz --cases 150 --backend hopper     # emulated, without a GPU
    PYTHONPATH=src python -m tests.fuzz --seed 1234 --backend portable --device cuda

`reference.py` is the oracle, `cases.py` says what is drawn and how often, `budget.py` what is
allowed.
"""
