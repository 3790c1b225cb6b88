"""The products that `python -m benchmarks matmul` times: our matmul beside torch's, each first held
to fp64 at the very shape.

torch's own product in the same precision says what may be lost: the largest error may be twice its
(`testing/tolerance.py`). What tf32 may lose is what cutting its inputs off loses: libraries differ
in whether they round them first. Ours of 16-bit inputs is held to the mean as well; elsewhere the
mean tells in which order a sum was taken, which is everybody's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from tilewise.bench.check import Verdict
from tilewise.bench.row import Row, append, stamp
from tilewise.bench.run import Outcome, timed
from tilewise.bench.sustained import Plan, Times, measure, plan_for
from tilewise.bench.table import table_of
from tilewise.bench.timer import CallFailed, Spread, clock_for
from tilewise.testing import tolerance

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
    direction: str = SUITE  # what standings are told apart by

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each of the m n k terms."""
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.kind} {self.m} x {self.n} x {self.k}"


class Ready(NamedTuple):
    """A product whose result is right, and what is to be timed."""

    call: Callable[[], object]
    verdict: Verdict


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
) -> list[Outcome[Product]]:
    """Times our product in each configuration (None: the chosen one) beside torch's, in turns,
    `sustained` also under load.

    Rows are appended to `save` as each product ends.
    """
    common = stamp(SUITE, device)
    versions = f"torch {common['torch']}, triton {common['triton']}"
    show(f"{common['device']}, {versions}, {rounds} rounds in turns")
    plan = plan_for(device, rounds) if sustained else None
    outcomes = []
    for product in products:
        done = run_product(product, configs, common, device, rounds, round_ms, plan)
        if save is not None:
            append(save, [outcome.row for outcome in done if outcome.row is not None])
        named = {outcome.provider: outcome for outcome in done}
        for line in table_of(str(product), named, f"time / {done[0].provider}"):
            show(line)
        outcomes += done
    return outcomes


def run_product(
    product: Product,
    configs: tuple[str | None, ...],
    common: dict,
    device: str,
    rounds: int,
    round_ms: float,
    plan: Plan | None,
) -> list[Outcome[Product]]:
    """One product by everybody: check, then time."""
    kind = KINDS[product.kind]
    named = {provider_name(config): our_product(kind, config) for config in configs}
    named[peer_name(device)] = torch_product(kind)
    tried = dict(checked(product, named, device))
    calls = {name: one.call for name, one in tried.items() if isinstance(one, Ready)}
    clock, times = clock_for(device), None
    while times is None:  # again without the one that raised
        try:
            times = measure(calls, clock, rounds, round_ms, plan)
        except CallFailed as failed:
            del calls[failed.name]
            tried[failed.name] = refused(product, failed.name, failed.error)
    outcomes = []
    for name, one in tried.items():
        if isinstance(one, Ready):
            row = make_row(product, name, times[name], one.verdict, common)
            one = timed(product, row, times[name], next(iter(times.values())))
        outcomes.append(one)
    return outcomes


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
            yield name, refused(product, name, error)
            continue
        if verdict.passes:
            yield name, Ready(lambda multiply=multiply: multiply(a, b), verdict)
        else:
            yield name, Outcome(product, name, None, wrong=verdict.what)


def provider_name(config: str | None) -> str:
    """How rows call our kernel in a configuration."""
    return "tilewise" if config is None else f"tilewise:{config}"


def refused(product: Product, name: str, error: Exception) -> Outcome[Product]:
    """It cannot run here."""
    first = next(iter(str(error).strip().splitlines()), "")
    return Outcome(product, name, None, refused=f"{type(error).__name__}: {first[:200]}")


def make_row(product: Product, name: str, times: Times, verdict: Verdict, common: dict) -> Row:
    """A product's row."""
    spread = Spread.of(times.flushed)
    return Row(
        **common,
        shape=product._asdict(),
        provider=name,
        median_ms=spread.median,
        p20_ms=spread.p20,
        p80_ms=spread.p80,
        rounds_ms=times.flushed,
        sustained_ms=times.sustained,
        tflops=product.flops / spread.median * 1e-9,
        max_error=verdict.max_error,
        bound=verdict.bound,
    )
