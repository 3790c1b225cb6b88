"""One sequence over several processes: what is timed, its inputs, and what it is held to.

All sides share the inputs, which every rank draws whole from one seed. `out` and `dq` of a few rows
of each rank are held to fp64, and to the errors of plain runs there (`standards`); `dk` and `dv`,
of which each number has all queries in it, to one process's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import tilewise
import tilewise.distributed as td
from tilewise import attention_reference
from tilewise.explain.lengths import zipf
from tilewise.testing import tolerance
from tilewise.testing.cases import Case, Features, Sizes
from tilewise.testing.inputs import Inputs as CaseInputs
from tilewise.testing.run import recomputed

from .check import Verdict

Tensor = torch.Tensor
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
ROWS = 32  # of each end of a run of a rank's rows that are held to fp64
MANY = 8  # runs of a rank that are
GRADIENTS = 0.02  # rms of dk and dv from one process's, over its rms: twice that of 16-bit partials


class Sharded(NamedTuple):
    """A sequence that `ranks` processes share, `tokens` each."""

    ranks: int
    tokens: int
    nheads: int
    nheads_k: int
    headdim: int
    causal: bool = True
    window: int = 0  # keys before a query's own; 0: all
    documents: int = 0  # of Zipf lengths, that the sequence is made of; 0: one
    direction: str = "fwd"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        heads = f"{self.nheads}:{self.nheads_k}" if self.nheads != self.nheads_k else self.nheads
        what = [f"{self.ranks} ranks x {self.tokens}", f"H{heads} D{self.headdim}", self.dtype]
        what += ["causal"] * self.causal
        what += [f"window {self.window}"] * bool(self.window)
        what += [f"{self.documents} documents"] * bool(self.documents)
        return " ".join([*what, self.direction])

    @property
    def seqlen(self) -> int:
        return self.ranks * self.tokens

    @property
    def starts(self) -> list[int] | None:
        """Where documents begin, and the end."""
        if not self.documents:
            return None
        found = [0]
        for length in zipf(self.seqlen, self.documents):
            found.append(found[-1] + length)
        return found

    @property
    def options(self) -> dict[str, Any]:
        window = (self.window, 0 if self.causal else self.window) if self.window else None
        return dict(causal=self.causal, window=window)

    @property
    def flops(self) -> float:
        """FLOPs of the whole sequence."""
        layout = td.contiguous(self.seqlen, 1)
        layout = layout if self.starts is None else layout.packed(self.starts)
        pairs = sum(layout.work(**self.options))
        return 4.0 * pairs * self.nheads * self.headdim * (1 if self.direction == "fwd" else 3.5)


class Side(NamedTuple):
    """A layout, and the call of a rank's rows."""

    layout: td.Layout
    call: Call


class Inputs(NamedTuple):
    """Tensors of the whole sequence, (1, seqlen, heads, headdim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def make_inputs(of: Sharded, device: str) -> Inputs:
    """Inputs that are the same on every rank."""
    draw = torch.Generator(device=device).manual_seed(0)
    dtype = getattr(torch, of.dtype)

    def randn(heads: int) -> Tensor:
        found = torch.empty(1, of.seqlen, heads, of.headdim, device=device, dtype=dtype)
        for part in found.split(1 << 16, 1):  # a draw in fp32 of all would be twice as large
            part.copy_(torch.randn(part.shape, generator=draw, device=device))
        return found

    return Inputs(randn(of.nheads), randn(of.nheads_k), randn(of.nheads_k), randn(of.nheads))


class Results(NamedTuple):
    """Tensors of a rank's rows, or of all; gradients where they are asked for."""

    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


def results_of(of: Sharded, call: Any, tensors: Inputs) -> Results:
    """What one call computes."""
    if of.direction == "fwd":
        with torch.no_grad():
            return Results(call(*tensors[:3]))
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = call(*leaves)
    return Results(out.detach(), *torch.autograd.grad(out, leaves, tensors.dout))


def one_process(of: Sharded, device: str) -> Any:
    """The call of one process on the whole sequence, which says what is ideal."""
    starts = of.starts
    if starts is None:
        return lambda q, k, v: tilewise.attention(q, k, v, **of.options)
    # Made once: to copy a list to a GPU waits for all work before it
    at = torch.tensor(starts, dtype=torch.int32, device=device)
    lengths: Any = dict(cu_seqlens_q=at, cu_seqlens_k=at)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out: Any = tilewise.attention(q[0], k[0], v[0], **of.options, **lengths)
        return out[None]

    return whole


class Sampled(NamedTuple):
    """One result at the rows that are held to fp64, flat."""

    own: Tensor
    exact: Tensor
    plain: Tensor  # as plain torch gives it in the inputs' precision
    recomputed: Tensor  # as a run that stores out and LSE gives it; of out, plain torch's
    one: Tensor  # one process's


def judge(of: Sharded, found: Results, layout: td.Layout, whole: Inputs, one: Results) -> Verdict:
    """The worst of a rank's results beside its bound."""
    verdicts = []
    samples = [x for span in layout.spans[:MANY] for x in _samples(of, found, span, whole, one)]
    for place, (name, slack) in enumerate((("out", 1.0), ("dq", 1.05))):
        if parts := [x[place] for x in samples if x[place] is not None]:
            own, exact, plain, again, ones = (torch.cat(x) for x in zip(*parts))
            plains = (plain,) if name == "out" else (plain, again)
            held = tolerance.judge(own, exact, *plains)
            bound = max(held.max_bound, slack * float((ones.double() - exact).abs().max()))
            passes = held.max_error <= bound  # so few numbers have no mean to speak of
            verdicts.append(Verdict(f"{name}: {held}", held.max_error, bound, passes))
    for name, x, expected in (("dk", found.dk, one.dk), ("dv", found.dv, one.dv)):
        if x is not None and expected is not None and x.numel():
            mine = layout.shard(expected).float()
            error = float((x.float() - mine).norm() / mine.norm().clamp_min(1e-30))
            passes = error <= GRADIENTS
            verdicts.append(Verdict(f"{name}: rms {error:.2g}", error, GRADIENTS, passes))
    failed = [x for x in verdicts if not x.passes]
    empty = Verdict("no rows", 0.0, 0.0, True)
    return max(failed or verdicts, key=lambda x: x.max_error / (x.bound or 1), default=empty)


def _samples(
    of: Sharded, found: Results, span: Any, whole: Inputs, one: Results
) -> list[tuple[Sampled, Sampled | None]]:
    """`out` and `dq` of a span's first rows and last, at the first key head and the last."""
    group, samples = of.nheads // of.nheads_k, []
    ends = {
        (span.start, min(span.start + ROWS, span.stop)),
        (max(span.start, span.stop - ROWS), span.stop),
    }
    for (start, stop), head in itertools.product(ends, {0, of.nheads_k - 1}):
        right = 0 if of.causal else of.window or span.last
        last, window = min(span.last, stop + right), None
        if of.window:  # the diagonal of these rows ends at their last key
            window = (of.window + last - stop, right - (last - stop))
        heads = slice(head * group, (head + 1) * group)
        keys = (slice(None), slice(span.first, last), slice(head, head + 1))
        queries = (slice(None), slice(start, stop), heads)
        truths = []
        for dtype in (torch.float64, whole.q.dtype):
            given = (whole.q[queries], whole.k[keys], whole.v[keys])
            q, k, v = (x.detach().to(dtype) for x in given)
            q.requires_grad_(found.dq is not None)
            out: Any = attention_reference(q, k, v, causal=of.causal, window=window, upcast=False)
            truths.append([out.detach()])
            if found.dq is not None:
                truths[-1].append(torch.autograd.grad(out, q, whole.dout[queries].to(dtype))[0])
        # Not of out: an LSE that is stored changes none
        truths.append(list(truths[1]))
        if found.dq is not None:
            features = Features(causal=of.causal, window=window)
            q, k, v = (x.detach() for x in (whole.q[queries], whole.k[keys], whole.v[keys]))
            inputs = CaseInputs(q, k, v, whole.dout[queries], None)
            truths[2][1] = recomputed(Case("bench", Sizes(), features), inputs)["dq"]
        rows = slice(span.row + start - span.start, span.row + stop - span.start)
        at = [(found.out, one.out), (found.dq, one.dq)][: len(truths[0])]
        parts = [
            Sampled(*(x.flatten() for x in (own[:, rows, heads], *truth, ones[queries])))
            for (own, ones), *truth in zip(at, *truths)
        ]
        samples.append((parts[0], parts[1] if len(parts) > 1 else None))
    return samples
