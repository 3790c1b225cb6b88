"""Where other libraries meet tilewise. Each module is imported on first use:
`tilewise.integrations.transformers.register()` needs no import but tilewise.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import diffusers as diffusers
    from . import dtensor as dtensor
    from . import hub as hub
    from . import transformers as transformers

_ON_FIRST_USE = ("diffusers", "dtensor", "hub", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
