"""What is timed. A provider turns a shape into a callable on (batch, seqlen, nheads, headdim)
tensors, packed (tokens, nheads, headdim), or says why not.

Each gets its inputs in its own memory order, so that no time of a copy is in the figure.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.explain.call import call_of, packing_of, score_of
from tilewise.explain.modifiers import BIASES
from tilewise.explain.shapes import FP8, Shape

from . import fp8, peers
from .arguments import options_of
from .modifiers import predicate_of

Tensor = torch.Tensor
Attend = Callable[..., Tensor]  # of q, k, v, and of the bias of a shape that has one


class Provider(NamedTuple):
    """`refuse` answers None or the reason why not; `prepare` gives the callable."""

    name: str
    refuse: Callable[[Shape, str], str | None]
    prepare: Callable[[Shape, str], Attend]
    layout: str = "bshd"  # the memory order of its inputs


def provider(name: str) -> Provider:
    """A provider by name or alias; `tilewise:portable` forces that backend, and
    `tilewise:deterministic` asks for gradients of the same bits in every run.
    """
    if name == "tilewise:deterministic":
        return _tilewise(name, None, True)
    if name in fp8.NAMES:
        asked = partial(fp8.refuse, name), partial(fp8.prepare, name)
        return Provider(name, *asked, layout=fp8.NAMES[name])
    if name.startswith("tilewise:"):
        return _tilewise(name, forced_backend(name))
    name = ALIASES.get(name, name)
    if name not in PROVIDERS:
        raise KeyError(f"provider {name!r} is unknown: use one of {', '.join(PROVIDERS)}")
    return PROVIDERS[name]


def without_features(shape: Shape) -> str | None:
    """Why a provider without features, for dense batches only, does not serve the shape."""
    if shape.lengths:
        return "it does not take packed sequences"
    if shape.dtype == FP8:
        return "it does not take float8_e4m3fn"
    return f"it does not take {', '.join(shape.features)}" if shape.features else None


def forced_backend(name: str) -> str:
    """The backend that `tilewise:portable` forces."""
    from tilewise import dispatch

    backend = name.partition(":")[2]
    if backend not in dispatch.BACKENDS:
        raise KeyError(f"there is no backend {backend!r}: {', '.join(dispatch.BACKENDS)}")
    return backend


def _tilewise(name: str, backend: str | None, deterministic: bool = False) -> Provider:
    def refuse(shape: Shape, device: str) -> str | None:
        if backend is None:
            return None
        from tilewise import dispatch

        few = shape if shape.lengths else shape._replace(batch=1)
        problem, on = call_of(few).problem, torch.device(device)
        if shape.dtype == FP8:
            return dispatch.ask_fp8(backend, problem, on, torch.bfloat16)
        return dispatch.ask(backend, problem, on)

    def prepare(shape: Shape, device: str) -> Attend:
        from tilewise import attention

        options = options_of(shape, device)
        options |= packing_of(shape, device)
        options |= dict(backend=backend, deterministic=deterministic)
        return lambda q, k, v, bias=None: cast(Tensor, attention(q, k, v, bias=bias, **options))

    return Provider(name, refuse, prepare)


NARROW = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION  # of torch's on CUDA


_entered: list[SDPBackend] = []


@contextlib.contextmanager
def chosen_once(name: str) -> Iterator[None]:
    """Inside, torch's attention of this name is chosen already, as a program does around its model.
    To choose it at every call takes the host longer than the call.
    """
    backend = BACKENDS.get(name)
    if backend is None:
        yield
        return
    _entered.append(backend)
    try:
        with sdpa_kernel(backend):
            yield
    finally:
        _entered.pop()


def _sdpa(name: str, backend: SDPBackend) -> Provider:
    def refuse(shape: Shape, device: str) -> str | None:
        if (reason := without_features(shape)) is not None:
            return reason
        on_gpu = device.startswith("cuda")
        if backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION) and not on_gpu:
            return "torch has it for CUDA tensors only"
        if backend is SDPBackend.FLASH_ATTENTION and on_gpu and shape.dtype == "float32":
            return "torch's flash kernel on CUDA takes float16 and bfloat16"
        widest = max(shape.headdim, shape.headdim_v)
        if on_gpu and widest > 256 and backend in NARROW:
            return f"it takes headdims up to 256, not {widest}: efficient serves them"
        if shape.causal and shape.seqlen_q != shape.seqlen_k:
            return "its causal mask is top-left, which differs where the lengths differ"
        if backend is SDPBackend.EFFICIENT_ATTENTION and shape.nheads != shape.nheads_k:
            return "it has no GQA"
        return too_large(shape, device) if backend is SDPBackend.MATH else None

    def prepare(shape: Shape, device: str) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            is_chosen = backend in _entered
            with contextlib.nullcontext() if is_chosen else sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=shape.causal, enable_gqa=shape.nheads != shape.nheads_k
                )
            return out.transpose(1, 2)

        return attend

    return Provider(name, refuse, prepare)


def _refuse_flex(shape: Shape, device: str) -> str | None:
    if shape.lengths:
        return "packed sequences would need a document mask, which it is not given here"
    if shape.dtype == FP8:
        return without_features(shape)
    if shape.modifier == "dropout":
        return "FlexAttention has no dropout"
    if shape.modifier in BIASES:
        return "a bias would be a score_mod that reads it, which it is not given here"
    if not device.startswith("cuda"):
        if shape.direction != "fwd":
            return "FlexAttention has no backward on the CPU"
        if shape.sinks:
            return "FlexAttention on the CPU has no LSE, which sinks need"
    elif importlib.util.find_spec("triton") is None:
        return "FlexAttention on CUDA needs triton"
    return None


def _prepare_flex(shape: Shape, device: str) -> Attend:
    """FlexAttention compiled for this shape alone.

    Past the recompile limit Dynamo silently runs the unfused function, and a change of grad
    mode alone recompiles: hence a fresh compile a shape, and a body that raises where it is run
    and not traced.
    """
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    # Inductor frees tensors that a backward saved unless told that the backward runs again.
    functorch_config.donated_buffer = False
    options = options_of(shape, device)
    score_mod = _flex_score(shape, options["alibi_slopes"]) or score_of(shape, device)
    mask_mod = _flex_mask(shape) if shape.causal else predicate_of(shape, device)
    block_mask = None
    if mask_mod is not None:
        lengths = (shape.seqlen_q, shape.seqlen_k)
        block_mask = create_block_mask(mask_mod, None, None, *lengths, device=device)
    sinks, aux = options["sinks"], AuxRequest(lse=True) if shape.sinks else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "Dynamo fell back to unfused FlexAttention: the time would mean nothing"
            )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found: Any = flex_attention(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=block_mask,
            enable_gqa=shape.nheads != shape.nheads_k,
            return_aux=aux,
        )
        if sinks is None:
            return found.transpose(1, 2)
        # Without a sink of its own: what it takes of the softmax is taken from the result.
        out, lse = found[0], found[1].lse
        out = (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(q.dtype)
        return out.transpose(1, 2)

    return torch.compile(attend, dynamic=False, fullgraph=True)


def _flex_mask(shape: Shape) -> Callable[..., Tensor]:
    """FlexAttention's mask_mod of a causal shape."""
    diagonal, window = shape.seqlen_k - shape.seqlen_q, shape.window

    def mask_mod(b, h, q_idx, k_idx):
        is_seen = q_idx + diagonal >= k_idx
        return is_seen if window is None else is_seen & (q_idx + diagonal - k_idx <= window)

    return mask_mod


def _flex_score(shape: Shape, slopes: Tensor | None) -> Callable[..., Tensor] | None:
    """FlexAttention's score_mod of a shape with a softcap, ALiBi or both."""
    diagonal, softcap = shape.seqlen_k - shape.seqlen_q, shape.softcap
    if not softcap and slopes is None:
        return None

    def score_mod(score, b, h, q_idx, k_idx):
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            distance = q_idx + diagonal - k_idx
            score = score - slopes[h] * (distance if shape.causal else distance.abs())
        return score

    return score_mod


def too_large(shape: Shape, device: str) -> str | None:
    """Why the score matrix, stored with its softmax and their gradients, does not fit."""
    copies = 3 if shape.direction == "fwd" else 6
    itemsize = getattr(torch, shape.dtype).itemsize
    scores = shape.batch * shape.nheads * shape.seqlen_q * shape.seqlen_k * itemsize * copies
    free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory()
    if scores > 0.6 * free:
        return (
            f"its score matrices need {scores / 2**30:.0f} GiB and {free / 2**30:.0f} GiB are free"
        )
    return None


def free_memory() -> int:
    """Bytes of host memory that can be had without swapping."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 4 << 30


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, dropout_p: float = 0.0
) -> Tensor:
    """The formula with its score matrix in memory.

    That is what every framework did before tiling. (B, S, H, D). Dropout is torch's own.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if (group := q.shape[1] // k.shape[1]) > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(
            s.shape[-1] - s.shape[-2]
        )
        s = s.masked_fill(~seen, float("-inf"))
    p = s.softmax(-1)
    if dropout_p:
        p = F.dropout(p, dropout_p)
    return (p @ v).transpose(1, 2)


def _refuse_standard(shape: Shape, device: str) -> str | None:
    return without_features(shape) or too_large(shape, device)


def _prepare_standard(shape: Shape, device: str) -> Attend:
    return lambda q, k, v: standard_attention(q, k, v, shape.causal)


# torch's own function, its backend pinned in each
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PROVIDERS = {
    "tilewise": _tilewise("tilewise", None),
    **{name: _sdpa(name, backend) for name, backend in BACKENDS.items()},
    "fa2": Provider(
        "fa2", *peers.asked(partial(peers.from_package, peers.FA2_MODULES), peers.FA2_MAJORS)
    ),
    "fa3": Provider("fa3", *peers.asked(peers.prepare_fa3, peers.FA3_MAJORS)),
    "fa4": Provider("fa4", *peers.asked(peers.prepare_fa4, peers.FA4_MAJORS)),
    "flex": Provider("flex", _refuse_flex, _prepare_flex, layout="bhsd"),
    "standard": Provider("standard", _refuse_standard, _prepare_standard),
}
ALIASES = {f"sdpa-{name}": name for name in BACKENDS}
