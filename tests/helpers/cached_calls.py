"""Checked calls with a KV cache, of lists as tests write them."""

from tilewise.frontend import cached
from tilewise.frontend.scalars import Numbers
from tilewise.kernels.common.cached import Cached
from tilewise.problem import Extras


def check_cached(q, k, v, table, lengths, learned, numbers, layout="bshd", scales=(None, None)):
    """`lengths` are seqused_k and cu_seqlens_q; `learned` alibi_slopes, sinks and mask_mod;
    `numbers` causal, scale, window, softcap and split_size; `scales` are those of k and of v.
    """
    causal, scale, window, softcap, split_size = numbers
    (slopes, sinks, mask_mod), (used, starts), (k_descale, v_descale) = learned, lengths, scales
    extras = Extras(slopes, sinks, seqused_k=used, cu_seqlens_q=starts)
    return cached.check_cached(
        Cached(q, k, v, table, extras=extras, k_descale=k_descale, v_descale=v_descale),
        Numbers(scale, softcap, causal=causal, window=window),
        split_size=split_size,
        mask_mod=mask_mod,
        layout=layout,
    )
