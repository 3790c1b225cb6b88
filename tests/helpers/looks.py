"""Calls of attention in all their looks, which decide what a launch is compiled for and passed."""

import torch

from tilewise.mods.flatten import modifiers_of
from tilewise.problem import NO_EXTRAS, Extras, Scalars, describe
from tilewise.sparse import create_block_mask

BF16 = torch.bfloat16


def dense(**given):
    return (2, 256, 4, 64), (2, 256, 2, 64), given


def packed(**given):
    return (1, 300, 4, 64), (1, 400, 2, 64), given


def counts(n):
    return torch.full((n,), 7, dtype=torch.int32)


def starts(n):
    return torch.arange(n + 1, dtype=torch.int32)


def moved(x, by):
    """The same numbers, `by` elements past an aligned address."""
    fit = torch.zeros(x.numel() + by, dtype=x.dtype)
    return fit[by:].view(x.shape).copy_(x)


def reads_tables(block_mask):
    """A mask and a score function, each with a tensor of its own, of a call's own making."""
    documents, table = torch.arange(256, dtype=torch.int32) // 50, torch.randn(256)

    def score(s, b, h, q_idx, kv_idx):
        return s + table[q_idx]

    def mask(b, h, q_idx, kv_idx):
        return documents[q_idx] == documents[kv_idx]

    sizes = 2, 4, 256, 256
    if block_mask:
        made = create_block_mask(mask, *sizes)
        return modifiers_of(None, score, made, sizes)
    return modifiers_of(mask, score, None, sizes)


CALLS = {
    "plain": dense,
    "in order": lambda: dense(deterministic=True),
    "wide": lambda: ((1, 64, 2, 256), (1, 70, 1, 256), dict(sinks=torch.randn(2))),
    "slopes": lambda: dense(alibi_slopes=torch.rand(4)),
    "slopes of batches": lambda: dense(alibi_slopes=torch.rand(2, 4)),
    "sinks": lambda: dense(sinks=torch.randn(4)),
    "moved sinks": lambda: dense(sinks=moved(torch.randn(4), 1)),
    "padded": lambda: dense(seqused_k=counts(2)),
    "bias": lambda: dense(bias=torch.randn(2, 4, 256, 256)),
    "bias in pairs": lambda: dense(bias=torch.randn(2, 1, 256, 256).bfloat16()),
    "bias of its own": lambda: dense(bias=torch.randn(2, 4, 256, 256).bfloat16()),
    "moved bias": lambda: dense(bias=moved(torch.randn(1, 4, 256, 256), 1)),
    "shared bias": lambda: dense(bias=torch.randn(1, 1, 1, 256).expand(2, 4, 256, 256)),
    "bias by columns": lambda: dense(bias=torch.randn(1, 4, 256, 256).bfloat16().transpose(2, 3)),
    "dropout": lambda: dense(dropout_rng=torch.tensor([1, 2])),
    "packed": lambda: packed(cu_seqlens_q=starts(5), cu_seqlens_k=starts(5)),
    "one starts for both": lambda: packed(
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts(5))
    ),
    "packed and all": lambda: packed(
        **dict(cu_seqlens_q=starts(5), cu_seqlens_k=moved(starts(5), 1), seqused_q=counts(5)),
        **dict(seqused_k=counts(5), alibi_slopes=torch.rand(4), sinks=torch.randn(4)),
    ),
    "functions": lambda: dense(modifiers=reads_tables(False)),
    "block mask": lambda: dense(modifiers=reads_tables(True)),
    "all": lambda: dense(
        modifiers=reads_tables(True),
        **dict(bias=torch.randn(2, 1, 256, 256), dropout_rng=torch.tensor([5, 6])),
        **dict(sinks=torch.randn(4), alibi_slopes=torch.rand(4)),
    ),
}


def call_of(name):
    """Problem, scalars, q, k, v and extras, of new tensors."""
    of_q, of_k, given = CALLS[name]()
    deterministic = given.pop("deterministic", False)
    modifiers = given.pop("modifiers", modifiers_of(None, None, None, (0, 0, 0, 0)))
    extras = Extras(**given, captured=modifiers.captured)
    extras = NO_EXTRAS if extras == NO_EXTRAS else extras
    q, k, v = (torch.randn(shape).to(BF16) for shape in (of_q, of_k, of_k))
    has_bias_grad = extras.bias is not None
    scalars = Scalars(0.125, dropout_p=0.0 if extras.dropout_rng is None else 0.5)
    flags = "bottom_right", deterministic, modifiers.mods, has_bias_grad
    return describe(q, k, v, extras, scalars, *flags), scalars, (q, k, v), extras
