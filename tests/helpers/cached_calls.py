"""Checked calls with a KV cache, of lists as tests write them."""

from tilewise.frontend import cached
from tilewise.frontend.scalars import Numbers
from tilewise.kernels.common.cached import NO_CACHE


def check_cached(q, k, v, table, lengths, learned, numbers, layout="bshd", scales=(None, None)):
    """`lengths` are seqused_k and cu_seqlens_q; `learned` alibi_slopes, sinks and mask_mod;
    `numbers` causal, scale, window, softcap and split_size; `scales` are those of k and of v.
    """
    causal, scale, window, softcap, split_size = numbers
    *learned, mask_mod = learned
    return cached.check_cached(
        NO_CACHE.of_tensors((q, k, v, table, *lengths, *learned, *scales)),
        Numbers(scale, softcap, causal=causal, window=window),
        split_size=split_size,
        mask_mod=mask_mod,
        layout=layout,
    )
