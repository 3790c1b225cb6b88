"""The report on the committed rows, at report/index.html of the site."""

from pathlib import Path

from benchmarks.bench.row import load
from benchmarks.report import write


def make(app, config):
    """Writes it where Sphinx takes files from that are no pages of its own."""
    results = Path(app.srcdir).parent / "benchmarks" / "results"
    rows = [row for file in sorted(results.glob("*.jsonl")) for row in load(file)]
    extra = Path(app.outdir).parent / "extra"
    write(rows, extra / "report")
    config.html_extra_path = [str(extra)]


def setup(app):
    """Called by Sphinx."""
    app.connect("config-inited", make)
    return {"parallel_read_safe": True}
