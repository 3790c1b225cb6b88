"""The table of stacks and features in docs/serving-engines.md, from what the tests of this folder
noted when they ran: `python tests/engines/table.py` writes it.
"""

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "serving-engines.md"
START, END = "<!-- the table of tests/engines -->", "<!-- its end -->"


def read():
    """What each stack's tests noted; vLLM's first."""
    paths = sorted(RESULTS.glob("*.json"), reverse=True)
    return [json.loads(path.read_text("utf-8")) for path in paths]


def write(name, stack, notes):
    """Keeps the notes of a stack's tests, by feature."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(dict(stack=stack, notes=notes), indent=1)
    (RESULTS / f"{name}.json").write_text(f"{text}\n", "utf-8")


def render(results):
    """Features in the order in which the first stack has them."""
    features = dict.fromkeys(feature for x in results for feature in x["notes"])
    heads = ["", *(x["stack"] for x in results)]
    rows = [heads, ["---"] * len(heads)]
    rows += [[feature, *(x["notes"].get(feature, "–") for x in results)] for feature in features]
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def filled(page, results):
    """The page with this table."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{render(results)}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8"), read()), "utf-8")
