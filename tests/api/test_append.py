"""Appending to a cache: where keys go, how they are turned, what is skipped and refused."""

import pytest
import torch
from helpers.caches import INT32, contiguous, paged, sequences

import tilewise
from tilewise import cache
from tilewise.frontend import values
from tilewise.tile.rotary import rotate

OP = torch.ops.tilewise.flash_attn_cache_append.default
NEW, LENGTHS = [3, 0, 1, 20], [21, 5, 1, 40]


def new_and_old(page_size, seed=0):
    """Sequences, their caches without the new keys, the new keys, packed."""
    s = sequences([1] * 4, LENGTHS, seed=seed)
    if page_size is None:
        k_cache, v_cache, table = contiguous(s.k, 50), contiguous(s.v, 50), None
    else:
        k_cache, v_cache, table = paged(s, page_size)
    expected = k_cache.clone(), v_cache.clone()
    new = [torch.cat([x[len(x) - n :] for n, x in zip(NEW, xs)]) for xs in (s.k, s.v)]
    for b, (n, length) in enumerate(zip(NEW, LENGTHS)):
        for j in range(length - n, length):
            at = (b, j) if table is None else (table[b, j // page_size], j % page_size)
            k_cache[at], v_cache[at] = 7.0, 7.0
    return s, (k_cache, v_cache, table), new, expected


def starts_of(counts):
    return torch.tensor([0, *counts]).cumsum(0, dtype=INT32)


def assert_same(found, expected):
    for x, y in zip(found, expected):
        assert torch.equal(x.nan_to_num(5.0), y.nan_to_num(5.0))


@pytest.mark.parametrize("page_size", [None, 1, 3, 16, 64])
def test_the_last_keys_of_each_sequence(page_size):
    s, (k_cache, v_cache, table), (k, v), expected = new_and_old(page_size)
    where = dict(page_table=table, seqused_k=s.lengths, cu_seqlens_q=starts_of(NEW))
    assert cache.append(k_cache, v_cache, k, v, **where) is None
    assert_same((k_cache, v_cache), expected)


@pytest.mark.parametrize("page_size", [None, 4])
def test_a_batch_of_keys_is_the_same_as_packed_ones(page_size):
    s = sequences([2, 2], [9, 4])
    found = []
    for is_packed in (False, True):
        k_cache, v_cache, table = (
            paged(s, page_size) if page_size else (contiguous(s.k, 12), contiguous(s.v, 12), None)
        )
        k, v = torch.randn(2, 2, 2, 2, 16, generator=torch.Generator().manual_seed(1)).unbind(0)
        where = dict(page_table=table, seqused_k=s.lengths)
        if is_packed:
            k, v = k.flatten(0, 1), v.flatten(0, 1)
            where["cu_seqlens_q"] = starts_of([2, 2])
        cache.append(k_cache, v_cache, k, v, **where)
        found.append((k_cache, v_cache))
    assert_same(*found)


def test_strided_caches_are_written_in_place():
    """K and V side by side in one row, heads before rows."""
    s, (k_cache, v_cache, table), (k, v), expected = new_and_old(8)
    rows = torch.cat([k_cache, v_cache], -1).transpose(1, 2).contiguous().transpose(1, 2)
    caches = rows[..., :16], rows[..., 16:]
    where = dict(page_table=table, seqused_k=s.lengths, cu_seqlens_q=starts_of(NEW))
    cache.append(*caches, k, v, **where)
    assert_same((rows[..., :16], rows[..., 16:]), expected)


def test_slots():
    k_cache, v_cache = torch.zeros(2, 4, 8, 2, 16).unbind(0)
    k, v = torch.randn(2, 5, 2, 16).unbind(0)
    slots = torch.tensor([31, -1, 0, -(2**40), 9])
    cache.append(k_cache, v_cache, k, v, slots=slots)
    flat = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    for x, new in zip(flat, (k, v)):
        assert torch.equal(x[[31, 0, 9]], new[[0, 2, 4]])
        assert x.count_nonzero() == 3 * 2 * 16


def test_of_keys_with_one_slot_the_last_is_kept():
    k_cache, v_cache = torch.zeros(2, 4, 8, 2, 16).unbind(0)
    k, v = torch.randn(2, 200, 2, 16).unbind(0)
    slots = torch.randint(0, 8, (200,))
    cache.append(k_cache, v_cache, k, v, slots=slots)
    for slot in range(8):
        last = (slots == slot).nonzero().max()
        assert torch.equal(k_cache[0, slot], k[last]) and torch.equal(v_cache[0, slot], v[last])


def test_keys_without_a_place_are_skipped(monkeypatch):
    k_cache, v_cache = torch.zeros(2, 3, 4, 1, 8).unbind(0)
    table = torch.tensor([[2, -1], [2**31 - 1, 0]], dtype=INT32)
    k = v = torch.ones(2, 6, 1, 8)
    used = torch.tensor([9, 6], dtype=INT32)  # room for 8
    few = torch.tensor([0, 2], dtype=INT32)  # fewer than there are new ones
    with monkeypatch.context() as unread:  # as on a GPU
        unread.setattr(values, "knows_values", lambda x: False)
        cache.append(k_cache, v_cache, k, v, page_table=table, seqused_k=used)
        assert k_cache[2, 3].all() and k_cache[0, :2].all()
        assert k_cache.count_nonzero() == 3 * 8
        cache.append(v_cache, k_cache.clone(), k, v, page_table=table, seqused_k=few)
    for wrong, match in (
        (used, r"seqused_k=\[9, 6\].*room for 8 keys"),
        (few, r"seqused_k=\[0, 2\].*as many as new keys, \[6, 6\]"),
        (torch.tensor([8, 6], dtype=INT32), r"page_table\[0, 1\] is -1"),
    ):
        with pytest.raises(tilewise.ArgumentError, match=match):
            cache.append(k_cache, v_cache, k, v, page_table=table, seqused_k=wrong)
    with pytest.raises(tilewise.ArgumentError, match="slots has 12 and the cache has 12 rows"):
        cache.append(k_cache, v_cache, k[0], v[0], slots=torch.tensor([0, 12, -1, 3, 4, 5]))


def test_rows_that_pad_a_graph_are_written_nowhere():
    k_cache, v_cache = torch.zeros(2, 3, 4, 1, 8).unbind(0)
    table = torch.tensor([[1, -1], [-1, -1]], dtype=INT32)
    k = v = torch.full((4, 1, 8), torch.nan)
    k[0] = 1
    where = dict(page_table=table, seqused_k=torch.tensor([1, 0], dtype=INT32))
    cache.append(k_cache, v_cache, k, v, cu_seqlens_q=starts_of([1, 0]), **where)
    assert torch.equal(k_cache.nonzero()[:, :2].unique(dim=0), torch.tensor([[1, 0]]))


# rotation


def tables(positions, rotary_dim):
    angles = torch.outer(torch.arange(positions), 100.0 ** -(torch.arange(0, rotary_dim, 2) / 9))
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 4, 16])
def test_rotation_is_a_complex_product(interleaved, rotary_dim):
    x = torch.randn(7, 3, 16, dtype=torch.float64)
    positions = torch.tensor([0, 3, 3, 9, 1, 2, 5])
    cos, sin = (table.double() for table in tables(10, rotary_dim))
    found = rotate(x, cache.Rotary(cos, sin, interleaved), positions)
    half = rotary_dim // 2
    first = slice(0, rotary_dim, 2) if interleaved else slice(0, half)
    second = slice(1, rotary_dim, 2) if interleaved else slice(half, rotary_dim)
    turned = torch.complex(x[..., first], x[..., second])
    turned = turned * torch.complex(cos, sin)[positions].unsqueeze(1)
    torch.testing.assert_close(found[..., first], turned.real)
    torch.testing.assert_close(found[..., second], turned.imag)
    assert torch.equal(found[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("slots", [False, True])
def test_keys_are_turned_by_their_positions(slots):
    s, (k_cache, v_cache, table), (k, v), expected = new_and_old(8)
    rotary = cache.Rotary(*tables(64, 8), interleaved=False)
    where = dict(seqused_k=s.lengths, cu_seqlens_q=starts_of(NEW))
    positions = torch.cat([torch.arange(b - a, b) for a, b in zip(NEW, LENGTHS)])
    turned = rotate(k, rotary, positions)
    rows = torch.arange(4).repeat_interleave(torch.tensor(NEW))
    at = table[rows, positions // 8].long(), positions % 8
    if slots:
        where["slots"] = at[0] * 8 + at[1]
    else:
        where["page_table"] = table
    cache.append(k_cache, v_cache, k, v, rotary=rotary, **where)
    expected[0][at] = turned
    assert_same((k_cache, v_cache), expected)


def test_halves_are_turned_in_fp32():
    x, (cos, sin) = torch.randn(6, 2, 16).bfloat16(), tables(6, 16)
    rotary = cache.Rotary(cos, sin)
    exact = rotate(x.double(), rotary, torch.arange(6))
    assert torch.equal(rotate(x, rotary, torch.arange(6)), exact.bfloat16())


# operators and refusals


def test_opcheck_and_a_graph():
    s, (k_cache, v_cache, table), (k, v), _ = new_and_old(8)
    cos, sin = tables(64, 8)
    k_cache, v_cache = (x.nan_to_num(0.0) for x in (k_cache, v_cache))
    where = table, s.lengths, starts_of(NEW)
    torch.library.opcheck(OP, (k_cache, v_cache, k, v, *where, None, cos, sin, True))
    written = [x.name for x in OP._schema.arguments if x.alias_info]
    assert written == ["k_cache", "v_cache", "k_row_scales", "v_row_scales"]

    def step(k_cache, v_cache, k, v, table, used, starts):
        where = dict(page_table=table, seqused_k=used, cu_seqlens_q=starts)
        cache.append(k_cache, v_cache, k * 2, v, **where)
        return k_cache + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    mine, theirs = ((k_cache.clone(), v_cache.clone()) for _ in range(2))
    assert torch.equal(compiled(*mine, k, v, *where), step(*theirs, k, v, *where))
    assert_same(mine, theirs)


K_CACHE, K = torch.zeros(3, 8, 2, 16), torch.zeros(3, 1, 2, 16)
USED = torch.ones(3, dtype=INT32)
WRONG = {
    "nothing says where": (dict(seqused_k=None), "seqused_k and slots are missing"),
    "heads": (dict(k=K[:, :, :1]), "k has 1 heads of headdim 16 and k_cache has 2 heads"),
    "dtype": (
        dict(v_cache=K_CACHE.half()),
        "v_cache.dtype is torch.float16 and k.dtype is",
    ),
    "v of another length": (
        dict(v=K.expand(3, 2, 2, 16)),
        "v has shape .*except for headdim",
    ),
    "slots of int32": (dict(slots=torch.zeros(3, 1, dtype=INT32)), "slots.dtype .* int64"),
    "slots of another shape": (
        dict(slots=torch.zeros(3).long()),
        r"slots has shape \(3,\).*\(3, 1",
    ),
    "lengths": (dict(seqused_k=USED[:2]), r"seqused_k has shape \(2,\): with 3 sequences"),
    "sequences": (dict(k_cache=K_CACHE[:2], v_cache=K_CACHE[:2]), "k_cache has 2 sequences and 3"),
    "rotary": (dict(rotary=(K, K)), "rotary is a tuple: it must be a tilewise.cache.Rotary"),
    "tables": (dict(rotary=cache.Rotary(*tables(4, 18))), r"rotary.cos has shape \(4, 9\)"),
    "rotary without positions": (
        dict(rotary=cache.Rotary(*tables(4, 8)), seqused_k=None, slots=torch.zeros(3, 1).long()),
        "rotary needs the positions",
    ),
    "starts": (
        dict(k=K[:, 0], v=K[:, 0], cu_seqlens_q=torch.tensor([0, 2, 1, 3], dtype=INT32)),
        r"cu_seqlens_q=\[0, 2, 1, 3\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    change, message = WRONG[name]
    arguments = dict(k_cache=K_CACHE, v_cache=K_CACHE, k=K, v=K, seqused_k=USED) | change
    with pytest.raises(tilewise.ArgumentError, match=message):
        cache.append(**arguments)


def test_gradients_are_refused():
    with pytest.raises(NotImplementedError, match=r"k.requires_grad: a call with a cache"):
        cache.append(K_CACHE, K_CACHE, K.clone().requires_grad_(), K, seqused_k=USED)
