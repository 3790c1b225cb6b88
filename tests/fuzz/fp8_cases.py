"""The fuzzer's cases of FP8 products, made so that e4m3 rounds nothing and hides no error.

q and k are small integers, their scales powers of 2, and the softmax's scale is ln 2, so that each
exponent is an integer and P a power of 2; values are integers that 8 bits hold, also where they are
multiplied with 448 / 7, as 7 is the largest of each sequence and head. Slopes and sinks are
multiples of ln 2, too. lse is then off by the sums in fp32 alone, and out by the short
accumulators of Hopper's tensor cores, which cut each product at 13 bits below the largest.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import torch

import tilewise
from tilewise.testing import use_emulator, use_interpreter

from .reference import Span, Terms, attention

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn
LN2 = math.log(2.0)
FEATURES = ("window", "slopes", "sinks", "used")
FORMS = ("raw", "raw", "scaled", "quantized")
LANES = ("cpu-cpu", "portable-cpu", "hopper-cpu", "portable-cuda", "hopper-cuda")
LOOKS = 20  # on a GPU each is a compilation or two
LSE_OFF = 2e-5
ACCUMULATOR = 2**-7  # of the sum of the sizes of a row's terms: some 10 steps of 13 bits


@dataclasses.dataclass(frozen=True)
class Fp8Case:
    """One call, in full but for the values of its tensors, which come from the seed as well."""

    seed: int
    lane: str
    headdim: int
    headdim_v: int
    nheads_k: int
    group: int
    causal: bool | str
    features: tuple[str, ...]
    packed: bool
    form: str
    layout: str
    queries: tuple[int, ...]  # of each sequence
    keys: tuple[int, ...]
    spare: int  # rows behind each sequence's keys that are not used
    left: int | None
    right: int | None

    @property
    def backend(self) -> str:
        return self.lane.partition("-")[0]

    @property
    def device(self) -> str:
        return self.lane.partition("-")[2]

    def __str__(self) -> str:
        lane = f"--backend {self.backend} --device {self.device}"
        return (
            f"python -m tests.fuzz --fp8 --seed {self.seed} {lane}    # {dataclasses.asdict(self)}"
        )


def fp8_case(seed: int, lane: str) -> Fp8Case:
    """The case of a seed in a lane."""
    is_gpu = lane.endswith("cuda")
    look = random.Random(f"fp8 look {lane} {seed % LOOKS if is_gpu else seed}")
    rng = random.Random(f"fp8 shape {lane} {seed}")
    features = look.sample(FEATURES, look.choice((0, 0, 1, 1, 2, 3)))
    headdim = look.choice((16, 32, 64, 64, 80, 128, 128, 192, 256))
    packed = look.random() < 0.4
    longest = 3000 if is_gpu else 300
    batch = rng.randint(1, 3)
    queries, keys = ([_length(rng, longest) for _ in range(batch)] for _ in "qk")
    if not packed:
        queries, keys = [max(1, queries[0])] * batch, [max(1, keys[0])] * batch
    has_used = "used" in features
    if has_used and not packed:
        keys = [rng.randint(0, n) for n in keys]
    has_window = "window" in features
    causal = look.choice((False, True, True, "top_left"))
    return Fp8Case(
        seed=seed,
        lane=lane,
        headdim=headdim,
        headdim_v=headdim if look.random() < 0.6 else look.choice((16, 64, 128, 256)),
        nheads_k=look.choice((1, 2, 3)),
        group=look.choice((1, 2, 4)),
        causal=causal,
        features=tuple(sorted(features)),
        packed=packed,
        form=look.choice(FORMS),
        layout="bshd" if packed or look.random() < 0.6 else "bhsd",
        queries=tuple(queries),
        keys=tuple(keys),
        spare=rng.choice((1, 20, 140)) if has_used else 0,
        left=rng.choice((0, 5, 70, 200)) if has_window else None,
        right=rng.choice((0, 3, None)) if has_window and not causal else None,
    )


def run_fp8(case: Fp8Case, attend: Callable = tilewise.attention) -> list[str]:
    """What is wrong with a case; `attend` is what stands in for `tilewise.attention`."""
    tensors = _draw(case)
    try:
        with _on_cpu(case):
            out, lse = _compute(case, tensors, attend)
            again = _compute(case, tensors, attend)
    except Exception as error:
        return [str(case), f"raised {type(error).__name__}: {error}"]
    faults = []
    if not (torch.equal(out, again[0]) and torch.equal(lse, again[1])):
        faults.append("a second call has other bits")
    faults += _compare(case, tensors, out.double(), lse.double())
    return [str(case), *faults] if faults else []


def _length(rng: random.Random, longest: int) -> int:
    near = rng.choice((64, 128, 256)) + rng.choice((-1, 0, 1))
    return rng.choice((0, 1, near, *(rng.randint(1, longest) for _ in "123")))


def _draw(case: Fp8Case) -> dict[str, Tensor]:
    """Rows of all sequences end to end, on the case's device; keys without the unused ones."""
    generator = torch.Generator().manual_seed(case.seed)
    nheads = case.nheads_k * case.group

    def integers(size: int, share: float, *shape: int) -> Tensor:
        x = torch.randint(-size, size + 1, shape, generator=generator)
        return (x * (torch.rand(shape, generator=generator) < share)).float()

    # Sums of some 9 products of -1 and 1: exponents between about -9 and 9
    share = min(1.0, (9 / case.headdim) ** 0.5 * 1.2)
    found = {
        "q": integers(1, share, sum(case.queries), nheads, case.headdim),
        "k": integers(1, share, sum(case.keys), case.nheads_k, case.headdim),
        "v": integers(7, 1.0, sum(case.keys), case.nheads_k, case.headdim_v),
        "powers": torch.randint(-3, 4, (case.nheads_k,), generator=generator).float().exp2(),
        "v_scale": torch.rand(case.nheads_k, generator=generator) + 0.5,
    }
    for keys in found["v"].split(case.keys):
        keys[:1, :, 0] = 7.0
    if "slopes" in case.features:
        found["slopes"] = LN2 * torch.randint(0, 2, (nheads,), generator=generator).float()
    if "sinks" in case.features:
        found["sinks"] = LN2 * torch.randint(-5, 12, (nheads,), generator=generator).float()
    return {name: x.to(case.device) for name, x in found.items()}


def _on_cpu(case: Fp8Case):
    if case.lane == "portable-cpu":
        return use_interpreter()
    if case.lane == "hopper-cpu":
        return use_emulator(case.seed)
    return torch.no_grad()


def _compute(case: Fp8Case, tensors: dict[str, Tensor], attend: Callable) -> tuple[Tensor, Tensor]:
    """out (rows, nheads, headdim_v) and lse (nheads, rows)."""
    device = case.device
    q, k, v = tensors["q"], *(_with_spare(case, tensors[name]) for name in "kv")
    options: dict = {"layout": case.layout, "scale": LN2, "causal": case.causal}
    lengths = {}
    if case.packed:
        for side, counts in (("q", case.queries), ("k", [n + case.spare for n in case.keys])):
            starts = torch.tensor([0, *counts]).cumsum(0).int()
            lengths[f"cu_seqlens_{side}"] = starts.to(device)
    else:
        q, k, v = (x.unflatten(0, (len(case.keys), -1)) for x in (q, k, v))
        if case.layout == "bhsd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if "used" in case.features:
        lengths["seqused_k"] = torch.tensor(case.keys, dtype=torch.int32, device=device)
    if "window" in case.features:
        options["window"] = case.left, case.right
    options |= {"sinks": tensors.get("sinks"), "alibi_slopes": tensors.get("slopes")}
    if case.form == "quantized":
        how = dict(rotate=False, smooth=False, layout=case.layout)
        inputs = [tilewise.quantize(*(x.nan_to_num(0.0) for x in (q, k, v)), **how, **lengths)]
    else:
        inputs = [x.to(FP8) for x in (q, k, v)]
        if case.form == "scaled":
            powers = tensors["powers"]
            options |= {"q_descale": powers, "k_descale": 1 / powers}
            options["v_descale"] = tensors["v_scale"]
    out, lse = attend(
        *inputs,
        return_lse=True,
        out_dtype=torch.float32,
        backend=case.backend,
        **options,
        **lengths,
    )
    if case.packed:
        return out, lse
    out = out.transpose(1, 2) if case.layout == "bhsd" else out
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def _with_spare(case: Fp8Case, x: Tensor) -> Tensor:
    """Each sequence's keys with NaN behind them, to the longest's of a batch."""
    if "used" not in case.features:
        return x
    parts, longest = [], max(case.keys)
    for part in x.split(list(case.keys)):
        room = case.spare if case.packed else longest - len(part) + case.spare
        parts += [part, part.new_full((room, *part.shape[1:]), math.nan)]
    return torch.cat(parts)


def _compare(case: Fp8Case, tensors: dict[str, Tensor], out: Tensor, lse: Tensor) -> list[str]:
    values = {name: x.double() for name, x in tensors.items()}
    if case.form == "scaled":
        values["v"] = values["v"] * values.pop("v_scale")[:, None]
    spans, first_q, first_k = [], 0, 0
    for number, (queries, keys) in enumerate(zip(case.queries, case.keys)):
        spans.append(Span(number, first_q, queries, first_k, keys))
        first_q, first_k = first_q + queries, first_k + keys
    right = 0 if case.causal else case.right
    terms = Terms(LN2, case.causal == "top_left", case.left, right)
    exact = attention(values, spans, terms)
    sizes = attention(values | {"v": values["v"].abs()}, spans, terms).out
    sizes = sizes.amax(-1, keepdim=True) if sizes.numel() else sizes
    off = torch.where(lse == exact.lse, 0.0, (lse - exact.lse).abs())
    faults = []
    if off.numel() and not off.max() <= LSE_OFF * max(1.0, lse.nan_to_num(0, 0, 0).abs().max()):
        faults.append(f"lse is {off.max():.2e} off")
    # A key that has less than 2^-17 of a row's largest weight may be lost
    off = (out - exact.out).abs() - (ACCUMULATOR + max(case.keys, default=0) * 2**-17) * sizes
    if off.numel() and not off.max() <= 1e-6:
        faults.append(f"out is {(out - exact.out).abs().max():.2e} off, over by {off.max():.2e}")
    return faults
