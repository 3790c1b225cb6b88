"""tilewise under diffusers: `model.set_attention_backend("tilewise")` after one `register()`.

diffusers keeps backend names in an enum and their functions in a table. Both are private, so
untested versions are refused, and so is a table with another structure.
"""

from __future__ import annotations

import enum
import importlib
import sys
from typing import Any

import torch

from ...errors import ArgumentError, require
from .call import attend

Tensor = torch.Tensor

NAME = "tilewise"
TESTED = ("0.40", "0.41", "0.42")


def register(*, untested: bool = False) -> None:
    """Registers "tilewise" as an attention backend of diffusers; calling it again changes nothing.

    Example:
        >>> from diffusers import DiTTransformer2DModel
        >>> from tilewise.integrations import diffusers
        >>> diffusers.register()
        >>> sizes = dict(num_attention_heads=1, attention_head_dim=8, num_layers=1, sample_size=8)
        >>> model = DiTTransformer2DModel(**sizes)  # or a pipeline's `pipe.transformer`
        >>> model.set_attention_backend("tilewise")

    Args:
        untested: try a version of diffusers that tilewise is not tested with.
    """
    if is_registered():
        return
    require("tilewise.integrations.diffusers", "diffusers")
    version = importlib.import_module("diffusers").__version__
    among = ", ".join(f"{minor}.*" for minor in TESTED)
    if not untested and ".".join(version.split(".")[:2]) not in TESTED:
        raise NotImplementedError(
            f"diffusers {version}: its table of backends is private, and tilewise is tested with "
            f"{among}; install one of these, or try register(untested=True)"
        )
    try:
        dispatch = importlib.import_module("diffusers.models.attention_dispatch")
        _add(dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry)
    except (AttributeError, ImportError, TypeError) as error:
        raise NotImplementedError(
            f"diffusers {version}: its table of backends is not the one of {among} ({error}); "
            "install one of these"
        ) from error


def is_registered() -> bool:
    """Whether `register` was called in this process."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is None:
        return False
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    return getattr(registry, "_backends", {}).get(NAME) is attention_forward


def _add(names: type[enum.Enum], registry) -> None:
    """A member of the enum, and its function in the table."""
    if not (issubclass(names, str) and issubclass(names, enum.Enum)):
        raise TypeError("AttentionBackendName is no enum of strings")
    if NAME in names._value2member_map_:
        raise TypeError(f"AttentionBackendName has a {NAME!r} of its own")
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    registry.register(member, supports_context_parallel=True)(attention_forward)
    type.__setattr__(names, member._name_, member)
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[NAME] = member


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config=None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The attention function: (batch, seqlen, nheads, headdim) in and out, and with `return_lse`
    lse as (batch, seqlen, nheads). Causal is top-left, as in torch.
    """
    mask = over_heads(attn_mask, query, key=key)
    flags: dict[str, Any] = dict(dropout_p=dropout_p, is_causal=is_causal)
    flags.update(scale=scale, enable_gqa=enable_gqa)
    if getattr(_parallel_config, "context_parallel_config", None) is None:
        out, lse = attend(query, key, value=value, mask=mask, **flags)
        return (out, lse) if return_lse else out
    from .parallel import attend_shards

    flags.update(return_lse=return_lse, config=_parallel_config)
    return attend_shards(query, key, value=value, mask=mask, **flags)


def over_heads(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask that broadcasts over (batch, nheads, seqlen_q, seqlen_k), of any that diffusers has:
    one of (batch, seqlen_k) says which keys are padding.
    """
    for name, x in (("query", query), ("key", key)):
        if x.dim() != 4:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}: it must be (batch, seqlen, nheads, headdim)"
            )
    if not isinstance(attn_mask, Tensor):
        return attn_mask
    if attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        return attn_mask[:, None, None]
    if attn_mask.dim() == 3 and attn_mask.shape[0] != 1:
        raise ArgumentError(
            f"attn_mask has shape {tuple(attn_mask.shape)}, which may begin with batch or nheads: "
            "pass four dimensions, attn_mask[:, None] for the batch and attn_mask[None] for heads"
        )
    return attn_mask
