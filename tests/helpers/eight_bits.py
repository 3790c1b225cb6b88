"""Caches of 8 bits for tests, with scales of every kind."""

from typing import NamedTuple

import torch

from .caches import Sequences, contiguous, paged, sequences

DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
KINDS = ("none", "tensor", "head", "sequence", "row")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
POISON = {torch.float8_e4m3fn: float("nan"), torch.int8: -128}  # rows that are not in use


class Quantised(NamedTuple):
    """Sequences whose keys and values have 8 bits."""

    s: Sequences
    k_scales: list[torch.Tensor]  # (seqlen_k, nheads_k), whatever the kind
    v_scales: list[torch.Tensor]
    kind: str

    def only(self, *rows):
        """Some sequences, in an order."""
        chosen = Sequences(*([x[i] for i in rows] for x in self.s))
        scales = ([x[i] for i in rows] for x in self[1:3])
        return Quantised(chosen, *scales, self.kind)

    def cut(self, row, first, stop):
        """Queries [first, stop) by position of one sequence, which ends with the last of them."""
        begin = len(self.s.k[row]) - len(self.s.q[row])
        q = self.s.q[row][first - begin : stop - begin]
        k, v, k_scale, v_scale = (
            x[row][:stop] for x in (self.s.k, self.s.v, self.k_scales, self.v_scales)
        )
        return Quantised(Sequences([q], [k], [v]), [k_scale], [v_scale], self.kind)

    def cache(self, page_size=None, seed=0):
        """The arguments of `attention` but q; all that is not in use is poisoned."""
        at = dict(seqused_k=self.s.lengths, cu_seqlens_q=self.s.starts)
        by_row = Sequences(self.s.q, self.k_scales, self.v_scales)
        fill = POISON[self.s.k[0].dtype]
        if page_size is None:
            k, v = (contiguous(x, fill=fill) for x in self.s[1:])
            scales = [contiguous(x) for x in by_row[1:]]
        else:
            k, v, at["page_table"] = paged(self.s, page_size, seed, fill)
            scales = paged(by_row, page_size, seed)[:2]
        for name, rows, found in zip(("k_descale", "v_descale"), by_row[1:], scales):
            if self.kind == "tensor":
                found = rows[0][0, 0]
            elif self.kind == "head":
                found = rows[0][0]
            elif self.kind == "sequence":
                found = torch.stack([x[0] for x in rows])
            at[name] = None if self.kind == "none" else found
        return dict(k=k, v=v, **at)


def quantised(queries, lengths, dtype, kind, heads=(4, 2), headdims=(16, 16), q_dtype=None, seed=0):
    """Normal q, and 8 bits for normal k and v: codes times scales of about their size."""
    q, k, v = sequences(queries, lengths, heads, headdims, seed=seed)
    q = [x.to(torch.bfloat16 if q_dtype is None else q_dtype) for x in q]
    generator, found = torch.Generator().manual_seed(seed), []
    several = torch.rand(2, len(k), heads[1], generator=generator) + 0.5
    for xs, of_sequence in zip((k, v), several):
        size, codes, scales = LARGEST[dtype] / 4, [], []
        for row, x in enumerate(xs):
            scale = torch.rand(x.shape[:2], generator=generator) + 0.5
            if kind != "row":
                scale = of_sequence[row if kind == "sequence" else 0].expand_as(scale)
            if kind in ("tensor", "none"):
                scale = scale[:, :1].expand_as(scale)
            scale = torch.ones_like(scale) if kind == "none" else scale / size
            code = (x * (1 if kind == "none" else size)).round()
            most = LARGEST[dtype]  # past it, torch before 2.13 makes NaN of e4m3
            codes.append(code.clamp(-most, most).to(dtype))
            scales.append(scale)
        found.append((codes, scales))
    (k, k_scales), (v, v_scales) = found
    return Quantised(Sequences(q, k, v), k_scales, v_scales, kind)
