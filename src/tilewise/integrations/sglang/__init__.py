"""tilewise as an attention backend of SGLang, which `tilewise_plugins.sglang` registers: a batch's
tensors are in `metadata`; what is refused, and the calls of a layer, in `backend`.
"""

import re
from importlib.metadata import version

FIRST, BEFORE = (0, 5, 23), (0, 6)  # tests/engines runs the first


def check_version(installed: str | None = None) -> None:
    """Refuses a release of SGLang whose interface tilewise does not know.

    Raises:
        NotImplementedError: says which releases it knows.
    """
    installed = version("sglang") if installed is None else installed
    if not FIRST <= tuple(int(n) for n in re.findall(r"\d+", installed)[:3]) < BEFORE:
        raise NotImplementedError(
            f"tilewise supports SGLang 0.5.23 to 0.5.x and this is {installed}: install one of "
            "those, or a newer tilewise"
        )
