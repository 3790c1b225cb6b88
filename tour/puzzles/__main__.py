"""`python tour/puzzles`: which puzzles are done, and what is wrong in others."""

from checks import progress

if __name__ == "__main__":
    print(progress.line("", progress.of_puzzles()))
