"""What lesson 06 calls: attention over packed sequences, and tile numbers."""

import tilewise
from tilewise.testing.schedule import tiles as tiles
from tilewise.tile.varlen import Hint as Hint
from tilewise.tile.varlen import varlen_tile as varlen_tile

from . import assert_within, library_here


def attention(q, k, v, cu_seqlens):
    """Causal self-attention of packed sequences, by the library's Triton kernel."""
    with library_here():
        return tilewise.attention(
            *(q, k, v),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            causal=True,
            backend="portable",
        )


def error_of(out, q, k, v, start, stop):
    """The largest error of rows start to stop, against the sequence in fp64."""
    alone = [x[None, start:stop] for x in (q, k, v)]
    exact = tilewise.attention_reference(*(x.double() for x in alone), causal=True)
    exact = exact[0]
    plain = tilewise.attention_reference(*alone, causal=True, upcast=False)[0]
    assert_within(out[start:stop], exact, plain, f"sequence at {start}")
    return (out[start:stop].double() - exact).abs().max().item()
