"""`python -m tilewise`: the `tilewise` command."""

import runpy

if __name__ == "__main__":
    runpy.run_module("tilewise.cli", run_name="__main__", alter_sys=True)
