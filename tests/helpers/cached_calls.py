"""Checked calls with a KV cache, of lists as tests write them."""

from tilewise.frontend import cache_checks
from tilewise.kernels.common.cached import NO_CACHE


def check_cached(q, k, v, table, lengths, learned, numbers, layout="bshd", scales=(None, None)):
    """`lengths` are seqused_k and cu_seqlens_q; `learned` alibi_slopes, sinks and mask_mod;
    `numbers` causal, scale, window, softcap and split_size; `scales` are those of k and of v.
    """
    causal, scale, window, softcap, split_size = numbers
    *learned, mask_mod = learned
    return cache_checks.check_cached(
        NO_CACHE.of_tensors((q, k, v, table, *lengths, *learned, *scales)),
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        split_size=split_size,
        mask_mod=mask_mod,
        layout=layout,
    )
