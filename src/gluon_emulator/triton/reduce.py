"""`tl.reduce` with a function of the kernel's own, a row at a time.

Triton's interpreter calls the function for each element by itself, which is most of the time of a
kernel that has one. Here it is called with whole rows, in the same order along the axis.
"""

from typing import Any

import numpy as np
from triton.runtime.interpreter import ReduceOps


def generic_reduce(self: ReduceOps, inputs: tuple[Any, ...]) -> list[Any]:
    """Stands in for the method of this name; without an axis all of them, the first one first."""
    data = [x.handle.data for x in inputs]
    rank, dtypes = data[0].ndim, [x.dtype for x in inputs]
    for axis in range(rank) if self.axis is None else (self.axis,):
        rows = list(zip(*(np.moveaxis(x, axis, 0) for x in data)))
        totals = _tensors(self, rows[0], dtypes)
        for row in rows[1:]:
            result = self.combine_fn.fn(*totals, *_tensors(self, row, dtypes))
            result = result if isinstance(result, tuple) else (result,)
            totals = [x.to(dtype.scalar) for x, dtype in zip(result, dtypes)]
        shape = data[0].shape[:axis] + (1,) + data[0].shape[axis + 1 :]
        data = [x.handle.data.reshape(shape) for x in totals]
    if not self.keep_dims:
        data = [x.item() if self.axis is None else x.squeeze(self.axis) for x in data]
    return _tensors(self, data, dtypes)


def _tensors(self: ReduceOps, data: Any, dtypes: list[Any]) -> list[Any]:
    return [self.to_tensor(x, dtype) for x, dtype in zip(data, dtypes)]
