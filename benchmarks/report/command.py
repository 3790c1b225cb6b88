"""`python -m benchmarks report`: result rows as one HTML page and as Markdown."""

from __future__ import annotations

from pathlib import Path

import click

from ..bench.row import load
from . import write
from .pages import pages

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@click.command()
@click.argument("rows", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("report"),
    show_default=True,
    help="The folder that index.html, report.md and figures.md go into.",
)
def report(rows: tuple[Path, ...], out: Path) -> None:
    """One self-contained page of the rows in ROWS: JSONL files, or folders of them.

    Without ROWS it is those of benchmarks/results. The page needs no network and no script;
    report.md beside it has the same words and tables, and figures.md is the docs' page of figures
    with these rows. The newest of a shape counts, and a ratio is taken within one run. No GPU is
    needed.
    """
    files = files_of(rows or (RESULTS,))
    found = []
    for file in files:
        try:
            found += load(file)
        except (ValueError, UnicodeDecodeError) as error:
            raise click.UsageError(f"{file} holds no rows: {error}") from error
    if not found:
        raise click.UsageError(f"no row in {', '.join(map(str, files))}")
    page, *beside = write(found, out)
    names = ", ".join(path.name for path in beside)
    click.echo(f"{len(found):,} rows of {len(files)} files: {page}, and {names} beside it")


@click.command()
def figures() -> None:
    """Write the figures of README and the docs, and their pictures, from benchmarks/results.

    docs/features.md gets the table of what each backend supports.
    """
    from . import features  # needs Triton

    for path, text in (pages(ROOT) | features.pages(ROOT)).items():
        path.write_text(text, "utf-8")
        click.echo(path)


def files_of(paths: tuple[Path, ...]) -> list[Path]:
    """The files, with folders replaced by the JSONL files that lie in them."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise click.UsageError(
            f"name files of rows, as `python -m benchmarks bench --save rows.jsonl` writes them:"
            f" there is none in {paths[0]}"
        )
    return list(dict.fromkeys(files))
