"""Backend selection: the first of an ordered table of backends that supports a problem. Each
backend answers None or the reason why not.

A backend is a package or module with `NAME`, `supports(problem, device) -> None | str`,
`prepare(problem, scalars, q, k)`, which returns `(q, k, v, extras) -> (out, lse)` for all calls of
one signature, and `prepare_backward(problem, scalars)`, which returns
`(saved, extras, between=None) -> Grads` for all backwards of one signature, with what a caller
launches between its kernels. A backend that needs tensors at multiples of bytes
(`kernels.common.alignment.DENSE`) has `why_copied(problem)`: why it copies others, or None where it
refuses them. Refusals are data: the error for a problem that nothing serves prints them all, and
`tilewise info` shows them.

A backend with FP8 products has `supports_fp8(problem, device, out_dtype)` and
`prepare_fp8(problem, scalars, out_dtype)`, which returns `(quantized, extras) -> (out, lse)`. One
with `takes_values(problem, q, v, out_dtype)` transposes V itself where that is so:
`prepare_fp8(..., transposes=True)`, and `quantized` has V in the place of V^T.

A backend that reads KV caches has a module in `CACHED`, with `forward(cached, out, lse)` and, but
for the CPU's, which serves what its package supports, `refusal(cached) -> None | str`, and
`write_states(cached, pieces)`, for folds of several ranks' pieces.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from .errors import ArgumentError, Avoidable, Slower, warn_slow
from .kernels.common.alignment import DENSE, check_elements, misplaced
from .kernels.common.outputs import has_no_sequence, padding_grads, padding_out
from .problem import Between, Call, Extras, Grads, Problem, Saved

if TYPE_CHECKING:
    from .kernels.common.cached import Cached

Tensor = torch.Tensor
Forward = Callable[[Tensor, Tensor, Tensor, Extras], tuple[Tensor, Tensor]]
Backward = Callable[[Saved, Extras, Between | None], Grads]

# In order of preference. A module is imported on first use, so that a machine without Triton never
# needs it.
BACKENDS = {
    "hopper": "tilewise.kernels.hopper",
    "portable": "tilewise.kernels.portable",
    "cpu": "tilewise.kernels.cpu",
}
CACHED = {  # for calls with a KV cache
    "hopper": "tilewise.kernels.hopper.fwd.cached",
    "portable": "tilewise.kernels.portable.decode_launch",
    "cpu": "tilewise.kernels.cpu.cache",
}

# Copying a key takes as long as the Hopper kernels save over the portable ones on about 350 queries
# that attend to it; causal masks hide half of the pairs, and launches dominate short calls
MANY = 1024
UNALIGNED = Avoidable(
    "TMA needs rows, heads and batches of q, k and v that start at multiples of 16 bytes and are "
    "not expanded: q.clone() gives both if q is part of a larger tensor"
)

COPY_IS_SLOWER = Slower(
    f"it would copy q, k and v, which takes longer than it saves if fewer than {MANY} queries "
    f"share a key, or fewer than {MANY} keys a query"
)


def load(name: str, modules: dict[str, str] = BACKENDS) -> ModuleType:
    """A backend's module of BACKENDS or CACHED; ImportError where its dependencies are missing."""
    return importlib.import_module(modules[name])


def ask(
    name: str,
    problem: Problem,
    device: torch.device,
    is_aligned: bool = True,
    has_many: bool = True,
) -> str | None:
    """None if backend `name` serves the problem on `device`, else its reason."""
    try:
        module = load(name)
        reason = module.supports(problem, device)
        is_served = reason is None or isinstance(reason, Slower)
        if is_served and not is_aligned and name in DENSE:
            if not module.why_copied(problem):
                return UNALIGNED
            if not has_many:
                return COPY_IS_SLOWER
        return reason
    except ImportError as error:
        return _no_import(error)


def ask_fp8(
    name: str, problem: Problem, device: torch.device, out_dtype: torch.dtype
) -> str | None:
    """None if backend `name` computes the products of this problem of e4m3 tensors, else why not;
    one that dequantises serves them, too.
    """
    try:
        return load(name).supports_fp8(problem, device, out_dtype)
    except ImportError as error:
        return _no_import(error)


def ask_cached(name: str, cached: Cached, device: torch.device) -> str | None:
    """None if backend `name` serves a call with a KV cache on `device`, else its reason."""
    reason = ask(name, cached.problem, device)
    is_forced = isinstance(reason, Slower) and name == cached.backend
    if name != "cpu" and (reason is None or is_forced):
        return load(name, CACHED).refusal(cached) or reason
    return reason


def _no_import(error: ImportError) -> str:
    return f"cannot be imported ({error}); install it with `pip install triton`"


def why_copied(name: str, problem: Problem, is_aligned: bool) -> str:
    """Why a backend that serves a problem copies what it reads, or "" if it does not."""
    return load(name).why_copied(problem) if name in DENSE and not is_aligned else ""


def choose_for(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, backend: str | None
) -> ModuleType:
    """The backend of a call, by what its tensors look like in memory, too."""
    is_aligned = not any(misplaced(needs, q=q, k=k, v=v) for needs in DENSE.values())
    return choose(problem, q.device, backend, is_aligned, has_many(problem, q, k, extras))


def forward_of(call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
    """The forward of calls of one signature. With few queries and many keys on a GPU, and no forced
    backend, the portable split-KV kernels serve the call, as with a KV cache.
    """
    problem, scalars, backend = call.problem, call.scalars, call.backend
    check_elements([*zip("qkv", (q, k, v)), *zip(Extras._fields, extras.optional)])
    if backend is None and q.is_cuda and ask("portable", problem, q.device) is None:
        from .kernels.portable import few_queries

        if few_queries.serves(problem, q, k):
            return few_queries.prepare(problem, scalars)
    chosen = choose_for(problem, q, k, v, extras, backend)
    if has_no_sequence(extras):
        return functools.partial(padding_out, problem)
    return chosen.prepare(problem, scalars, q, k)


def backward_of(call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Backward:
    """The backward of calls of one signature."""
    chosen = choose_for(call.problem, q, k, v, extras, call.backend)
    if has_no_sequence(extras):
        return functools.partial(padding_grads, call.problem)
    return chosen.prepare_backward(call.problem, call.scalars)


def has_many(problem: Problem, q: Tensor, k: Tensor, extras: Extras) -> bool:
    """Whether each key serves so many queries, and each query so many keys, that copying them pays
    off; packed sequences by their mean length.
    """
    sequences = max(1, extras.sequences)
    return min(q.shape[1] * problem.group, k.shape[1]) >= MANY * sequences


def choose(
    problem: Problem,
    device: torch.device,
    backend: str | None = None,
    is_aligned: bool = True,
    has_many: bool = True,
) -> ModuleType:
    """The first backend that serves `problem` on `device`, or the one forced by name."""
    answer = functools.partial(
        ask, problem=problem, device=device, is_aligned=is_aligned, has_many=has_many
    )
    name = first("this attention", answer, device, backend)
    if backend is None and (why := why_copied(name, problem, is_aligned)):
        warn_slow(f"the {name} kernels compute on copies: {why}")
    return load(name)


def choose_fp8(
    problem: Problem, device: torch.device, out_dtype: torch.dtype, backend: str | None
) -> ModuleType:
    """The first backend with FP8 products for `problem`, or the one forced by name."""
    answer = functools.partial(ask_fp8, problem=problem, device=device, out_dtype=out_dtype)
    return load(first("FP8 attention", answer, device, backend))


def choose_cached(cached: Cached) -> ModuleType:
    """The first backend that serves a call with a KV cache, or the one forced by name."""
    device = cached.q.device
    answer = functools.partial(ask_cached, cached=cached, device=device)
    name = first("attention with a KV cache", answer, device, cached.backend)
    return load(name, CACHED)


def first(
    title: str, ask: Callable[[str], str | None], device: torch.device, backend: str | None
) -> str:
    """The name of the first backend that does not refuse, of all or of the one forced by name;
    NotImplementedError with every refusal if there is none, and ArgumentError for an unknown name.
    `ask` tells a backend's reason, and `title` the kind of call.
    """
    if backend is not None:
        check_backend(backend)
    refusals: dict[str, str] = {}
    for name in BACKENDS if backend is None else (backend,):
        reason = ask(name)
        if reason is None or (isinstance(reason, Slower) and name == backend):
            for refusing, why in refusals.items():
                if isinstance(why, Avoidable):
                    warn_slow(f"the {refusing} kernels do not support this call: {why}")
            return name
        refusals[name] = reason
    lines = "\n".join(f"  {name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(f"no backend supports {title} on {device}:\n{lines}")


def check_backend(backend: object) -> None:
    """The name of a backend, or None."""
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ArgumentError(
            f"backend={backend!r} is unknown: use one of {', '.join(map(repr, BACKENDS))}, or None "
            "to choose"
        )
