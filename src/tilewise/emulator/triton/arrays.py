"""numpy, with which Triton's interpreter computes; where it is missing, what to install."""

try:
    import numpy as np
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Triton kernels compute on CPU tensors with numpy: `pip install 'tilewise[tour]'`"
    ) from error

__all__ = ["np"]
