"""Triton's interpreter, with every address checked. It computes with numpy."""

try:
    import numpy as numpy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Triton kernels compute on CPU tensors with numpy: `pip install 'tilewise[tour]'`"
    ) from error
