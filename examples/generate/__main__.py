"""The command."""

import sys

from tilewise.errors import missing

if reason := missing("generate", ["click", "rich"]):
    sys.exit(reason)

from .command import generate as main

if __name__ == "__main__":
    main(prog_name="python -m examples.generate")
