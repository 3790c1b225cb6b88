"""Requests of SGLang, batch by batch, for a backend of its own classes or of fakes: tokens get
slots, queries, keys and values, and outputs are collected for each request.
"""

from types import SimpleNamespace

import torch

CONTEXT = 512


class Requests:
    """Requests 1 to `count` of a pool, whose tokens and slots are drawn.

    Args:
        names: SGLang's `ForwardMode`, and `ForwardBatch` or what takes its keywords.
        runner: with a pool of keys and values and one of requests.
        module: a `RadixAttention`.
        count: of requests.
    """

    def __init__(self, names, runner, module, *, count=4):
        self.names, self.runner, self.module = names, runner, module
        self.draw = torch.Generator().manual_seed(0)
        pages = torch.randperm(
            runner.token_to_kv_pool.size // runner.page_size, generator=self.draw
        )
        self.free = (pages + 1).tolist()  # page 0 is for requests that pad a graph
        self.slots = [[] for _ in range(count)]
        self.q, self.k, self.v = ([[] for _ in range(count)] for _ in range(3))
        self.outs = {}  # by backend

    def batch(self, counts, mode, *, drafts=None, cells=None):
        """The batch in which each request gets so many tokens; drafts are not counted as keys."""
        page, table = self.runner.page_size, self.runner.req_to_token_pool.req_to_token
        before = [len(x) for x in self.slots]
        for b, n in enumerate(counts):
            for _ in range(n):
                if len(self.slots[b]) % page == 0:
                    first = self.free.pop() * page
                self.slots[b].append(
                    first if len(self.slots[b]) % page == 0 else self.slots[b][-1] + 1
                )
            table[b + 1, : len(self.slots[b])] = torch.tensor(self.slots[b], dtype=torch.int32)
        rows = [b for b, n in enumerate(counts) if n]
        now = before if drafts else [len(x) for x in self.slots]
        slots = [s for b in rows for s in self.slots[b][before[b] :]]
        lengths, extends = [now[b] for b in rows], [counts[b] for b in rows]
        return self.names.ForwardBatch(
            forward_mode=self.names.ForwardMode[mode],
            batch_size=len(rows),
            input_ids=torch.zeros(len(slots), dtype=torch.int64),
            req_pool_indices=torch.tensor([b + 1 for b in rows], dtype=torch.int64),
            seq_lens=torch.tensor(lengths, dtype=torch.int64),
            seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
            seq_lens_sum=sum(lengths),
            out_cache_loc=torch.tensor(slots, dtype=torch.int64),
            out_cache_loc_is_physical=True,
            extend_seq_lens=torch.tensor(extends, dtype=torch.int32),
            extend_seq_lens_cpu=extends,
            extend_prefix_lens=torch.tensor([before[b] for b in rows], dtype=torch.int32),
            spec_info=SimpleNamespace(
                draft_token_num=drafts,
                draft_token=torch.zeros(len(slots), dtype=torch.int64),
                custom_mask=cells,
            )
            if drafts
            else None,
        )

    def tokens(self, counts):
        """q, k and v of a batch's new tokens, as a model gives them."""
        module, dtype = self.module, torch.float32
        shapes = dict(
            q=(module.tp_q_head_num, module.qk_head_dim),
            k=(module.tp_k_head_num, module.qk_head_dim),
            v=(module.tp_v_head_num, module.v_head_dim),
        )
        new = []
        for name, shape in shapes.items():
            rows = [torch.randn(n, *shape, generator=self.draw, dtype=dtype) for n in counts]
            for b, x in enumerate(rows):
                getattr(self, name)[b].append(x)
            new.append(torch.cat(rows))
        return new[0].flatten(1), new[1], new[2]

    def step(self, backends, counts, mode, *, drafts=None, **others):
        """One batch through each backend, which write the same keys and values; the outputs."""
        batch, (q, k, v) = self.batch(counts, mode, drafts=drafts), self.tokens(counts)
        outs = []
        for backend in backends:
            backend.init_forward_metadata(batch)
            out = backend.forward(q, k, v, self.module, batch, **others)
            assert out.shape == (len(q), self.module.tp_q_head_num * self.module.v_head_dim)
            outs.append(out)
            collected = self.outs.setdefault(id(backend), [[] for _ in counts])
            for b, rows in enumerate(out.split(counts)):
                collected[b].append(rows)
        return outs

    def whole(self, b):
        """q, k and v of all tokens of a request, (1, tokens, heads, headdim)."""
        return [torch.cat(x[b]).unsqueeze(0) for x in (self.q, self.k, self.v)]

    def out(self, backend, b):
        return torch.cat(self.outs[id(backend)][b]).unflatten(1, (self.module.tp_q_head_num, -1))


# A prompt each, single tokens, more behind a prefix with a new request, and both in one batch
STEPS = [
    ((5, 70, 17, 0), "EXTEND"),
    ((1, 1, 1, 0), "DECODE"),
    ((0, 30, 3, 40), "EXTEND"),
    ((1, 1, 1, 1), "DECODE"),
    ((1, 1, 1, 1), "DECODE"),
    ((1, 20, 1, 1), "MIXED"),
]
