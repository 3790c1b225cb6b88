"""What a user reads in English is short sentences in the field's words, as far as that is counted.

Limits only fall: lower one with the pages that you improve, and raise none.
"""

from pathlib import Path

import pytest
from helpers.prose import Counts, count, is_crowded, paragraphs, sentences

import tilewise

ROOT = Path(tilewise.__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures.md"
DESIGN = sorted((DOCS / "design").rglob("*.md"))
SEEN = [*DOCS.glob("*.md"), *DOCS.glob("api/*.md"), *DOCS.glob("see/*.md"), *DOCS.glob("tour/*.md")]
MADE = DOCS / "tour" / "puzzles.md"  # by a build of the site
PAGES = sorted({*SEEN, ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"} - {FIGURES, MADE})

LIMITS = [
    ("README", [ROOT / "README.md"], Counts(of=1.9, openings=0, crowded=0, stale=0)),
    ("figures", [FIGURES], Counts(of=1.6, openings=0, crowded=0, stale=1)),
    ("pages", PAGES, Counts(of=1.2, openings=0.2, crowded=0, stale=0)),
    ("design", DESIGN, Counts(of=2.2, openings=0.7, crowded=221, stale=0)),
]


@pytest.mark.parametrize(("name", "pages", "limit"), LIMITS, ids=[name for name, *_ in LIMITS])
def test_prose_gets_no_heavier(name, pages, limit):
    counts = count(pages)
    above = {
        what: f"{value:.2f}, at most {most}"
        for what, value, most in zip(Counts._fields, counts, limit, strict=True)
        if value > most
    }
    assert not above, f"{name}: {above}"


PAGE = """---
title: of
---
# A heading of no interest

The width of a tile, of
`BLOCK_M` of [this page](of/of.md). Where is it?

| of | of |
|---|---|

- Of items
  of lists: 1, 2 and 3

  | of |
1. FA3 and `x[0:8, 9]` at 2.5 and 16-bit serves 1e-3 and `serves`

```python
of = "of"
```

    of indented code
"""


def test_code_tables_and_headings_are_no_prose(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE, "utf-8")
    assert len(list(paragraphs(PAGE))) == 3
    read = list(sentences(page))
    assert read[:2] == ["The width of a tile, of `BLOCK_M` of this page.", "Where is it?"]
    assert [is_crowded(sentence) for sentence in read] == [False, False, True, False]
    counts = count([page])
    assert counts[1:] == (50, 1, 1)
    assert counts.of == 100 * 5 / 29
