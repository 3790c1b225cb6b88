"""FlashAttention-2, -3 and -4 as peers: a callable, or the reason why there is none.

FA3 is its package or, where TILEWISE_FA3 names one, its library without the package; FA2 is
`flash_attn`, FA4 is `flash_attn.cute`. All mask causally at the bottom right, as we do. A feature
is passed by the name that the library gives it; a library without that argument refuses the shape.

Backwards are timed without autograd: FA3's operator, and FA4's, whose host takes longer than a
short one, in a CUDA graph.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.explain.call import packing_of
from tilewise.explain.modifiers import words_of
from tilewise.explain.shapes import FP8, Shape

from .arguments import options_of
from .graphs import Replayed

if TYPE_CHECKING:
    from .providers import Attend

Tensor = torch.Tensor

FA3_LIBRARY = "TILEWISE_FA3"  # the environment variable with the path of fa3.so
FA2_MODULES = ("flash_attn",)
FA3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
FA3_FP8 = "fa3_fwd"  # the package fa3-fwd, and the namespace of its operators
FA4_MODULES = ("flash_attn.cute.interface", "flash_attn.cute")
FA3_MAJORS = (9,)  # of the compute capability
FA2_MAJORS = tuple(range(8, 13))
FA4_MAJORS = tuple(range(8, 13))  # its own checks are finer
AT_REST = {  # what an option is where it asks for nothing
    "causal": False,
    "is_causal": False,
    "deterministic": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
}
HINTS = ("max_seqlen_q", "max_seqlen_k")  # other libraries read the lengths themselves
BWD_TAKES = ["dout", "q", "k", "v", "out", "softmax_lse"]
BWD_WRITES = {"dq", "dk", "dv"}


class Absent(Exception):
    """A peer, or one pass of it, is not to be had here; the text says why."""


def prepare_fa3(shape: Shape, device: str) -> Attend:
    """From the library that the environment names, else from the package: its operators, where it
    registers some that are known here, cost less than its functions.
    """
    if shape.dtype == FP8:
        return prepare_fa3_fp8(shape, device)
    if path := os.environ.get(FA3_LIBRARY):
        return from_library(load(path), shape, device)
    attend = from_package(FA3_MODULES, shape, device, f", and {FA3_LIBRARY} names no library")
    try:
        return from_library(torch.ops.flash_attn_3, shape, device)
    except (Absent, AttributeError):
        return attend


def prepare_fa3_fp8(shape: Shape, device: str) -> Attend:
    """From the package whose forward takes e4m3; without scales it takes them for 1."""
    try:
        importlib.import_module(f"{FA3_FP8}._C")  # registers the operators
    except ImportError as error:
        raise Absent(f"{FA3_FP8} is not installed, the forward with FP8 ({error})") from error
    return from_library(getattr(torch.ops, FA3_FP8), shape, device)


def prepare_fa4(shape: Shape, device: str) -> Attend:
    """From the package; a backward on a GPU by the functions below it, which autograd calls."""
    attend = from_package(FA4_MODULES, shape, device)
    if shape.direction != "bwd" or not device.startswith("cuda"):
        return attend
    interface = importlib.import_module(FA4_MODULES[0])
    options = features_of(shape, device) | packing_of(shape, device)
    left, right = options.pop("window_size", (None, None))
    options |= dict(softmax_scale=shape.headdim**-0.5, causal=shape.causal)
    options |= dict(window_size_left=left, window_size_right=right)
    forward = functools.partial(interface._flash_attn_fwd, return_lse=True, **options)
    backward = functools.partial(interface._flash_attn_bwd, **options)
    return Passes(lambda q, k, v: forward(q, k, v)[:2], in_order(backward), is_replayed=True)


def in_order(backward: Callable[..., object]) -> Callable[..., object]:
    """FA4's backward as FA3's: dout comes first."""
    return lambda dout, q, k, v, out, lse, **own: backward(q, k, v, out, dout, lse, **own)


def unfit(shape: Shape, device: str, majors: Collection[int]) -> str | None:
    """Why none of them serves this device or shape, installed or not."""
    if shape.modifier:
        return f"it is not asked for {words_of(shape.modifier)} here"
    if not device.startswith("cuda"):
        return "it is for CUDA GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in majors:
        served = ", ".join(f"{one}.x" for one in majors)
        return f"it is for compute capability {served}; this GPU has {major}.{minor}"
    if shape.dtype not in ("float16", "bfloat16"):
        return f"it takes float16 and bfloat16, not {shape.dtype}"
    for headdim in (shape.headdim, shape.headdim_v):
        if headdim > 256 or headdim % 8:
            return f"it takes headdims up to 256 in steps of 8, not {headdim}"
    return None


def asked(
    prepare: Callable[[Shape, str], Attend], majors: Collection[int]
) -> tuple[Callable[[Shape, str], str | None], Callable[[Shape, str], Attend]]:
    """What a provider is made of: why it is not to be had, by trying, and the callable."""

    def refuse(shape: Shape, device: str) -> str | None:
        like = shape  # FlashAttention-3's forward takes e4m3, too
        if shape.dtype == FP8 and prepare is prepare_fa3:
            like = shape._replace(dtype="bfloat16")
        if (reason := unfit(like, device, majors)) is not None:
            return reason
        try:
            prepare(shape, device)
        except Absent as absent:
            return str(absent)
        return None

    return refuse, prepare


def features_of(shape: Shape, device: str) -> dict[str, Any]:
    """The features that a shape asks for, and no others, by the names of flash-attn."""
    options = options_of(shape, device)
    named = dict(
        window_size=options["window"],
        softcap=options["softcap"],
        alibi_slopes=options["alibi_slopes"],
        learnable_sink=options["sinks"],
    )
    return {name: value for name, value in named.items() if value is not None}


def from_package(modules: Sequence[str], shape: Shape, device: str, unless: str = "") -> Attend:
    """`flash_attn_func` of the first module that has it, or its twin for packed sequences; the
    gradient is the package's own.
    """
    wanted = "flash_attn_varlen_func" if shape.lengths else "flash_attn_func"
    reasons = []
    for name in modules:
        try:
            function = getattr(importlib.import_module(name), wanted)
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or " "):  # it is there, and what it needs is not
                reasons.append(f"{name} does not import: {error}")
        except Exception as error:  # a broken build raises what it likes
            reasons.append(f"{name} has no {wanted}: {error}")
        else:
            options = keywords(
                inspect.signature(function).parameters,
                softmax_scale=shape.headdim**-0.5,
                causal=shape.causal,
                deterministic=False,
                **features_of(shape, device),
                **packing_of(shape, device),
            )
            return lambda q, k, v: _first(function(q, k, v, **options))
    raise Absent(reasons[0] if reasons else f"{modules[0]} is not installed{unless}")


def load(path: str):
    """The operators of FA3's library."""
    operators = torch.ops.flash_attn_3
    if hasattr(operators, "fwd"):  # to register them twice would end the process
        return operators
    if not Path(path).exists():
        raise Absent(f"{FA3_LIBRARY} names {path}, which is not there")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise Absent(
            f"{path} does not load ({error.__cause__ or error}): the CUDA runtime that it was"
            " built with has to be on LD_LIBRARY_PATH when Python starts"
        ) from error
    if not hasattr(operators, "fwd"):
        raise Absent(f"{path} registers no flash_attn_3::fwd")
    return operators


def fa3_operators():
    """Operators of the library that the environment names, else of the package."""
    if path := os.environ.get(FA3_LIBRARY):
        return load(path)
    reasons = []
    for name in FA3_MODULES:
        try:
            importlib.import_module(name)  # registers the operators
        except Exception as error:  # a broken build raises what it likes
            reasons.append(str(error))
    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        reason = reasons[0] if reasons else f"{FA3_MODULES[0]} registers no flash_attn_3::fwd"
        raise Absent(f"{reason}, and {FA3_LIBRARY} names no library")
    return torch.ops.flash_attn_3


def from_library(operators, shape: Shape, device: str) -> Attend:
    """FA3's operators, driven as far as their schemas say how."""
    features = features_of(shape, device)
    left, right = features.pop("window_size", (-1, -1))
    wanted = dict(
        softmax_scale=shape.headdim**-0.5,
        is_causal=shape.causal,
        window_size_left=left,
        window_size_right=right,
        softcap=features.pop("softcap", 0.0),
        **features,
        **packing_of(shape, device),
    )
    forward = forward_of(operators, **wanted)
    if shape.direction == "fwd":
        return lambda q, k, v: forward(q, k, v)[0]
    return Passes(forward, backward_of(operators, **wanted))


def forward_of(operators, **wanted: Any) -> Callable[..., Sequence[Tensor]]:
    """FA3's forward: out and lse of q, k and v, and of arguments that each call has of its own."""
    fwd = operators.fwd.default
    options = operator_keywords(fwd, **wanted)
    return lambda q, k, v, **own: fwd(q, k, v, **{**options, **own})[:2]


def backward_of(operators, **wanted: Any) -> Callable[..., object]:
    """FA3's backward, of dout, q, k, v, out and lse, and of what each call has of its own: dq, dk
    and dv, into which it writes, are.
    """
    if not hasattr(operators, "bwd"):
        raise Absent("this library has no flash_attn_3::bwd")
    bwd = operators.bwd.default
    names = [argument.name for argument in bwd._schema.arguments]
    if names[: len(BWD_TAKES)] != BWD_TAKES or not BWD_WRITES <= set(names):
        raise Absent(f"its backward has a schema that is not known here: {bwd._schema}"[:240])
    options = operator_keywords(bwd, **wanted, deterministic=False)
    return lambda *saved, **own: bwd(*saved, **{**options, **own})


class Passes(NamedTuple):
    """A library's two passes as one differentiable call; `bwd` takes dout, q, k, v, out and lse,
    and writes into dq, dk and dv.
    """

    fwd: Callable[..., Sequence[Tensor]]
    bwd: Callable[..., object]
    is_replayed: bool = False  # the backward, from a CUDA graph

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Library.apply(q, k, v, self)

    def direct(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
    ) -> tuple[Tensor, Callable[[], tuple[Tensor, ...]]]:
        """Out, and the backward without autograd, into the same gradients each time."""
        out, lse = self.fwd(q, k, v)
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        into = dict(zip(("dq", "dk", "dv"), grads))

        def backward() -> tuple[Tensor, ...]:
            self.bwd(dout, q, k, v, out, lse, **into)
            return grads

        if self.is_replayed:
            graph = Replayed([backward])
            return out, lambda: graph()[0]
        return out, backward


class _Library(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, passes):
        out, lse = passes.fwd(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.passes = passes
        return out

    @staticmethod
    def backward(ctx, *douts):
        saved = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in saved[:3])
        ctx.passes.bwd(douts[0].contiguous(), *saved, dq=dq, dk=dk, dv=dv)
        return dq, dk, dv, None


def operator_keywords(operator, **wanted: Any) -> dict[str, Any]:
    """`keywords` by an operator's schema; optional arguments without a default are None."""
    arguments = {argument.name: argument for argument in operator._schema.arguments}
    unset = {
        name: None
        for name, argument in arguments.items()
        if isinstance(argument.type, torch.OptionalType) and not argument.has_default_value()
    }
    return {**unset, **keywords(arguments, **wanted)}


def keywords(known: Collection[str], **wanted: Any) -> dict[str, Any]:
    """What of `wanted` a function knows; Absent where it lacks one that asks for something."""
    for name, value in wanted.items():
        at_rest = name in HINTS or (name in AT_REST and value == AT_REST[name])
        if name not in known and not at_rest:
            raise Absent(f"it takes no argument {name!r}")
    return {name: value for name, value in wanted.items() if name in known}


def _first(result: Tensor | tuple) -> Tensor:
    """Out, with or without the LSE beside it."""
    return result if isinstance(result, torch.Tensor) else result[0]
