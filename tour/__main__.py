"""`python tour`: which exercises are done; `python tour 03`: what is wrong."""

import sys

from lesson import progress

if __name__ == "__main__":
    progress.show(*sys.argv[1:2])
