"""KV caches: appends new keys and values; attention over a cache is `tilewise.attention`.

>>> import torch, tilewise
>>> from tilewise import cache
>>> k_cache, v_cache = torch.zeros(2, 6, 16, 2, 32).unbind(0)  # 6 pages of 16 keys, 2 heads
>>> page_table = torch.tensor([[5, 0], [3, 3]], dtype=torch.int32)
>>> seqused_k = torch.tensor([20, 1], dtype=torch.int32)  # with the new ones
>>> q, k, v = torch.randn(2, 1, 4, 32), torch.randn(2, 1, 2, 32), torch.randn(2, 1, 2, 32)
>>> where = dict(page_table=page_table, seqused_k=seqused_k)
>>> cache.append(k_cache, v_cache, k, v, **where)
>>> tilewise.attention(q, k_cache, v_cache, causal=True, **where).shape
torch.Size([2, 1, 4, 32])
"""

from .frontend.append import append
from .kernels.common.appended import Append
from .tile.rotary import Rotary

__all__ = ["Append", "Rotary", "append"]
