"""Gluon kernels for Hopper, run on CPU tensors: barriers, TMA, wgmma and partitions, in Python.

A kernel's parts run as they would at some moment on a GPU, in an order drawn from a seed, and what
the hardware leaves undefined is made to show: copies land late, unwritten memory is NaN.

>>> import torch
>>> from triton.experimental import gluon
>>> from triton.experimental.gluon import language as gl
>>> from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
>>> from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
>>> tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
>>> tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
>>> @gluon.jit
... def copy_kernel(x_desc, y_desc):
...     tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
...     full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
...     mbarrier.init(full, count=1)
...     fence_async_shared()
...     mbarrier.expect(full, x_desc.block_type.nbytes)
...     tma_load(x_desc, [0, 0], full, tile)
...     mbarrier.wait(full, 0)
...     tma_store(y_desc, [0, 0], tile)
...     tma.store_wait(0)
>>> x, y = torch.randn(16, 64), torch.empty(16, 64)
>>> layout = gl.NVMMASharedLayout.get_default_for([16, 64], gl.float32)
>>> x_desc, y_desc = (TensorDescriptor.from_tensor(t, [16, 64], layout) for t in (x, y))
>>> def show(cta, partition, event, detail):
...     print(f"{event:16}{detail}")
>>> emulate(copy_kernel, seed=0, trace=show)[(1,)](x_desc, y_desc)
init            full[0] for 1 arrival
fence           1 writes
expect          full[0] 4096 bytes
TMA load        tile from [0, 0], 4096 bytes
wait            full[0] phase 0
TMA load landed tile from [0, 0]
passed          full[0] phase 0
TMA store       tile to [0, 0]
store wait      1 stores
>>> torch.equal(x, y)
True

With phase 1 to wait for, some seeds fail and some copy NaN; with 4097 bytes to expect, all raise
`Deadlock`, which names the waiting partitions, their barriers and source lines. `breakpoint()`
works in a kernel.

What is modelled, one idea a file: `machine` has CTAs, partitions and the order they run in;
`memory` shared memory and `fence_async_shared`; `barriers`, `tma` and `wgmma` these; `pointers`
global memory with every address checked; `values` Triton's types and arithmetic; `language` and
`vocabulary` what the builtins mean; `emulate` the launch.

What is not: layouts, registers, warps within a partition, clusters, time. Compile the kernel as
well.
"""

from .emulate import emulate
from .machine import Deadlock, HopperError

__all__ = ["Deadlock", "HopperError", "emulate"]
