"""`python -m examples.generate`: a Llama served from a paged cache, with continuous batching.

Requests come, share steps, are preempted where pages run out, and end. Each one's tokens must be
those that transformers generates for it alone, eager and greedy.

`pages` allocates, `scheduler` decides which tokens a step computes, `batch` makes tensors of
it, `model` is one forward over the cache, `graph` the same as a CUDA graph, `serve` the loop;
`expected` is transformers' side.
"""

from __future__ import annotations

import json

import click

from tilewise.cli.machine import describe_machine
from tilewise.cli.options import Exit, OneInt, device_option, json_option
from tilewise.cli.tables import console, digits, error, mark, table
from tilewise.errors import missing


@click.command(short_help="Serve a small Llama from a paged cache, with continuous batching.")
@click.option("--requests", "count", type=OneInt(), default=16, show_default=True)
@click.option("--pages", type=OneInt(), help="In the pool.  [default: too few for all requests]")
@click.option("--page-size", type=OneInt(), default=16, show_default=True)
@click.option("--split-size", type=OneInt(), default=256, show_default=True)
@click.option("--max-tokens", type=OneInt(), default=256, show_default=True, help="Per step.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.option(
    "--graphs/--no-graphs",
    default=None,
    help="Pad steps and replay CUDA graphs.  [default: on a GPU]",
)
@device_option
@json_option
def generate(
    count: int,
    pages: int | None,
    page_size: int,
    split_size: int,
    max_tokens: int,
    seed: int,
    graphs: bool | None,
    device: str,
    as_json: bool,
) -> None:
    """Serve requests from a paged cache; each gets the same tokens as when it runs alone.

    The model is a small fp32 Llama with random weights. Prompts are longer than two splits
    (--split-size).
    """
    screen = console(as_json)
    explain_what_is_missing()
    check_lengths(split_size)
    from . import workload

    screen.print(describe_machine(device), style="dim")
    model = workload.llama(seed, device)
    requests = workload.draw_requests(count, seed, split_size, model.config.vocab_size)
    pages = pages or few_pages(requests, page_size)
    check_pool(requests, pages, page_size)
    settings = dict(pages=pages, page_size=page_size, split_size=split_size, max_tokens=max_tokens)
    settings["graphs"] = device.startswith("cuda") if graphs is None else graphs
    results = run(screen, model, requests, settings, device)
    results["device"] = describe_machine(device)
    if as_json:
        click.echo(json.dumps(results, indent=1))
    show(screen, results)
    if not results["ok"]:
        raise SystemExit(Exit.FAILED)


def explain_what_is_missing() -> None:
    """Exit code 2, with what to install."""
    if reason := missing("generate", ["transformers"]):
        raise click.UsageError(reason)


def check_lengths(split_size: int) -> None:
    """Exit code 2 where prompts of four pieces and their tokens leave the model's context."""
    from .workload import CONTEXT

    most = (CONTEXT - 64) // 4
    if split_size > most:
        raise click.BadParameter(
            f"{split_size} is more than {most}, a quarter of what the model's context has room for",
            param_hint="--split-size",
        )


def check_pool(requests: list, pages: int, page_size: int) -> None:
    """Exit code 2 where a request has no room, even alone."""
    longest = max(request.longest for request in requests)
    if longest > pages * page_size:
        raise click.BadParameter(
            f"the longest request has {longest} keys, and {pages} pages of {page_size} have room "
            f"for {pages * page_size}",
            param_hint="--pages",
        )


def few_pages(requests: list, page_size: int) -> int:
    """Enough for the longest request and two fifths of all: some have to wait, or give way."""
    needed = [-(-request.longest // page_size) for request in requests]
    return max(*needed, 2 * sum(needed) // 5)


def run(screen, model, requests: list, settings: dict, device: str) -> dict:
    """Serves, asks transformers, compares."""
    from . import expected, serve
    from .graph import PaddedSteps
    from .model import PagedLlama
    from .pages import Pages
    from .scheduler import Scheduler

    pages = Pages(settings["pages"], settings["page_size"])
    paged = PagedLlama(model, pages.count, pages.page_size, settings["split_size"])
    scheduler = Scheduler(pages, settings["max_tokens"])
    steps = paged
    if settings.get("graphs"):
        steps = PaddedSteps(paged, settings["max_tokens"], len(requests), device)
    with screen.status("first calls: a GPU compiles its kernels here"):
        serve.warm_up(steps, scheduler, device)
        expected.warm_up(model)
    with screen.status("serving from pages"):
        served = serve.serve(steps, scheduler, requests, device)
    with screen.status("transformers, each request alone, eager"):
        alone = expected.generate_alone(model, requests)
    with screen.status("transformers, one padded batch, SDPA"):
        padded = expected.padded_seconds(model, requests)
    compared = [expected.compare(*pair) for pair in zip(requests, alone.found, strict=True)]
    tokens = sum(request.new_tokens for request in requests)
    return {
        "settings": settings,
        "requests": [described(*pair) for pair in zip(requests, compared)],
        "served": vars(served),
        "tokens": tokens,
        "tokens_per_second": {
            "tilewise, continuous batching": tokens / served.seconds,
            "transformers, one batch padded on the left, SDPA": tokens / padded,
            "transformers, one request at a time, eager": tokens / alone.seconds,
        },
        "preemptions": sum(request.preemptions for request in requests),
        "smallest_gap": min(one.gap for one in compared),
        "largest_error": max(one.error for one in compared),
        "ok": all(one.is_equal for one in compared),
    }


def described(request, compared) -> dict:
    """A request as a row."""
    return {
        "arrival": request.arrival,
        "prompt": len(request.prompt),
        "new_tokens": request.new_tokens,
        "preemptions": request.preemptions,
        "ended": request.ended,
        **compared._asdict(),
    }


def show(screen, results: dict) -> None:
    """Each request, what serving took, tokens a second, and one sentence."""
    settings, served = results["settings"], results["served"]
    rows = [
        (
            *(i, one["arrival"], one["prompt"], -(-one["prompt"] // settings["split_size"])),
            *(one["new_tokens"], one["preemptions"], one["ended"]),
            *(error(one["gap"]), error(one["error"]), mark(one["is_equal"])),
        )
        for i, one in enumerate(results["requests"])
    ]
    numbers = ["request", "comes", "prompt", "pieces", "new", "preempted", "ends", "gap", "error"]
    screen.print(table([*numbers, "tokens"], rows, numbers))
    screen.print(
        f"{served['steps']} steps, {served['mixed_steps']} of them with decodes beside prefill, up "
        f"to {served['most_requests']} requests in one; {served['computed_tokens']} tokens "
        f"computed; {served['most_pages']} of {settings['pages']} pages of "
        f"{settings['page_size']} in use at most"
    )
    rates = results["tokens_per_second"].items()
    screen.print(
        table(["", "tokens/s"], [(name, digits(rate)) for name, rate in rates], ["tokens/s"])
    )
    screen.print(summary(results))


def summary(results: dict) -> str:
    """One sentence."""
    gap, largest = (error(results[name]) for name in ("smallest_gap", "largest_error"))
    rows = results["requests"]
    if results["ok"]:
        return (
            f"ok: {len(rows)} of {len(rows)} requests have the tokens of transformers' eager "
            f"greedy generation, with {results['preemptions']} preemptions; first and second "
            f"logits are at least {gap} apart, and ours differ by at most {largest}."
        )
    bad = [
        f"request {i} at token {one['differs_at']} (first and second logit {error(one['gap'])} "
        f"apart, ours off by {error(one['error'])})"
        for i, one in enumerate(rows)
        if not one["is_equal"]
    ]
    return f"FAIL: other tokens than transformers' eager greedy ones: {'; '.join(bad)}."
