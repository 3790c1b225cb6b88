"""tilewise under transformers: `attn_implementation="tilewise"` after one `register()`.

Two functions are registered under one name. The mask function runs once per forward and returns a
`Visible`; the attention function runs in each layer and applies it. Without the first, transformers
builds no mask for a custom name, and silently ignores padding. Sequences packed in one row run as
packed sequences: see `packed`. Masks other than bands are stored: see `stored`. A call that cannot
be exact raises an error with a reason; `check(model)` lists in advance which layers will call
tilewise.
"""

from __future__ import annotations

import sys

import torch

from ...errors import ArgumentError, require
from .forward import attention_forward
from .layers import LayerReport, check_model
from .masks import visible_keys


def register(name: str = "tilewise") -> None:
    """Registers `attn_implementation=name` with transformers; calling it again changes nothing.

    Example:
        >>> from transformers import AutoModel, BertConfig
        >>> from tilewise.integrations import transformers
        >>> transformers.register()
        >>> config = BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
        >>> model = AutoModel.from_config(config, attn_implementation="tilewise")

    `AutoModel.from_pretrained(path, attn_implementation="tilewise")` takes the name, too.

    Args:
        name: a name without "flash" and "/"; transformers would look for those on its hub.

    Raises:
        ArgumentError: the name has one of these.
    """
    require("tilewise.integrations.transformers", "transformers")
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    if "flash" in name or "/" in name or "|" in name:
        raise ArgumentError(
            f"name={name!r}: transformers looks on its hub for names with 'flash' or '/' in them"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, visible_keys)
    from . import continuous
    from .families import fill_tables

    fill_tables(name)
    continuous.register(name)


def is_registered(name: str = "tilewise") -> bool:
    """Whether `register` was called in this process."""
    library = sys.modules.get("transformers")
    return library is not None and library.AttentionInterface().get(name) is attention_forward


def check(model: torch.nn.Module) -> LayerReport:
    """Lists a model's attention modules, and for each whether it will call tilewise.

    Example:
        >>> from transformers import AutoModel, BertConfig
        >>> from tilewise.integrations import transformers
        >>> transformers.register()
        >>> config = BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=3)
        >>> model = AutoModel.from_config(config, attn_implementation="tilewise")
        >>> print(transformers.check(model))
        3 BertSelfAttention: tilewise (it calls the attention that its config names)

    It is found from the code, without a run: a call may still be refused for its arguments.

    Args:
        model: a model of transformers.

    Returns:
        `layers`, each with a name, a kind (its class), the reason, and the attention that will run,
        which is "tilewise"; "refused", where the model adds masks that only tilewise's attention
        reads; "own", where the layer ignores the name; "unknown"; or the name that the model was
        loaded with.
    """
    return check_model(model, is_registered)
