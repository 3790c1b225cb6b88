"""tilewise as a hub kernel, for programs that run without user code.

The `kernels` library loads attention from a folder with a fixed structure. This package has one,
`FOLDER`, and LOCAL_KERNELS in the environment maps a name with a "/" to it::

    export LOCAL_KERNELS=$(tilewise hub)
    trl sft --attn_implementation tilewise/attention ...

Nothing is downloaded. transformers calls the folder's functions as it calls flash attention's, also
with a paged cache; `tilewise.integrations.transformers` supports more kinds of masks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ArgumentError

NAME = "tilewise/attention"
FOLDER = Path(__file__).parent / "hub_kernel"


def local_kernels(*names: str) -> str:
    """LOCAL_KERNELS with entries for `names` that point to this package's folder.

    Example:
        >>> local_kernels("kernels-community/flash-attn2").endswith("hub_kernel")
        True

    Args:
        names: "owner/name" each; "tilewise/attention" by default.

    Raises:
        ArgumentError: a name has another form.
    """
    names = names or (NAME,)
    for name in names:
        if not re.fullmatch(r"[^/:=@\s]+/[^/:=@\s]+", name):
            raise ArgumentError(f"{name!r}: it must be owner/name, as kernels on the hub have")
    entries = os.environ.get("LOCAL_KERNELS", "").split(":")
    kept_entries = [entry for entry in entries if entry and entry.split("=")[0] not in names]
    return ":".join([*kept_entries, *(f"{name}={FOLDER}" for name in names)])
