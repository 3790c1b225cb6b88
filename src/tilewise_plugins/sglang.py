"""SGLang's plug-in: tilewise is its attention backend `tilewise`."""

import logging
from typing import Any

NAME = "tilewise"
log = logging.getLogger("sglang.tilewise")


def create(runner: Any) -> Any:
    """The backend of a model runner, which only a server that asks for it imports."""
    from tilewise.integrations.sglang import check_version

    check_version()
    from tilewise.integrations.sglang.backend import TilewiseBackend

    return TilewiseBackend(runner)


def register() -> None:
    """Adds the name to SGLang's lists of backends, and of those that are deterministic, before it
    reads arguments.
    """
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend(NAME)(create)
        for names in (
            choices.ATTENTION_BACKEND_CHOICES,
            choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
        ):
            if NAME not in names:
                names.append(NAME)
    except Exception as error:
        log.warning("tilewise is not among the attention backends of this SGLang: %r", error)
