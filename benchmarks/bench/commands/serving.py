"""`python -m benchmarks bench serving`: a server's steps, beside the backends of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tilewise.cli.options import DTYPES, IntList, Known, NameList, OneInt

from ...options import HeadList, conclude, row_options, show_with, sizes_on

if TYPE_CHECKING:
    from ..servers import ServerKind
    from ..serving_steps import Serving

PARTS = ("attention", "model")
GPU = dict(
    requests=20,
    prompts=(256, 8192),
    answers=(64, 128),
    chunk=512,
    layers=32,
    heads=((32, 8, 128),),
    intermediate=14336,
    dtype="bf16",
)
CPU = dict(
    requests=4,
    prompts=(8, 64),
    answers=(4, 8),
    chunk=32,
    layers=2,
    heads=((4, 2, 32),),
    intermediate=256,
    dtype="fp32",
)


def _server(name: str) -> ServerKind:
    from ..servers import server

    return server(name)


@click.command()
@click.option(
    "--part",
    "parts",
    type=NameList(lambda: PARTS, may_be_empty=False),
    default="attention,model",
    show_default=True,
    help="What steps compute: appends and attention alone, or all of a layer.",
)
@click.option("--pages", type=IntList(), default="16,64", show_default=True, help="Keys per page.")
@click.option("--requests", type=OneInt(), help="[default: 20; on a CPU 4]")
@click.option("--prompts", type=IntList(), help="Shortest and longest.  [default: 256,8k]")
@click.option("--answers", type=IntList(), help="Fewest and most tokens.  [default: 64,128]")
@click.option("--every", type=OneInt(), default="2", show_default=True, help="Steps per arrival.")
@click.option("--chunk", type=OneInt(), help="Tokens that a step computes at most.  [default: 512]")
@click.option("--layers", type=OneInt(), help="[default: 32]")
@click.option("--heads", type=HeadList(), help="[default: 32:8x128]")
@click.option("--intermediate", type=OneInt(), help="Width of the MLP.  [default: 14336]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="[default: bf16; on a CPU fp32]")
@click.option(
    "--against",
    type=NameList(each=Known(_server)),
    default="fa3,vllm-triton",
    show_default=True,
    help="Peers.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@row_options
def serving(device, parts, pages, every, against, rounds, save, as_json, **asked) -> None:
    """Time the steps of a server: requests arrive, prompts come in chunks, decodes share steps.

    All providers run one schedule on one paged cache, one after the other at each step, in balanced
    orders. A step's time is what an engine waits for: its tensors are copied, its layers computed,
    the device waited for. On a GPU, steps of decodes replay CUDA graphs; others are launched.
    tokens/s counts prompts and answers. Each result is checked against fp64 first, wherever the
    shape of a step is new. That compiles the kernels, a minute or more where none is kept.

    fa3 is FlashAttention-3's forward after our append; vllm-triton is what vLLM's Triton backend
    calls, found in an installed vllm.
    """
    from ..serving import run_serving, summary

    sizes = sizes_on(device, GPU, CPU, asked)
    cases = [case_of(sizes, part, page_size, every) for part in parts for page_size in pages]
    kinds = [_server(name) for name in dict.fromkeys(("tilewise", *against))]
    shown = show_with(as_json)
    done = run_serving(cases, kinds, device=device, rounds=rounds, save=save, show=shown)
    conclude(done, summary(done), as_json, ["tilewise"])


def case_of(sizes: dict, part: str, page_size: int, every: int) -> Serving:
    """The load of these options; two lengths are the ends of a range."""
    from ..serving_steps import Serving

    for name in ("prompts", "answers"):
        if len(sizes[name]) != 2 or sizes[name][0] > sizes[name][1]:
            raise click.UsageError(f"--{name} takes two numbers, the least and the most")
    if len(sizes["heads"]) != 1:
        raise click.UsageError("--heads takes one shape of heads here")
    nheads, nheads_k, headdim = sizes["heads"][0]
    return Serving(
        part=part,
        requests=sizes["requests"],
        prompts=tuple(sizes["prompts"]),
        answers=tuple(sizes["answers"]),
        every=every,
        chunk=sizes["chunk"],
        page_size=page_size,
        layers=sizes["layers"],
        nheads=nheads,
        nheads_k=nheads_k,
        headdim=headdim,
        intermediate=sizes["intermediate"],
        dtype=DTYPES[sizes["dtype"]],
    )
