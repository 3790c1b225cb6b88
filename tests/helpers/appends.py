"""Calls of `flash_attn_with_kvcache` with new keys, drawn from a seed over all options."""

import random

import torch

INT32 = torch.int32
KEPT = ("", "", torch.float8_e4m3fn, torch.int8)
SCALES = ("none", "tensor", "head", "sequence", "row")


def ints(numbers):
    return torch.tensor(numbers, dtype=INT32)


def drawn(seed, device="cpu", room=48, heads_k=2, headdim=16):
    """The arguments of a call."""
    rng = random.Random(f"append {seed}")
    generator = torch.Generator().manual_seed(seed)
    batch, dtype = rng.choice((1, 2, 3)), rng.choice((torch.float32, torch.bfloat16, torch.float16))
    heads, kept = heads_k * rng.choice((1, 3)), rng.choice(KEPT)
    if kept and dtype == torch.float32:
        dtype = torch.bfloat16
    page_size = rng.choice((None, None, 4, 16))
    rows = batch if page_size or rng.random() < 0.5 else batch + 2
    is_moved, is_padded = rows > batch, page_size is None and rng.random() < 0.4
    most = rng.choice((1, 1, 3, 5))
    packed_q, packed_k = (rng.random() < 0.4 for _ in "qk")
    queries = [rng.randint(1, most) if packed_q else most for _ in range(batch)]
    new = [rng.randint(0, most) if packed_k else most for _ in range(batch)]
    if not sum(new):
        new[0] = 1
    before = [rng.randint(0, room - most) for _ in range(batch)]

    def made(*shape):
        return torch.randn(shape, generator=generator)

    def sequences(counts, is_packed, nheads):
        if not is_packed:
            return made(batch, most, nheads, headdim).to(dtype)
        return made(sum(counts) + rng.choice((0, 1)), nheads, headdim).to(dtype)

    shape = (rows, room) if page_size is None else (batch * room // page_size, page_size)
    caches = [made(*shape, heads_k, headdim).to(kept or dtype) for _ in "kv"]
    given = dict(
        q=sequences(queries, packed_q, heads),
        k_cache=caches[0],
        v_cache=caches[1],
        cache_seqlens=ints(before),
        causal=rng.random() < 0.5,
        window_size=rng.choice(((-1, -1), (-1, -1), (9, 2))),
        softcap=rng.choice((0.0, 0.0, 7.0)),
        return_softmax_lse=True,
    )
    given["k"], given["v"] = (sequences(new, packed_k, heads_k) for _ in "kv")
    if packed_k:  # of as many rows
        total = min(len(given["k"]), len(given["v"]))
        given["k"], given["v"] = given["k"][:total], given["v"][:total]
        given["cu_seqlens_k_new"] = ints([0, *new]).cumsum(0, dtype=INT32)
    if packed_q:
        given["cu_seqlens_q"] = ints([0, *queries]).cumsum(0, dtype=INT32)
    if rng.random() < 0.8:
        dim = rng.choice((4, 8, 12, headdim))
        positions = rng.choice((room, room, room + 20))
        angles = 6.28 * torch.rand(positions, dim // 2, generator=generator)
        kind = rng.choice((torch.float32, dtype))
        given |= dict(rotary_cos=angles.cos().to(kind), rotary_sin=angles.sin().to(kind))
        given["rotary_interleaved"] = rng.random() < 0.5
        if rng.random() < 0.3:
            given["rotary_seqlens"] = ints([rng.randrange(room - most) for _ in range(batch)])
    if page_size is not None:
        order = torch.randperm(batch * room // page_size, generator=generator)
        given["page_table"] = order.view(batch, -1).to(INT32)
    if is_moved:
        given["cache_batch_idx"] = ints(rng.sample(range(rows), batch))
    if is_padded:
        given["cache_leftpad"] = ints([rng.randint(0, n) for n in before])
    if kept:
        of_kind = {"none": None, "tensor": (), "head": (heads_k,), "sequence": (batch, heads_k)}
        of_kind["row"] = (*shape, heads_k)
        kinds = [rng.choice(SCALES) for _ in "kv"]
        if is_padded:  # where each sequence has its own, it is a row of the cache
            kinds = [x if x != "sequence" else "head" for x in kinds]
        for name, kind in zip(("k_descale", "v_descale"), kinds):
            if of_kind[kind] is not None:
                given[name] = torch.rand(of_kind[kind], generator=generator) + 0.5
    if rng.random() < 0.2:
        given["alibi_slopes"] = torch.rand(heads, generator=generator)
    if rng.random() < 0.2 and given["causal"]:
        given["attention_chunk"] = rng.randint(3, 20)
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}


WRITTEN = "k_cache", "v_cache", "k_descale", "v_descale"


def copied(given):
    """A call whose written tensors are its own."""
    return given | {name: given[name].clone() for name in WRITTEN if name in given}


def bits(x):
    """For a comparison in which NaN equals itself, and -0 is not 0."""
    x = x.contiguous()
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(kinds[x.itemsize])


def results(call, given):
    """What a call returns and writes."""
    given = copied(given)
    found = call(**given)
    return [bits(x) for x in (*found, *(given[name] for name in WRITTEN if name in given))]
