"""vLLM's plug-in: tilewise is its attention backend CUSTOM, under the name TILEWISE, too."""

import logging
import os

BACKEND = "tilewise.integrations.vllm.backend.TilewiseBackend"
log = logging.getLogger("vllm.tilewise")


def register() -> None:
    """Tells vLLM the path of the backend, which it imports where a user asks for it. On CPUs vLLM
    ignores the user's choice: TILEWISE_VLLM_CPU=1 puts tilewise in the place of its own backend.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
        if not custom.is_overridden() or custom.get_path() == BACKEND:
            register_backend(custom, BACKEND)
            # A second name, not a second member: members are pickled by value, and a new process
            # of vLLM reads its configuration before it loads plug-ins
            AttentionBackendEnum._member_map_.setdefault("TILEWISE", custom)
        elif "TILEWISE" not in AttentionBackendEnum.__members__:
            register_backend("TILEWISE", BACKEND)  # another plug-in has CUSTOM
        if os.environ.get("TILEWISE_VLLM_CPU") == "1":
            register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    except Exception as error:
        log.warning("tilewise is not among the attention backends of this vLLM: %r", error)
