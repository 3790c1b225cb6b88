"""How a case is run and judged.

for case in CASES:
    for record in run_case(case, backend="cpu"):
        print(case.name, record)
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..emulation import use_emulator, use_interpreter
from ..features import FEATURES, OPTIONS
from ..problem import INPUTS, Grads
from ..reference import attention_reference
from .cases import Case, PackedCase
from .inputs import Inputs, make_inputs, poisoned
from .modified import modifiers
from .packed import join, pack, share
from .tolerance import Verdict, judge

Tensor = torch.Tensor
NUMBERS = [option for option, name in OPTIONS.items() if not FEATURES[name].shapes]
LEARNED = [name[1:] for name in Grads._fields[INPUTS:]]  # optional tensors with a gradient


class Record(NamedTuple):
    """The verdict on one tensor of a call: out, lse, dq, dk, dv, dsinks, dbias or dlearned."""

    tensor: str
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.tensor}: {self.verdict}{'' if self.verdict.ok else ' FAILS'}"


def run_case(
    case: Case | PackedCase,
    backend: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> list[Record]:
    """Computes the case and judges out, lse and the gradients against fp64.

    On CPU tensors portable kernels run in the interpreter and Hopper ones in the emulator, by
    `seed`, or one of the case's own.

    Raises NotImplementedError, with the reason, where the backend does not serve the case.
    """
    from .. import attention

    parts = [make_inputs(x.sizes, x.features, dtype, device, seed=x.seed) for x in case.parts]
    (inputs, *_), lengths = parts, {}
    if isinstance(case, PackedCase):
        parts = share(parts)
        inputs, lengths = pack(case, parts)
    with on_cpu(backend, device, seed=case.seed if seed is None else seed), poisoned():
        results = run(attention, case, inputs=inputs, backend=backend, **lengths)
    judges = [standards(part, x) for part, x in zip(case.parts, parts)]
    if isinstance(case, PackedCase):
        judges = [[join(case, runs) for runs in zip(*judges)]]
    return records(results, judges[0][0], judges[0][1:])


def on_cpu(
    backend: str | None, device: str | torch.device, seed: int
) -> contextlib.AbstractContextManager:
    """The context in which a GPU backend runs on CPU tensors."""
    if torch.device(device).type == "cpu" and backend == "portable":
        return use_interpreter()
    if torch.device(device).type == "cpu" and backend == "hopper":
        return use_emulator(seed)
    return contextlib.nullcontext()


def standards(case: Case, inputs: Inputs) -> tuple[dict[str, Tensor], ...]:
    """What results are judged by: the oracle, and the plain runs whose errors are allowed."""
    oracle = run(attention_reference, case, inputs=_to(torch.float64, inputs))
    return oracle, run(attention_reference, case, inputs, upcast=False), recomputed(case, inputs)


def records(results: dict, oracle: dict, plain: Sequence[dict]) -> list[Record]:
    """The verdict on each tensor."""
    return [
        Record(name, judge(results[name], oracle[name], *(runs[name] for runs in plain)))
        for name in oracle
    ]


def recomputed(case: Case, inputs: Inputs, **how) -> dict[str, Tensor]:
    """The plain run of FlashAttention-2, which stores out and LSE and not P; in fp32 at least.
    `how` are arguments of the reference in addition to the case's.

    Its scores are rounded in another way than those behind out and LSE: q is scaled first. With
    P' = exp(S - LSE') of those scores and w = exp(LSE' - LSE), autograd of the reference gives

        dV = P^T dO = P'^T (w dO)                     where P = exp(S - LSE) = w P'
        dS = P (dP - delta) = P' ((w dO) V^T - rowsum(w dO * O') + dLSE')
                              given dLSE' = rowsum(w dO * O') - w delta

    The errors of a row's LSE and delta are random, and may be all that a gradient's error comes
    from. So here they are off by what rounding can do, with u = eps / 2 for each operation and, in
    a sum, of the sizes of its terms: LSE by u |S| + u |LSE| and 2 u for exp and 1 / l; delta, and
    dP which it meets, by u |dO| |O|. The sign changes from row to row. And kernels sum in sequence:
    of n terms, n roundings of the running sum, each u / sqrt(3) in the mean. So S is off over
    headdim, with a sign that changes from key to key, and results over keys or queries. A cap adds
    its own error (`Features.cap_error`).
    """
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    eps = torch.finfo(dtype).eps
    with torch.no_grad():
        _, *stored = _attend(attention_reference, case, inputs=inputs, **how)
    exact = _to(dtype, inputs)
    scale = case.features.scale or inputs.q.shape[-1] ** -0.5
    keys = _as_rows(exact.k, case)
    queries = _as_rows(exact.q, case)[:, : keys.shape[1]]
    off = _in_sequence(keys.shape[3], eps)
    off = off + case.features.cap_error(queries, keys, scale=scale, eps=eps)
    keys = keys * (1 + _signs(keys).unsqueeze(-1) * off)
    scaled = exact._replace(q=exact.q * scale, k=_as_rows(keys, case))
    leaves, out, lse = _attend(attention_reference, case, inputs=scaled, scale=1.0, **how)

    stored_out, stored_lse = (x.to(dtype) for x in stored)
    sign = _signs(lse)
    stored_lse = stored_lse + sign * eps * (1 + stored_lse.abs())
    products = exact.dout * stored_out
    delta_off = eps * _rowsum(products.abs(), case)
    delta = _rowsum(products, case) + sign * delta_off
    if exact.dlse is not None:
        delta = delta - exact.dlse
    w = torch.exp(lse.detach() - stored_lse).nan_to_num(0)  # a row without keys has no P
    dout = exact.dout * _as_rows(w.unsqueeze(-1), case)
    dlse = _rowsum(dout * out.detach(), case) - w * delta
    results = _results(leaves, out, lse=lse, dout=dout, dlse=dlse) | {"lse": stored_lse}
    results["dq"] *= scale
    nkeys, nqueries = keys.shape[2], lse.shape[2] * lse.shape[1] // keys.shape[1]
    for name, terms in {"out": nkeys, "dq": nkeys, "dk": nqueries, "dv": nqueries}.items():
        results[name] *= 1 + _in_sequence(terms, eps)
    sinks = exact.extras.sinks
    if sinks is not None:  # few numbers, each a sum over rows: their errors add in squares
        delta_off += torch.finfo(inputs.q.dtype).eps * _rowsum(products.square(), case).sqrt()
        p_sink = torch.exp(sinks.unsqueeze(1) - stored_lse)
        results["dsinks"] += (p_sink * delta_off).square().sum((0, 2)).sqrt()
    return results


def _in_sequence(terms: int, eps: float) -> float:
    """The relative error of a sum that rounds as many times."""
    return eps / 2 * (terms / 3) ** 0.5


def _signs(x: Tensor) -> Tensor:
    """1 and -1 alternating along seqlen, for (batch, nheads, seqlen, ...)."""
    return 1 - 2 * (torch.arange(x.shape[2], device=x.device) % 2)


def _as_rows(x: Tensor, case: Case) -> Tensor:
    """(batch, nheads, seqlen, ...) in the case's layout, and back."""
    return x.transpose(1, 2) if case.features.layout == "bshd" else x


def _rowsum(x: Tensor, case: Case) -> Tensor:
    """The sum over headdim, shaped as lse."""
    return _as_rows(x, case).sum(-1)


def run(attend, case: Case | PackedCase, inputs: Inputs, **how) -> dict[str, Tensor]:
    """out and lse, and the gradients of q, k, v, sinks, bias and what is learned."""
    leaves, out, lse = _attend(attend, case, inputs=inputs, **how)
    return _results(leaves, out, lse=lse, dout=inputs.dout, dlse=inputs.dlse)


def _attend(
    attend, case: Case | PackedCase, inputs: Inputs, **how
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The tensors that require grad, by name, and out and lse."""
    extras = inputs.extras
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    leaves |= {name: getattr(extras, name) for name in LEARNED} | {"learned": inputs.learned}
    leaves = {name: x for name, x in leaves.items() if x is not None}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    options = case.features._asdict()
    options = {name: options[name] for name in ("causal", "window", "scale", "layout", *NUMBERS)}
    options |= {"alibi_slopes": extras.alibi_slopes, "seqused_k": extras.seqused_k}
    tensors = dict(leaves)
    learned = tensors.pop("learned", None)
    options |= modifiers(case.sizes, case.features, device=inputs.q.device, learned=learned)
    return leaves, *attend(**tensors, **(options | how), return_lse=True)


def _results(
    leaves: dict[str, Tensor], out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> dict[str, Tensor]:
    """out, lse and the gradients, given those of out and lse."""
    outputs, grad_outputs = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    grads = torch.autograd.grad(outputs, list(leaves.values()), grad_outputs)
    results = {"out": out.detach(), "lse": lse.detach()}
    return results | {f"d{name}": grad for name, grad in zip(leaves, grads)}


def _to(dtype: torch.dtype, inputs: Inputs) -> Inputs:
    """Inputs with their numbers in a dtype, but for slopes."""

    def cast(record: Any) -> Any:
        return {
            name: x.to(dtype)
            for name, x in record._asdict().items()
            if isinstance(x, Tensor) and x.is_floating_point() and name != "alibi_slopes"
        }

    extras = inputs.extras._replace(**cast(inputs.extras))
    return inputs._replace(**cast(inputs), extras=extras)
