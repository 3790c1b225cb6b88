"""`torch.nn.functional.scaled_dot_product_attention` by tilewise, for code that calls it: an
implementation in torch's registry of flash attention (`torch.nn.attention`).

While it is active, three things are other than in torch:

- `aten::scaled_dot_product_attention`, where torch chooses among its kernels, is
  `tilewise.scaled_dot_product_attention`: with masks, dropout and any dtype. On the CPU tilewise
  calls torch's kernel in turn; that operator stays as it is.
- The flash attention operators are tilewise's (`torch_flash`), for direct callers:
  `varlen_attn`, `context_parallel`, compiled programs.
- The fast path of nn.TransformerEncoder and nn.MultiheadAttention, one operator that has its own
  attention, is off.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.nn import attention

from ..errors import ArgumentError, PerformanceWarning, warn_slow
from ..frontend import sdpa
from ..ops.context_parallel import is_sharded
from . import torch_flash

Tensor = torch.Tensor
NAME = "tilewise"
DEVICES = ("CPU", "CUDA")
SDPA = "scaled_dot_product_attention"
FAST_PATHS = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
# As torch computes it, which chooses among its kernels
_torchs = torch.ops.aten.scaled_dot_product_attention.default.decompose
AGAIN = "torch.compiler.reset() recompiles them"


def enable_sdpa() -> Enabled:
    """Makes `torch.nn.functional.scaled_dot_product_attention` call tilewise, for CPU and CUDA
    tensors, from now on or inside a `with` block.

    Example:
        >>> import torch, tilewise
        >>> import torch.nn.functional as F
        >>> q = torch.randn(1, 4, 16, 32)
        >>> with tilewise.enable_sdpa():
        ...     out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        >>> torch.nn.attention.current_flash_attention_impl() is None
        True

    nn.MultiheadAttention (with `need_weights=False`), nn.TransformerEncoder (whose fast path is
    disabled), `torch.nn.attention.varlen`, `context_parallel` and functions compiled while enabled
    use it. It equals `torch.nn.attention.activate_flash_attention_impl("tilewise")`, except that
    the end of a block restores FA3 or FA4. Torch's own kernel runs calls that tilewise does not
    support, with a PerformanceWarning that says why, and calls in an `sdpa_kernel` block without
    FLASH_ATTENTION.

    Returns:
        A context manager. Blocks nest; `disable_sdpa`, or the end of the outermost block, restores
        the previous implementation.
    """
    was_enabled, before = is_enabled(), attention.current_flash_attention_impl()
    if not was_enabled:
        attention.activate_flash_attention_impl(NAME)
        _state["before"] = None if before == NAME else before
    return Enabled(was_enabled)


def disable_sdpa() -> None:
    """Reverts all calls to `enable_sdpa`: restores torch's own kernels, or FA3 or FA4 if one was
    active before.

    Example:
        >>> import torch, tilewise
        >>> _ = tilewise.enable_sdpa()
        >>> tilewise.disable_sdpa()
        >>> torch.nn.attention.current_flash_attention_impl() is None
        True

    Functions compiled while enabled keep tilewise until `torch.compiler.reset()`.
    """
    if not is_enabled():
        return
    before = _state["before"]
    _state["leaving"] = True
    try:
        attention.restore_flash_attention_impl()
    finally:
        _state["leaving"] = False
    if before is not None:
        attention.activate_flash_attention_impl(before)


def is_enabled() -> bool:
    """Whether tilewise is the active implementation."""
    return _state["installed"] is not None


class Enabled:
    """The context manager that `enable_sdpa` returns: its end reverts the call."""

    def __init__(self, was_enabled: bool) -> None:
        self._was_enabled = was_enabled

    def __enter__(self) -> None:
        return None

    def __exit__(self, *raised) -> None:
        if not self._was_enabled:
            disable_sdpa()


# What replaces torch's operators, what was active before it, and whether it leaves by itself
_state: dict[str, Any] = {"installed": None, "before": None, "leaving": False}


class _Installed:
    """What torch's registry holds while tilewise is active."""

    def __init__(self) -> None:
        import torch.compiler.config as compiler

        _say_compiled("functions compiled before keep torch's kernels")
        self.fast_path, self.tag = torch.backends.mha.get_fastpath_enabled(), compiler.cache_key_tag
        self.library = torch.library.Library("aten", "IMPL")
        try:
            _replace(self.library)
        except RuntimeError:  # torch 2.11 refuses where another library has replaced a kernel
            self.library._destroy()
            raise
        _forget_dispatch()
        torch.backends.mha.set_fastpath_enabled(False)
        # Caches of compiled programs are keyed by torch's call, not by its implementation
        compiler.cache_key_tag = f"{self.tag}+{NAME}"
        _state.update(installed=self, before=None)

    def remove(self) -> None:
        """Everything as it was; torch calls this, too, before it activates another. What is said
        comes last, for a filter may make errors of warnings.
        """
        import torch.compiler.config as compiler

        if _state["installed"] is not self:
            return
        _state["installed"] = None
        self.library._destroy()
        _forget_dispatch()
        torch.backends.mha.set_fastpath_enabled(self.fast_path)
        compiler.cache_key_tag = self.tag
        _say_compiled("functions compiled with tilewise keep it")
        if not _state["leaving"]:
            warnings.warn(
                "torch's registry of flash attention was restored, or was given another "
                "implementation: scaled_dot_product_attention is no longer tilewise's; call "
                "tilewise.enable_sdpa() again, after what activates the other",
                PerformanceWarning,
                stacklevel=3,
            )


attention.register_flash_attention_impl(NAME, register_fn=_Installed)


def _replace(library: torch.library.Library) -> None:
    """Puts all that is ours at its dispatch keys."""
    with _overriding():
        for key in DEVICES:
            torch_flash.install(library, key)
            _announce_fast_paths(library, key)
            for part in (key, f"Autograd{key}"):
                library.impl(SDPA, _attend, part)
        library.impl(SDPA, _transformed, "FuncTorchVmapMode")


# the operator


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's operator, computed by tilewise."""
    options: dict[str, Any] = dict(attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal)
    options.update(scale=scale, enable_gqa=enable_gqa)
    if not torch.backends.cuda.flash_sdp_enabled():
        return _torchs(query, key, value, **options)  # as sdpa_kernel asked
    if _is_sharded(query):
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            return _torchs(query, key, value, **options)
    if peek_interpreter_stack() is not None:
        return _transformed(query, key, value, **options)
    try:
        return sdpa.scaled_dot_product_attention(query, key, value=value, **options)
    except (ArgumentError, NotImplementedError) as error:
        if is_sharded():  # torch's own kernel would attend within the shard
            raise
        reason = str(error)
    out = _torchs(query, key, value, **options)
    warn_slow(f"torch's own kernel computes this scaled_dot_product_attention: {reason}")
    return out


def _transformed(*args, **options) -> Tensor:
    """Computes inside vmap, grad and other functorch transforms, which look below this operator."""
    out = _torchs(*args, **options)
    warn_slow(
        "torch's own kernels compute scaled_dot_product_attention inside torch.func's "
        "transforms: call tilewise.scaled_dot_product_attention there"
    )
    return out


def _is_sharded(query: Tensor) -> bool:
    """Whether torch's context parallelism has this, which calls the flash operator itself."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(query, module.DTensor):
        return False
    handlers = getattr(module.DTensor._op_dispatcher, "_custom_op_handlers", {})
    return getattr(torch.ops.aten, torch_flash.DENSE).default in handlers


# the fast path


def _announce_fast_paths(library: torch.library.Library, key: str) -> None:
    """Warns when the fast path is used again that its attention is torch's."""
    for name in FAST_PATHS:
        for part in (key, f"NestedTensor{key}"):
            earlier = torch_flash.before(name, part)
            if earlier is not None:
                announced = functools.partial(_announced, earlier)
                library.impl(name, announced, part, with_keyset=True)


def _announced(earlier: Any, keyset: Any, *args, **options) -> Any:
    warn_slow(
        "the fast path of nn.TransformerEncoder and nn.MultiheadAttention in eval (aten::"
        f"{' and aten::'.join(FAST_PATHS)}) has an attention of its own, which is torch's: call "
        "torch.backends.mha.set_fastpath_enabled(False)"
    )
    return earlier.call_boxed(keyset, *args, **options)


def _say_compiled(what: str) -> None:
    """Warns that compiled functions keep the implementation that they were compiled with."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    if counters.get("stats", {}).get("unique_graphs"):
        warn_slow(f"enable_sdpa and torch.compile: {what}; {AGAIN}")


def _forget_dispatch() -> None:
    """torch's dispatcher in Python, which compilers trace by, keeps what it found for each key."""
    for name in (SDPA, *FAST_PATHS, *torch_flash.KERNELS):
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            packet.default._dispatch_cache.clear()


@contextlib.contextmanager
def _overriding():
    """torch says once a process that a kernel is replaced, which is what we are here for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        warnings.filterwarnings("ignore", "Overriding a previously registered kernel")
        yield
