"""transformers' continuous batching: `generate_batch`, and its manager.

It takes eager attention, SDPA and names with "flash" in them; for those it packs the step's tokens
and calls flash attention's functions, `flash_attn_varlen_func` over keys that it gathers, and on a
GPU, in steps that only decode, `flash_attn_with_kvcache` over its pages. So there is a second name,
transformers' own flash attention over our functions, and a model loaded with tilewise uses it
during continuous batching, as one loaded with eager attention uses "paged|eager".
"""

from __future__ import annotations

import functools
from typing import Any

import transformers.modeling_flash_attention_utils as flash
from transformers import AttentionInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from ...frontend.flash_attn import flash_attn_func, flash_attn_varlen_func
from ...frontend.kv_cache import flash_attn_with_kvcache

# Of our names, those of flash attention over our functions; "2" says which version's arguments
_twins: dict[str, str] = {}


def register(name: str) -> None:
    """Lets models that ask for `name` into continuous batching, where transformers has it as 5.23
    has; other versions refuse the name.
    """
    try:
        from transformers.generation.continuous_batching import ContinuousBatchingManager
    except ImportError:
        return
    manager: Any = ContinuousBatchingManager  # one of its methods is replaced
    is_known = hasattr(flash, "_lazy_imports") and hasattr(flash, "_flash_with_kvcache_fn")
    if not is_known or not hasattr(manager, "switch_to_cb_friendly_attn"):
        return
    if not _twins:
        flash._lazy_imports = _with_ours(flash._lazy_imports)
        manager.switch_to_cb_friendly_attn = _switch_or(manager.switch_to_cb_friendly_attn)
    _twins[name] = f"{name}_flash_2"
    AttentionInterface.register(_twins[name], flash_attention_forward)
    mask = ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"]
    AttentionMaskInterface.register(_twins[name], mask)


def _with_ours(lazy_imports):
    """Where transformers looks for flash attention's functions by name."""

    @functools.wraps(lazy_imports)
    def imports(implementation, *args, **kwargs):
        if implementation not in _twins.values():
            return lazy_imports(implementation, *args, **kwargs)
        functions = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        return *functions, flash._pad_input, flash._unpad_input

    return imports


def _switch_or(switch):
    """Where a manager gives its model an attention that it can use."""

    @functools.wraps(switch)
    def switch_ours(manager, model, *args, **kwargs):
        name = model.config._attn_implementation
        if name not in _twins or not _takes_flash(model):
            return switch(manager, model, *args, **kwargs)
        model.set_attn_implementation(_twins[name])
        manager._original_attn_impl = name  # what the model gets back when the manager stops
        return None

    return switch_ours


def _takes_flash(model) -> bool:
    """Whether the model computes with flash attention, of any implementation."""
    if getattr(model, "_compatible_flash_implementations", None) is not None:
        return False
    return getattr(model, "_supports_flash_attn", False) and model._can_set_attn_implementation()
