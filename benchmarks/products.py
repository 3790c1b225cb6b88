"""The products that `python -m benchmarks matmul` times: our matmul beside torch's, each first held
to fp64 at the very shape.

torch's own product in the same precision says what may be lost: the largest error may be twice its
(`testing/tolerance.py`). What tf32 may lose is what cutting its inputs off loses: libraries differ
in whether they round them first. Ours of 16-bit inputs is held to the mean as well; elsewhere the
mean depends on the order of the sum, which is each library's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import click
import torch

from tilewise.cli.options import IntList, NameList
from tilewise.testing import tolerance

from .bench.check import Verdict
from .bench.run import Outcome, Ready, Run, reason_of, time_ready
from .bench.standings import standings, summary
from .bench.sustained import plan_for
from .bench.table import table_of
from .options import (
    check_span,
    conclude,
    run_options,
    show_with,
    sustained_options,
)

Tensor = torch.Tensor
Multiply = Callable[[Tensor, Tensor], Tensor]
SUITE = "matmul"


class Kind(NamedTuple):
    """What is multiplied how."""

    dtype: torch.dtype
    precision: str  # of float32 inputs: tf32 or ieee
    by_column: bool  # how B lies: tensor cores read 8 and 32 bits along K alone


KINDS = {
    "bf16": Kind(torch.bfloat16, "tf32", False),
    "fp16": Kind(torch.float16, "tf32", False),
    "fp8": Kind(torch.float8_e4m3fn, "tf32", True),
    "tf32": Kind(torch.float32, "tf32", True),
    "fp32": Kind(torch.float32, "ieee", False),
}


class Product(NamedTuple):
    """C (m, n) = A (m, k) B (k, n) of a kind."""

    m: int
    n: int
    k: int
    kind: str
    direction: str = SUITE  # by which standings are grouped

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each of the m n k terms."""
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.kind} {self.m} x {self.n} x {self.k}"


def operands(product: Product, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Normal inputs, rounded to the kind's dtype."""
    kind = KINDS[product.kind]
    generator = torch.Generator(device=device).manual_seed(seed)
    a = torch.randn(product.m, product.k, device=device, generator=generator).to(kind.dtype)
    b = torch.randn(product.n, product.k, device=device, generator=generator).to(kind.dtype).T
    return a, b if kind.by_column else b.contiguous()


def peer_name(device: str) -> str:
    """Whose library torch asks."""
    return "cublas" if device.startswith("cuda") else "torch"


def torch_product(kind: Kind) -> Multiply:
    """The product as torch has it. fp8 sums as ours do: fast, in the tensor cores alone."""
    if kind.dtype.itemsize == 1:
        return _scaled_product
    name = "high" if kind.precision == "tf32" else "highest"

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        with float32_precision(name):
            return a @ b

    return multiply


def _scaled_product(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_cuda:
        return (a.float() @ b.float()).bfloat16()
    one = torch.ones((), device=a.device)
    multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]  # it has no other name
    return multiply(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def plain_product(name: str, a: Tensor, b: Tensor) -> Tensor:
    """The product whose errors a kind is allowed."""
    if name != "tf32":
        return torch_product(KINDS[name])(a, b)
    cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for x in (a, b)]
    return (cut[0] @ cut[1]).float()


@contextlib.contextmanager
def float32_precision(name: str) -> Iterator[None]:
    """torch's setting of what a product of float32 matrices may lose, as it was afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def our_product(kind: Kind, config: str | None) -> Multiply:
    """Our kernel, in a configuration or the one that is chosen."""
    from .matmul import matmul

    return lambda a, b: matmul(a, b, config, kind.precision)


def judge(result: Tensor, exact: Tensor, plain: Tensor, with_mean: bool) -> Verdict:
    """A product beside fp64 and torch's own."""
    held = tolerance.judge(result, exact, plain)
    passes = held.ok if with_mean else held.max_error <= held.max_bound
    return Verdict(f"C: {held}", held.max_error, held.max_bound, passes)


def run_products(
    products: Iterable[Product],
    configs: tuple[str | None, ...] = (None,),
    *,
    device: str = "cpu",
    rounds: int = 5,
    round_ms: float = 30.0,
    save: str | Path | None = None,
    show: Callable[[str], None] = print,
    sustained: bool = False,
    span_ms: float | None = None,
) -> list[Outcome[Product]]:
    """Times our product in each configuration (None: the chosen one) and torch's in interleaved
    rounds, `sustained` also under load, in spans of at least `span_ms`.

    Rows are appended to `save` as each product ends.
    """
    run = Run(SUITE, device, save, show)
    plan = plan_for(device, rounds, span_ms=span_ms) if sustained else None
    run.begin(rounds)
    outcomes = []
    for product in products:
        kind = KINDS[product.kind]
        calls = {provider_name(config): our_product(kind, config) for config in configs}
        calls[peer_name(device)] = torch_product(kind)
        entries = {name: (product, Named(name)) for name in calls}
        tried = dict(checked(product, calls, device))
        done = time_ready(entries, tried, run.common, device, rounds, round_ms, plan=plan)
        named = {outcome.provider: outcome for outcome in done}
        run.keep(done, table_of(str(product), named, f"time / {done[0].provider}"))
        outcomes += done
    return outcomes


class Named(NamedTuple):
    """A provider of products."""

    name: str


def checked(
    product: Product, named: dict[str, Multiply], device: str
) -> Iterator[tuple[str, Ready | Outcome[Product]]]:
    """Each by its name: ready, or why it is not timed."""
    a, b = operands(product, device)
    exact = a.double() @ b.double()
    plain = plain_product(product.kind, a, b)
    for name, multiply in named.items():
        try:
            with_mean = name.startswith("tilewise") and a.itemsize == 2
            verdict = judge(multiply(a, b), exact, plain, with_mean)
        except Exception as error:  # whatever it raises is its reason
            yield name, Outcome(product, name, None, refused=reason_of(error))
            continue
        if verdict.passes:
            yield name, Ready(lambda multiply=multiply: multiply(a, b), verdict)
        else:
            yield name, Outcome(product, name, None, wrong=verdict.what)


def provider_name(config: str | None) -> str:
    """How rows call our kernel in a configuration."""
    return "tilewise" if config is None else f"tilewise:{config}"


def config_names() -> list[str]:
    """Of our kernel, and the word for all of them."""
    from .matmul import CONFIGS

    return [*CONFIGS, "all"]


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
    type=NameList(lambda: KINDS),
    default="bf16",
    show_default=True,
    help="Of bf16, fp16, fp8 (e4m3), tf32, fp32.",
)
@click.option(
    "--configs",
    type=NameList(config_names),
    help="Of our kernel, by name, or all; without it the one that serves the dtype.",
)
@sustained_options
@run_options
def matmul(sizes, shapes, kinds, configs, device, as_json, **options) -> None:
    """Time our matrix product beside torch's, which on a GPU is cuBLAS.

    C = A B with normal A and B, A by row; B by row for bf16, fp16 and fp32, by column for fp8 and
    tf32, which tensor cores read along K alone. Sums are in fp32, C has the inputs' dtype, that of
    fp8 bf16. cuBLAS multiplies fp8 with unit scales and fast sums. FLOPs are 2 M N K. Each result
    is held to fp64 before it is timed: its largest error may be twice that of torch's product (for
    tf32, of one whose inputs are cut off).

    The kernel is the last of tour/02b_tile_order.py and lives in benchmarks/matmul.py; on a CPU it
    is interpreted, a test of the kernel and not of its speed.
    """
    from .matmul import CONFIGS

    check_span(options["span_ms"], options["sustained"])
    triples = triples_of(sizes, shapes, device)
    asked = [Product(*triple, kind) for kind in kinds for triple in triples]
    named = (None, *CONFIGS) if configs == ("all",) else configs or (None,)
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
