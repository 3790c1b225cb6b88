"""torchvision by name only, as its wheels need another torch: transformers and SGLang import names
of it that text models do not use.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.28.0"


class Names(ModuleType):
    """A module that has every name, each of a class of its own."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or type(name, (), {})


class InterpolationMode:
    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC = "nearest", "nearest-exact", "bilinear", "bicubic"
    BOX, HAMMING, LANCZOS = "box", "hamming", "lanczos"


io, ops, models = (Names(f"torchvision.{name}") for name in ("io", "ops", "models"))
transforms = Names("torchvision.transforms")
transforms.InterpolationMode = InterpolationMode
for name in ("functional", "v2", "v2.functional"):
    Names(f"torchvision.transforms.{name}").InterpolationMode = InterpolationMode
