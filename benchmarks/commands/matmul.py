"""`python -m benchmarks matmul`: the tour's matrix product beside cuBLAS."""

from __future__ import annotations

import click

from tilewise.cli.bench.options import conclude, run_options, show_with, sustained_option
from tilewise.cli.options import IntList, NameList


@click.command()
@click.option(
    "--sizes",
    type=IntList(),
    help="Squares, M = N = K.  [default: 4k,8k; on a CPU 256]",
)
@click.option(
    "--shape",
    "shapes",
    type=IntList(),
    multiple=True,
    help="M,N,K of one product instead of --sizes; may be repeated.",
)
@click.option(
    "--dtype",
    "kinds",
    type=NameList(),
    default="bf16",
    show_default=True,
    help="Of bf16, fp16, fp8 (e4m3), tf32, fp32.",
)
@click.option(
    "--configs",
    type=NameList(),
    help="Of our kernel, by name, or all; without it the one that serves the dtype.",
)
@sustained_option
@run_options
def matmul(sizes, shapes, kinds, configs, device, as_json, **options) -> None:
    """Time our matrix product beside torch's, which on a GPU is cuBLAS.

    C = A B with normal A and B, A by row; B by row for bf16, fp16 and fp32, by column for fp8 and
    tf32, which tensor cores read along K alone. Sums are in fp32, C has the inputs' dtype, that of
    fp8 bf16. cuBLAS multiplies fp8 with unit scales and fast sums. FLOPs are 2 M N K. Each result
    is held to fp64 before it is timed: its largest error may be twice that of torch's product (for
    tf32, of one whose inputs are cut off).

    The kernel is the last of tour/02_matmul.py and lives in benchmarks/matmul.py; on a CPU it is
    interpreted, a test of the kernel and not of its speed.
    """
    from tilewise.bench.standings import standings, summary

    from ..products import Product, run_products

    triples = triples_of(sizes, shapes, device)
    asked = [Product(*triple, kind) for kind in known_kinds(kinds) for triple in triples]
    named = known_configs(configs)
    outcomes = run_products(asked, named, device=device, show=show_with(as_json), **options)
    ours = {x.provider for x in outcomes if x.provider.startswith("tilewise")}
    conclude(outcomes, [*standings(outcomes), summary(outcomes)], as_json, ours)


def triples_of(sizes, shapes, device: str) -> list[tuple[int, int, int]]:
    """M, N and K of each product."""
    if sizes and shapes:
        raise click.UsageError("--sizes and --shape exclude each other")
    if wrong := [shape for shape in shapes if len(shape) != 3]:
        raise click.UsageError(f"--shape {','.join(map(str, wrong[0]))}: M,N,K are three numbers")
    default = (4096, 8192) if device.startswith("cuda") else (256,)
    return list(shapes) or [(size, size, size) for size in sizes or default]


def known_kinds(names: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds, if there are such."""
    from ..products import KINDS

    if unknown := [name for name in names if name not in KINDS]:
        raise click.UsageError(f"--dtype {unknown[0]!r} is none of {', '.join(KINDS)}")
    return names


def known_configs(names: tuple[str, ...] | None) -> tuple[str | None, ...]:
    """The configurations, if there are such; `all` is every one, in turns with the chosen one."""
    from ..matmul import CONFIGS

    if not names:
        return (None,)
    if names == ("all",):
        return (None, *CONFIGS)
    if unknown := [name for name in names if name not in CONFIGS]:
        raise click.UsageError(f"--configs {unknown[0]!r} is none of {', '.join(CONFIGS)}, all")
    return names
