"""The matrix of calls that every backend is held to, and how one of them is run and judged.

    for case in CASES:
        for record in run_case(case, backend="cpu"):
            print(case.name, record)

Tests, GPU tests and `tilewise verify` run these same cases. The list is picked by hand, each case
for a fault it would show, so that it stays short: `case.tiles` says what an interpreter would pay.
"""

from __future__ import annotations

import contextlib
import zlib
from typing import NamedTuple, Protocol

import torch

from ..emulation import use_emulator, use_interpreter
from ..reference import attention_reference
from .inputs import Features, Inputs, Sizes, make_inputs, poisoned
from .modified import modifiers
from .tolerance import Verdict, judge

Tensor = torch.Tensor


class Case(NamedTuple):
    """One call: its name, sizes and features."""

    name: str
    sizes: Sizes
    features: Features

    @property
    def tiles(self) -> int:
        """How many 64 x 64 tiles of scores the call has, hidden ones included."""
        s = self.sizes
        return s.batch * s.nheads * -(-s.seqlen_q // 64) * -(-s.seqlen_k // 64)

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())


class CallSpec(Protocol):
    """What says which call is made."""

    @property
    def sizes(self) -> Sizes: ...

    @property
    def features(self) -> Features: ...


class Record(NamedTuple):
    """The verdict on one tensor of a call: out, lse, dq, dk, dv, dsinks, dbias or dlearned."""

    tensor: str
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.tensor}: {self.verdict}{'' if self.verdict.ok else ' FAILS'}"


def _case(name: str, sizes: dict | None = None, **features) -> Case:
    return Case(name, Sizes(**(sizes or {})), features=Features(**features))


def _lengths(seqlen_q: int, seqlen_k: int, nheads: int = 1) -> dict:
    return dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k, nheads=nheads, nheads_k=nheads)


def _headdims(headdim: int, headdim_v: int = 0) -> dict:
    return dict(
        seqlen_q=70, seqlen_k=75, nheads=1, nheads_k=1, headdim=headdim, headdim_v=headdim_v
    )


_LENGTHS = [(1, 1), (1, 239), (239, 1), (799, 3), (3, 799), (64, 64), (113, 203), (192, 320)]
_LONGER_QUERIES = [(203, 113), (65, 64), (257, 1)]
_WIDE = dict(batch=2, seqlen_q=113, seqlen_k=203, nheads=4, nheads_k=2)
_TALL = dict(batch=2, seqlen_q=203, seqlen_k=113, nheads=4, nheads_k=2)
_SQUARE = dict(batch=2, seqlen_q=100, seqlen_k=100)

CASES: tuple[Case, ...] = (
    *(_case(f"{a}x{b}", _lengths(a, b)) for a, b in _LENGTHS),
    *(_case(f"{a}x{b}-causal", _lengths(a, b), causal=True) for a, b in _LENGTHS),
    *(_case(f"{a}x{b}-causal", _lengths(a, b), causal=True) for a, b in _LONGER_QUERIES),
    *(_case(f"{a}x{b}-top-left", _lengths(a, b), causal="top_left") for a, b in _LENGTHS[3:7]),
    *(_case(f"{a}x{b}-top-left", _lengths(a, b), causal="top_left") for a, b in _LONGER_QUERIES),
    # Keys past what the last query sees, where its block is whole.
    _case("128x500-top-left", _lengths(128, 500), causal="top_left"),
    _case("1023x1024", _lengths(1023, 1024)),
    _case("1023x1024-causal", _lengths(1023, 1024), causal=True, lse_grad=True),
    # No keys, no queries, no batch.
    _case("no-keys", _lengths(33, 0)),
    _case("no-keys-sinks", _lengths(33, 0), sinks=True, lse_grad=True),
    _case("no-queries", _lengths(0, 33), causal=True),
    _case("no-batch", dict(batch=0)),
    _case("all-rows-masked", _SQUARE, causal=True, seqused_k=(0, 0), lse_grad=True),
    _case("some-rows-masked", _SQUARE, causal=True, seqused_k=(0, 37), lse_grad=True),
    # Head dims: the smallest, odd ones, between powers of two, the widest, two in one call.
    *(_case(f"d{d}", _headdims(d), causal=True) for d in (1, 3, 8, 17, 40, 80, 96, 128, 192, 256)),
    *(_case(f"d{d}", _headdims(d), causal=True) for d in (100, 257, 512)),
    *(_case(f"d{d}-v{e}", _headdims(d, e)) for d, e in ((64, 32), (32, 64), (17, 5), (192, 128))),
    _case("d40-v72-causal", _headdims(40, 72), causal=True, lse_grad=True),
    _case("d64-v100-sliced", _headdims(64, 100), memory="sliced", lse_grad=True),
    _case("d512-v64", _headdims(512, 64), window=(40, 3)),
    # Heads that share keys.
    _case("gqa", _WIDE, causal=True),
    _case("gqa-3", dict(_SQUARE, nheads=6, nheads_k=2), causal=True, lse_grad=True),
    _case("mqa", dict(_SQUARE, nheads=5, nheads_k=1)),
    _case("mqa-decode", dict(batch=3, seqlen_q=1, seqlen_k=203, nheads=8, nheads_k=1), causal=True),
    # Scores far from 0: LSE near -100 is where exp(S - LSE) overflows if anything is amiss.
    _case("logits-100", _WIDE, logits=100.0),
    _case("logits-100-causal", _SQUARE, logits=100.0, causal=True, lse_grad=True),
    _case("logits-100-s192", _lengths(192, 192), logits=100.0, causal=True),
    _case("scale-2", _SQUARE, scale=2.0),
    # Windows, on either side of the diagonal, narrower and wider than a tile.
    _case("window-left", _WIDE, window=(20, -1)),
    _case("window-right", _WIDE, window=(-1, 20), lse_grad=True),
    _case("window-both", _WIDE, window=(10, 7)),
    _case("window-one", _SQUARE, window=(0, 0)),
    _case("window-causal", _WIDE, causal=True, window=(70, 0)),
    _case("window-tall", _TALL, window=(10, 7), lse_grad=True),
    _case("window-top-left", _WIDE, causal="top_left", window=(33, 0)),
    _case("window-wider-than-all", _SQUARE, window=(1000, 1000)),
    # Non-linear score functions and shifts.
    _case("softcap", _WIDE, softcap=1.5, lse_grad=True),
    _case("softcap-causal", _SQUARE, softcap=1.5, causal=True),
    _case("softcap-logits", _SQUARE, softcap=30.0, logits=100.0),
    _case("alibi", _WIDE, alibi="heads"),
    _case("alibi-batch-causal", _WIDE, alibi="batch", causal=True, lse_grad=True),
    _case("alibi-top-left", _TALL, alibi="heads", causal="top_left"),
    # Sinks, and padding full of NaN.
    _case("sinks", _WIDE, sinks=True),
    _case("sinks-causal-tall", _TALL, sinks=True, causal=True, lse_grad=True),
    _case("sinks-window", _SQUARE, sinks=True, window=(16, 0)),
    _case("seqused", _WIDE, seqused_k=(203, 64)),
    _case("seqused-causal", _WIDE, seqused_k=(130, 1), causal=True, lse_grad=True),
    _case("seqused-top-left", _WIDE, seqused_k=(65, 0), causal="top_left"),
    _case(
        "everything",
        _WIDE,
        causal=True,
        window=(90, 0),
        softcap=3.0,
        alibi="batch",
        sinks=True,
        seqused_k=(150, 40),
        lse_grad=True,
    ),
    # A bias, in every way that it can be shared.
    _case("bias", _WIDE, bias="bhqk"),
    _case("bias-heads-causal", _WIDE, bias="hqk", causal=True, lse_grad=True),
    _case("bias-keys", _WIDE, bias="bk"),
    _case("bias-queries", _TALL, bias="q", causal=True),
    _case("bias-of-heads", _SQUARE, bias="h", sinks=True, alibi="heads", softcap=3.0),
    # Masks, asked for every pair, and by blocks.
    _case("mask-prefix", _WIDE, mask="prefix"),
    _case("mask-by-head-window", _WIDE, mask="by-head", window=(60, 20), lse_grad=True),
    _case("mask-holes", _TALL, mask="holes", sinks=True),
    _case("mask-documents-causal", _WIDE, mask="documents", causal="top_left", seqused_k=(150, 90)),
    _case("blocks-causal", _WIDE, mask="causal", blocks=(64, 64)),
    _case("blocks-documents", _WIDE, mask="documents", blocks=(32, 64), lse_grad=True),
    _case("blocks-by-head", _TALL, mask="by-head", blocks=(128, 128), alibi="batch"),
    _case("blocks-holes", _TALL, mask="holes", blocks=(16, 32), softcap=3.0, sinks=True),
    _case("blocks-seqused", _SQUARE, mask="prefix", blocks=(64, 32), seqused_k=(40, 0)),
    # Score functions.
    _case("score-tilted", _WIDE, score="tilted", lse_grad=True),
    _case("score-table-causal", _WIDE, score="table", causal=True),
    _case("score-nonlinear", _TALL, score="nonlinear", alibi="heads"),
    _case("score-hiding", _TALL, score="hiding", bias="hk", sinks=True),
    _case("learned-table", _WIDE, score="table", learned=True, causal=True, lse_grad=True),
    _case("learned-by-key", _TALL, score="by-key", learned=True, sinks=True, window=(60, 50)),
    # Dropout.
    _case("dropout", _WIDE, dropout=0.1, lse_grad=True),
    _case("dropout-causal", _TALL, dropout=0.5, causal=True, sinks=True),
    *(
        _case(
            f"everything-more{name}",
            _WIDE | headdims,
            window=(120, 60),
            softcap=3.0,
            alibi="batch",
            sinks=True,
            bias="hqk",
            mask="by-head",
            score="table",
            learned=True,
            dropout=0.2,
            lse_grad=True,
        )
        for name, headdims in (
            ("", {}),
            ("-d100-v65", dict(headdim=100, headdim_v=65)),
            ("-d320-v512", dict(headdim=320, headdim_v=512)),
        )
    ),
    _case("blocks-d100", dict(_WIDE, headdim=100), mask="causal", blocks=(128, 128), bias="bhqk"),
    _case("blocks-d512", dict(_WIDE, headdim=512), mask="documents", blocks=(64, 64), dropout=0.1),
    # Memory.
    _case("layout-bhsd", _WIDE, layout="bhsd", memory="transposed", causal=True),
    _case("layout-bhsd-dense", _WIDE, layout="bhsd", lse_grad=True),
    _case("transposed", _WIDE, memory="transposed"),
    _case("sequence-first", _WIDE, memory="sequence_first", causal=True),
    _case("sliced", _WIDE, memory="sliced"),
    _case("packed", dict(_SQUARE, nheads=4), memory="packed", causal=True),
    _case("expanded", _WIDE, memory="expanded"),
)


def run_case(
    case: Case,
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

    if not isinstance(case, Case):
        return case.run(backend, device, dtype, seed)
    inputs = make_inputs(case.sizes, case.features, dtype=dtype, device=device, seed=case.seed)
    with on_cpu(backend, device, seed=case.seed if seed is None else seed), poisoned():
        results = run(attention, case, inputs=inputs, backend=backend)
    return records(results, *standards(case, inputs))


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


def records(results: dict, oracle: dict, *plain: dict) -> list[Record]:
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
    headdim, with a sign that changes from key to key, and results over keys or queries. A cap's t =
    tanh(x) is off by u t, which is u t / (1 - t^2) in x, or u sinh(2x) / 2x of it.
    """
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    eps = torch.finfo(dtype).eps
    with torch.no_grad():
        _, *stored = _attend(attention_reference, case, inputs=inputs, **how)
    exact = _to(dtype, inputs)
    scale = case.features.scale or inputs.q.shape[-1] ** -0.5
    keys = _as_rows(exact.k, case)
    off = _in_sequence(keys.shape[3], eps)
    if case.features.softcap:
        queries = _as_rows(exact.q, case)[:, : keys.shape[1]]
        x = scale / case.features.softcap * queries @ keys.transpose(2, 3)
        x = x.square().nanmean().sqrt()
        off = off + eps / 2 * torch.sinh(2 * x) / (2 * x)
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
    if exact.sinks is not None:  # few numbers, each a sum over rows: their errors add in squares
        delta_off += torch.finfo(inputs.q.dtype).eps * _rowsum(products.square(), case).sqrt()
        p_sink = torch.exp(exact.sinks.unsqueeze(1) - stored_lse)
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


def run(attend, case: CallSpec, inputs: Inputs, **how) -> dict[str, Tensor]:
    """out and lse, and the gradients of q, k, v, sinks, bias and what is learned."""
    leaves, out, lse = _attend(attend, case, inputs=inputs, **how)
    return _results(leaves, out, lse=lse, dout=inputs.dout, dlse=inputs.dlse)


def _attend(
    attend, case: CallSpec, inputs: Inputs, **how
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The tensors that require grad, by name, and out and lse."""
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    leaves |= {name: getattr(inputs, name) for name in ("sinks", "bias", "learned")}
    leaves = {name: x for name, x in leaves.items() if x is not None}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    options = case.features._asdict()
    options = {name: options[name] for name in ("causal", "window", "softcap", "scale", "layout")}
    options |= {"alibi_slopes": inputs.alibi_slopes, "seqused_k": inputs.seqused_k}
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
    floats = {
        name: x.to(dtype)
        for name, x in inputs._asdict().items()
        if name != "alibi_slopes" and x is not None and x.is_floating_point()
    }
    return inputs._replace(**floats)
