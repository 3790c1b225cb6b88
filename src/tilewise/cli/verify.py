"""`tilewise verify`: every feature held to fp64 on this machine, case by case.

The cases and the bounds are those of the tests (`tilewise.testing`): the error against fp64 must
stay below twice that of plain torch in the same precision. Where torch's own attention can do the
same job on the same input, its error stands beside ours.
"""

from __future__ import annotations

import ast
import json
import re
from typing import NamedTuple

import click

from .machine import describe_machine
from .options import (
    DTYPES,
    FP8,
    SHORT,
    Exit,
    Known,
    NameList,
    backend_option,
    device_option,
    json_option,
)
from .tables import console, error, mark, table

NAMES = SHORT | {name: short for short, name in FP8.items()}
QUICK_TILES = 20  # of a case, with --quick


class Check(NamedTuple):
    """A case's worst tensor: the one nearest to its bound, or beyond it."""

    case: str
    dtype: str
    tensor: str = ""
    max_error: float | None = None
    max_bound: float | None = None
    mean_error: float | None = None
    mean_bound: float | None = None
    sdpa_error: float | None = None  # torch's, on the same input and tensor
    ok: bool = True
    refused: str = ""
    raised: str = ""


@click.command(short_help="Check every feature against fp64 on this machine.")
@click.option("--quick", is_flag=True, help="Small cases in one dtype.")
@click.option("--full", is_flag=True, help="Every case in fp32, bf16 and fp16.")
@device_option
@click.option("--dtype", "dtypes", type=NameList(lambda: DTYPES), help="A list, such as fp32,bf16.")
@backend_option
@click.option(
    "-k",
    "expression",
    type=Known(lambda text: matches(text, "")),
    default="",
    help="Select cases by name: 'gqa or (window and not tall)'.",
)
@json_option
def verify(quick, full, device, dtypes, backend, expression, as_json) -> None:
    """Check every feature, forward and backward, against fp64 on this machine."""
    if quick and full:
        raise click.UsageError("--quick and --full exclude each other")
    wanted = dtypes_of(dtypes, quick, full=full, device=device)
    cases = select(expression, quick)
    screen = console(as_json)
    screen.print(describe_machine(device), style="dim")
    checks = run(screen, cases, backend, device, wanted) if cases else []
    checks += [] if dtypes else check_fp8(expression, backend, device=device)
    if as_json:
        click.echo(json.dumps([check._asdict() for check in checks], indent=1))
    show(screen, checks)
    screen.print(summary(checks))
    if any(not check.ok for check in checks):
        raise SystemExit(Exit.FAILED)


def dtypes_of(named: tuple[str, ...] | None, quick: bool, full: bool, device: str) -> list[str]:
    """Names as torch has them."""
    if named:
        return [DTYPES[name] for name in named]
    if full:
        return ["float32", "bfloat16", "float16"]
    if quick:
        return ["bfloat16" if device.startswith("cuda") else "float32"]
    return ["float32", "bfloat16"]


def select(expression: str, quick: bool) -> list:
    """The cases that are asked for."""
    from ..testing.cases import CASES, PACKED

    named = [case for case in CASES + PACKED if matches(expression, case.name)]
    chosen = [case for case in named if not quick or case.tiles <= QUICK_TILES]
    from ..testing import fp8

    if not chosen and not any(matches(expression, case.name) for case in fp8.CASES):
        large = "; larger ones are: leave --quick out" if named else ""
        raise click.UsageError(f"no {'quick ' * quick}case is named by -k {expression!r}{large}")
    return chosen


def check_fp8(expression: str, backend: str | None, device: str) -> list[Check]:
    """The calls with FP8 products, each held to the bound on the norm of its error."""
    from ..testing import fp8

    checks = []
    for case in fp8.CASES:
        if matches(expression, case.name):
            try:
                off = fp8.error_of(case, backend, device)
            except NotImplementedError as refusal:
                said = " ".join(str(refusal).split())
                checks.append(Check(case.name, "float8_e4m3fn", refused=said))
            else:
                ok = off <= case.bound
                checks.append(Check(case.name, "float8_e4m3fn", "out", off, case.bound, ok=ok))
    return checks


def matches(expression: str, name: str) -> bool:
    """Whether a case is named: words are parts of its name, joined by and, or, not, ( and ).
    ValueError where they are joined otherwise.
    """
    tokens = re.findall(r"[()]|[^\s()]+", expression)
    if not tokens:
        return True
    operators = {"and", "or", "not", "(", ")"}
    python = " ".join(token if token in operators else str(token in name) for token in tokens)
    try:
        return _holds(ast.parse(python, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
        raise ValueError(
            f"{expression!r} cannot be read: words are joined by and, or, not, ( and )"
        ) from fault


def _holds(node: ast.expr) -> bool:
    """Whether an expression of True and False is true."""
    if isinstance(node, ast.BoolOp):
        values = [_holds(value) for value in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _holds(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return node.value
    raise ValueError(ast.dump(node))


def run(screen, cases: list, backend: str | None, device: str, dtypes: list[str]) -> list[Check]:
    """Every case in every dtype, behind a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar, count, name = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    checks = []
    with Progress(bar, count, name, console=screen, transient=True) as progress:
        task = progress.add_task("", total=len(cases) * len(dtypes))
        for dtype in dtypes:
            for case in cases:
                progress.update(task, description=f"{case.name} {dtype}")
                checks.append(check_case(case, backend, device=device, dtype=dtype))
                progress.advance(task)
    return checks


def check_case(case, backend: str | None, device: str, dtype: str) -> Check:
    """One case: the worst of its tensors, a refusal, or what was raised."""
    import torch

    from ..testing.run import run_case

    try:
        records = run_case(case, backend, device=device, dtype=getattr(torch, dtype))
    except NotImplementedError as refusal:
        return Check(case.name, dtype, refused=" ".join(str(refusal).split()))
    except Exception as fault:
        raised = f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}"
        return Check(case.name, dtype, ok=False, raised=raised)
    worst = max(records, key=lambda record: nearness(record.verdict))
    verdict = worst.verdict
    error_of_torch = sdpa_error(case, worst.tensor, device=device, dtype=getattr(torch, dtype))
    named = verdict._asdict()
    return Check(case.name, dtype, worst.tensor, sdpa_error=error_of_torch, **named)


def nearness(verdict) -> float:
    """How near a verdict is to failing: above 1 it fails; what fails otherwise fails most."""
    if not verdict.ok:
        return float("inf")
    pairs = ((verdict.max_error, verdict.max_bound), (verdict.mean_error, verdict.mean_bound))
    return max(off / bound if bound else 0.0 for off, bound in pairs)


def sdpa_error(case, tensor: str, device: str, dtype) -> float | None:
    """The largest error of torch's attention in this tensor, None where it has no such feature."""
    import torch

    from ..reference import attention_reference
    from ..testing.inputs import make_inputs

    if not torch_can(case, tensor):
        return None
    inputs = make_inputs(case.sizes, case.features, dtype=dtype, device=device, seed=case.seed)
    is_causal = bool(case.features.causal)

    def attend(q, k, v):
        swap = case.features.layout == "bshd"
        q, k, v = (x.transpose(1, 2) if swap else x for x in (q, k, v))
        heads = case.sizes.nheads != case.sizes.nheads_k
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=case.features.scale, enable_gqa=heads
        )
        return out.transpose(1, 2) if swap else out

    def exact(q, k, v):
        options = {name: getattr(case.features, name) for name in ("causal", "scale", "layout")}
        return attention_reference(q, k, v, **options)

    def tensor_of(function, dtype):
        tensors = inputs.q, inputs.k, inputs.v
        q, k, v = leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        out = function(q, k, v)
        if tensor == "out":
            return out.detach()
        leaf = leaves["qkv".index(tensor[1])]
        return torch.autograd.grad(out, leaf, inputs.dout.to(dtype))[0]

    oracle = tensor_of(exact, torch.float64)
    return (tensor_of(attend, dtype).double() - oracle).abs().max().item()


def torch_can(case, tensor: str) -> bool:
    """Whether torch's attention computes this tensor of the case without a mask of scores."""
    from ..testing.cases import Features, PackedCase

    features, sizes = case.features, case.sizes
    if isinstance(case, PackedCase):
        return False
    if tensor not in ("out", "dq", "dk", "dv") or (features.lse_grad and tensor != "out"):
        return False
    plain = Features(layout=features.layout, memory=features.memory, logits=features.logits)
    plain = plain._replace(causal=features.causal, scale=features.scale, lse_grad=features.lse_grad)
    if features != plain or not (sizes.batch and sizes.seqlen_q and sizes.seqlen_k):
        return False
    is_square = sizes.seqlen_q == sizes.seqlen_k
    return not features.causal or features.causal == "top_left" or is_square


def show(screen, checks: list[Check]) -> None:
    """One row for each check; what a backend refuses, below."""
    served = [check for check in checks if not check.refused]
    rows = [
        (
            check.case,
            NAMES[check.dtype],
            check.tensor,
            *map(error, (check.max_error, check.max_bound, check.mean_error, check.mean_bound)),
            error(check.sdpa_error),
            mark(check.ok),
        )
        for check in served
    ]
    numbers = ["max", "of", "mean", "of ", "SDPA"]
    screen.print(table(["case", "dtype", "worst", *numbers, ""], rows, numbers=numbers))
    legend = (
        "max, mean: errors against fp64, of what is allowed, in the tensor nearest to its bound; "
        "of fp8 max is the norm of the error over that of out"
    )
    screen.print(legend, style="dim")
    list_by_reason(screen, "raised", reasons={c: c.raised for c in served if c.raised})
    list_by_reason(screen, "not served", reasons={c: c.refused for c in checks if c.refused})


def list_by_reason(screen, what: str, reasons: dict[Check, str]) -> None:
    """Each reason once, with some of its cases."""
    for reason in dict.fromkeys(reasons.values()):
        names = [f"{c.case} {NAMES[c.dtype]}" for c, x in reasons.items() if x == reason]
        omitted = f" and {len(names) - 3} more" if len(names) > 3 else ""
        screen.print(f"{what}: {', '.join(names[:3])}{omitted}: {reason}")


def summary(checks: list[Check]) -> str:
    """One sentence."""
    failed = [check for check in checks if not check.ok]
    refused = sum(bool(check.refused) for check in checks)
    passed = len(checks) - len(failed) - refused
    also = f", {refused} not served here" if refused else ""
    if failed:
        names = ", ".join(dict.fromkeys(check.case for check in failed))
        return f"FAIL: {len(failed)} of {len(checks)} checks ({names}){also}."
    return f"ok: {passed} checks within their bounds against fp64{also}."
