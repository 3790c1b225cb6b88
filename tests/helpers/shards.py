"""Attention of shards beside that of one process and the oracle, feature by feature."""

import functools
import itertools

import torch
import torch.distributed as dist

import tilewise
import tilewise.distributed as td
from tilewise.testing.tolerance import assert_within, judge

BATCH, SEQLEN, HEADDIM = 2, 173, 16
DOCUMENTS = 0, 40, 41, 41, 130, SEQLEN
CAUSAL = dict(causal=True)


def far(b, h, q, k):
    return (q - k) % 3 != 1


def by_head(b, h, q, k):
    return (q + h) % 4 <= k


def damped(s, b, h, q, k):
    return s - 0.01 * (q - k)


# Arguments of the call, and how its inputs are made: those of `make`, and "docs", "dlse"
FEATURES = {
    "full": {},
    "causal": CAUSAL,
    "top left": dict(causal="top_left"),
    "window": dict(CAUSAL, window=(37, None)),
    "both sides": dict(window=(20, 9)),
    "right side": dict(window=(None, 5)),
    "softcap and scale": dict(CAUSAL, softcap=2.0, scale=0.4),
    "sinks": dict(CAUSAL, sinks=True),
    "alibi": dict(CAUSAL, alibi_slopes="heads"),
    "alibi to the right": dict(alibi_slopes="batch", window=(None, 30)),
    "lse": dict(CAUSAL, dlse=True),
    "lse and sinks": dict(window=(50, 50), sinks=True, dlse=True),
    "headdim_v": dict(CAUSAL, headdim_v=24),
    "documents": dict(CAUSAL, docs=DOCUMENTS),
    "documents, full, lse": dict(docs=DOCUMENTS, dlse=True),
    "documents, much": dict(
        *(CAUSAL,), docs=DOCUMENTS, window=(11, 0), sinks=True, softcap=3.0, alibi_slopes="heads"
    ),
    "mask_mod": dict(CAUSAL, mask_mod=far),
    "score_mod": dict(score_mod=damped),
    "documents, mask_mod": dict(docs=DOCUMENTS, mask_mod=far),
    "bf16": dict(CAUSAL, dtype=torch.bfloat16),
    "bf16, sinks": dict(CAUSAL, dtype=torch.bfloat16, sinks=True, window=(60, 0), dlse=True),
    "fp64": dict(CAUSAL, dtype=torch.float64, window=(30, 0)),
    "empty": dict(CAUSAL, seqlen=0),
    "fewer tokens than ranks": dict(CAUSAL, seqlen=3, sinks=True),
}
OF_HEADS = {  # which no method of heads serves
    "mask of heads": dict(mask_mod=by_head),
    "dropout": dict(CAUSAL, dropout_p=0.3),
    "documents, dropout": dict(docs=DOCUMENTS, dropout_p=0.3, sinks=True),
}


class Case:
    """A feature with its inputs, whole, the same on all ranks."""

    def __init__(self, nheads, nheads_k, **asked):
        seqlen, dtype = asked.pop("seqlen", SEQLEN), asked.pop("dtype", torch.float32)
        width_v = asked.pop("headdim_v", HEADDIM)
        self.docs, self.has_dlse = asked.pop("docs", None), asked.pop("dlse", False)
        draw = torch.Generator().manual_seed(1)

        def randn(*shape):
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

        batch = 1 if self.docs or seqlen > SEQLEN else BATCH
        self.q = randn(batch, seqlen, nheads, HEADDIM)
        self.k = randn(batch, seqlen, nheads_k, HEADDIM)
        self.v = randn(batch, seqlen, nheads_k, width_v)
        self.dout = randn(batch, seqlen, nheads, width_v)
        self.dlse = torch.randn(batch, nheads, seqlen, generator=draw, dtype=torch.float64)
        slopes = asked.pop("alibi_slopes", None)
        if slopes is not None:
            shape = (batch, nheads) if slopes == "batch" else (nheads,)
            asked["alibi_slopes"] = torch.rand(shape, generator=draw) / 10
        self.sinks = randn(nheads) if asked.pop("sinks", False) else None
        if "dropout_p" in asked:
            asked["dropout_rng"] = torch.tensor([3, 5])
        self.asked, self.seqlen = asked, seqlen

    def leaves(self, *tensors):
        found = [x.detach().clone().requires_grad_() for x in tensors]
        return [*found[:3], found[3] if len(found) > 3 else None]

    def run(self, attend, dtype=None, share=lambda x, dim=1: x, **more):
        """out, lse and the gradients of q, k, v (and sinks), by a function like `attention`."""
        tensors = [share(x) for x in (self.q, self.k, self.v)]
        tensors += [] if self.sinks is None else [self.sinks]
        if dtype is not None:
            tensors = [x.to(dtype) for x in tensors]
        q, k, v, sinks = self.leaves(*tensors)
        given = dict(self.asked, **more)
        if sinks is not None:
            given["sinks"] = sinks
        out, lse = attend(q, k, v, return_lse=True, **given)
        outputs, grads = [out], [share(self.dout).to(out.dtype)]
        if self.has_dlse:
            outputs, grads = [out, lse], [*grads, share(self.dlse, 2).to(lse.dtype)]
        wanted = [x for x in (q, k, v, sinks) if x is not None]
        return out.detach(), lse.detach(), *torch.autograd.grad(outputs, wanted, grads)

    @functools.cache  # noqa: B019  # of the few that a test makes
    def one_process(self, deterministic=False):
        return self.run(self._whole(tilewise.attention), deterministic=deterministic)

    @functools.cached_property
    def oracles(self):
        """What is right, and what plain code gives in the dtype of the case, by their names."""
        reference = self._whole(tilewise.attention_reference)
        exact = self.run(reference, torch.float64)
        return dict(zip(NAMES, exact)), dict(zip(NAMES, self.run(reference, upcast=False)))

    def _whole(self, attend):
        if self.docs is None:
            return attend
        starts = torch.tensor(self.docs, dtype=torch.int32)

        def packed(q, k, v, **given):
            lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
            out, lse = attend(q[0], k[0], v[0], **lengths, **given)
            return out[None], lse[None]

        return packed

    def deal(self, layout):
        return layout if self.docs is None else layout.packed(self.docs)


NAMES = "out lse dq dk dv dsinks".split()


def compare(case, layout, what, same=NAMES[:2], **more):
    """One call on this rank's rows: what is in `same` to the bit that of one process, all else
    within the budget of the oracle.
    """
    layout = case.deal(layout)

    def attend(*tensors, **given):
        return td.attention(*tensors, layout=layout, **given, **more)

    found = dict(zip(NAMES, case.run(attend, share=layout.shard)))
    whole = {}
    for name, x in found.items():
        if name == "dsinks":
            dist.all_reduce(x, group=layout.group)  # as the gradient of any weight
            whole[name] = x
        else:
            whole[name] = layout.unshard(x, 2 if name == "lse" else 1)
    if layout.rank:
        return
    one = dict(zip(NAMES, case.one_process(more.get("deterministic", False))))
    for name in same:
        if name in one:
            assert torch.equal(whole[name], one[name]), f"{what}: {name} has other bits"
    others = {name: x for name, x in whole.items() if name not in same}
    if case.seqlen == 0 or not others:
        return
    exact, plain = case.oracles
    for name, x in others.items():
        if x.dtype == torch.float64:
            torch.testing.assert_close(x, exact[name], rtol=1e-12, atol=1e-13, msg=what)
        elif name == "dsinks":  # so few numbers that the error of one plain run says little
            verdict = judge(x, exact[name], plain[name], one[name])
            assert verdict.ok, f"{what}: {name} is out of its budget: {verdict}"
        else:
            assert_within(x, exact[name], plain[name], f"{what}: {name}")


def merges(case):
    """Whether results over shards of keys can be merged."""
    return not {"alibi_slopes", "mask_mod", "score_mod", "dropout_p"} & case.asked.keys()


def deals(seqlen, group):
    """Layouts, one after the other."""
    draw = torch.Generator().manual_seed(2)
    ranks = dist.get_world_size(group)

    def shuffled():
        blocks = torch.arange(seqlen).split(19)
        order = torch.randperm(len(blocks), generator=draw).tolist()
        dealt = [[blocks[i] for i in order[rank::ranks]] for rank in range(ranks)]
        empty = torch.arange(0)
        return td.from_positions([torch.cat([*x, empty]) for x in dealt], group)

    made = [
        td.zigzag(seqlen, group),
        td.contiguous(seqlen, group),
        td.striped(seqlen, group, block=16),
        shuffled(),
    ]
    return itertools.cycle(made)
