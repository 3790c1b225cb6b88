"""Which meaning belongs to which builtin of Triton and Gluon: by identity, whatever it is called.

A kernel may reach `exp2` as `gl.exp2`, `tl.exp2`, `tl.math.exp2` or an alias in a module of its
own. All of these are looked up here by the object they are. Names that one version of Triton lacks
are skipped, those that changed are given under every name they had.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy as ampere_copy

from . import async_copy, barriers, language, memory, pointers, shapes, tma, wgmma
from .values import Value

_SAME = "convert_layout set_auto_layout max_constancy constexpr".split()
_NOTHING = "assume debug_barrier".split()
_ELEMENTWISE = "exp exp2 log log2 sin cos sqrt rsqrt erf floor ceil abs".split()
_AS_NAMED = """
    program_id num_programs num_warps arange full zeros full_like zeros_like where maximum minimum
    clamp fma fdiv cdiv cast to_tensor inline_asm_elementwise static_range static_assert
    static_print device_print device_assert allocate_shared_memory warp_specialize barrier
""".split()
_SHAPES = """
    expand_dims broadcast broadcast_to reshape ravel permute trans join split sum cumsum
    max min reduce associative_scan
""".split()

_LANGUAGE: dict[str, Any] = {
    **{name: getattr(language, name) for name in _AS_NAMED},
    **{name: getattr(shapes, name) for name in _SHAPES},
    **dict.fromkeys(_SAME, language.same),
    **dict.fromkeys(_NOTHING, language.nothing),
    **{name: language.elementwise(getattr(torch, name)) for name in _ELEMENTWISE},
    "sqrt_rn": language.elementwise(torch.sqrt),
    "div_rn": language.fdiv,
    "view": shapes.reshape,
    "range": language.loop_range,
    "thread_barrier": language.barrier,
    "num_ctas": lambda: 1,
    "load": pointers.load,
    "store": pointers.store,
    "multiple_of": pointers.multiple_of,
    "max_contiguous": pointers.max_contiguous,
    "atomic_cas": pointers.atomic_cas,
    **{f"atomic_{name}": pointers.atomic(name) for name in ("add", "max", "min", "xchg")},
}

_MBARRIER = {
    name: getattr(barriers, name) for name in ("init", "invalidate", "expect", "arrive", "wait")
}

_TMA: dict[str, Any] = {
    "async_load": tma.load,
    "async_copy_global_to_shared": tma.load,
    "async_store": tma.store,
    "async_copy_shared_to_global": tma.store,
    "async_atomic_add": tma.atomic_add,
    "async_atomic_max": tma.atomic_max,
    "async_atomic_min": tma.atomic_min,
    "store_wait": tma.store_wait,
    "make_tensor_descriptor": tma.make_tensor_descriptor,
}

_ASYNC_COPY: dict[str, Any] = {
    "async_load": async_copy.async_copy_global_to_shared,
    "async_copy_global_to_shared": async_copy.async_copy_global_to_shared,
    "mbarrier_arrive": async_copy.mbarrier_arrive,
}

_HOPPER: dict[str, Any] = {
    "fence_async_shared": memory.fence_async_shared,
    "warpgroup_mma": wgmma.warpgroup_mma,
    "warpgroup_mma_init": wgmma.warpgroup_mma_init,
    "warpgroup_mma_wait": wgmma.warpgroup_mma_wait,
}


@functools.cache
def meanings() -> dict[int, tuple[Any, Any]]:
    """id of a builtin -> (the builtin, which keeps the id taken, and its meaning)."""
    table = {}
    homes: list[tuple[Any, dict[str, Any]]] = [
        (hopper, _HOPPER),
        (hopper.tma, _TMA),
        (hopper.mbarrier, _MBARRIER),
        (ampere_copy, _ASYNC_COPY),
        (triton, {"cdiv": language.cdiv}),
        *((module, _LANGUAGE) for module in _modules()),
    ]
    for home, names in homes:
        for name, meaning in names.items():
            builtin = getattr(home, name, None)
            if builtin is not None:
                table.setdefault(id(builtin), (builtin, meaning))
    return table


def _modules() -> list[Any]:
    """Triton's modules of language functions, those behind the public ones included."""
    inner = "core standard math _core _standard _math".split()
    roots = (tl, gl)
    return [
        *roots,
        *(getattr(root, name) for root in roots for name in inner if hasattr(root, name)),
    ]


def _call_meaning(block: Value, meaning: Any, *args: Any, **hints: Any) -> Any:
    return meaning(block, *args, **hints)


def is_builtin(value: Any) -> bool:
    """Whether only Triton's compiler could call it."""
    return callable(value) and hasattr(value, "__triton_builtin__")


def unknown(builtin: Any) -> Any:
    """A function that raises an error which names the missing builtin, once it is called."""
    name = f"{getattr(builtin, '__module__', '')}.{getattr(builtin, '__name__', builtin)}"

    def missing(*_: Any, **hints: Any) -> None:
        raise NotImplementedError(f"{name} has no meaning in the emulator yet")

    return missing


# What blocks offer as methods: x.sum(1), x.exp2(), ...
for _name in (*_ELEMENTWISE, *_SHAPES):
    setattr(Value, _name, functools.partialmethod(_call_meaning, _LANGUAGE[_name]))
