"""Predicates as algebra: what they say against torch's own answer, their keys, their errors."""

import itertools
import re

import pytest
import torch
from helpers import random_masks as masks
from hypothesis import given, settings

from tilewise import ArgumentError, attention
from tilewise.mods import (
    causal,
    chunked,
    codegen,
    dilated,
    document,
    evaluate,
    expressions,
    mask,
    maximum,
    minimum,
    prefix_lm,
    score,
    sliding_window,
    where,
)
from tilewise.sparse import create_block_mask

DOC = torch.tensor([0, 0, 1, 1, 1, 3, 3, 2, 2, 2, 2, 5], dtype=torch.int32)
DOCS = torch.stack([DOC, DOC.flip(0)])
S = len(DOC)
Q, K = torch.arange(S)[:, None], torch.arange(S)
NAMED = {
    "causal": (causal(), Q >= K),
    "diagonal": (causal(diagonal=-3), Q - 3 >= K),
    "window": (sliding_window(3, 1), (K >= Q - 3) & (K <= Q + 1)),
    "left": (sliding_window(3), K >= Q - 3),
    "right": (sliding_window(-1, 2), K <= Q + 2),
    "open": (sliding_window(None, None), torch.ones(S, S, dtype=torch.bool)),
    "prefix": (prefix_lm(4), (K < 4) | (K <= Q)),
    "document": (document(DOC), DOC[:, None] == DOC),
    "chunked": (chunked(5), Q // 5 == K // 5),
    "dilated": (dilated(3), (Q - K) % 3 == 0),
    "and": (causal() & document(DOC), (Q >= K) & (DOC[:, None] == DOC)),
    "or": (sliding_window(1, 1) | dilated(4), ((Q - K).abs() <= 1) | ((Q - K) % 4 == 0)),
    "not": (~causal(), Q < K),
    "function": (causal() & (lambda b, h, q, k: k != 2), (Q >= K) & (K != 2)),
    "reflected": ((lambda b, h, q, k: k != 2) & causal(), (Q >= K) & (K != 2)),
    "ored": ((lambda b, h, q, k: k == 2) | causal(), (Q >= K) | (K == 2)),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_is_seen(name):
    made, expected = NAMED[name]
    assert torch.equal(made.dense(1, 1, S, S)[0, 0], expected)


def test_batch_and_head():
    prefix = torch.tensor([2, 5], dtype=torch.int32)
    made = (prefix_lm(prefix) & document(DOCS)) | mask(lambda b, h, q, k: q - k == h)
    for b, h in itertools.product(range(2), range(3)):
        expected = ((K < prefix[b]) | (K <= Q)) & (DOCS[b][:, None] == DOCS[b]) | (Q - K == h)
        assert torch.equal(made.dense(2, 3, S, S)[b, h], expected)
    assert made.depends_on("b") and made.depends_on("h") and not causal().depends_on("b")


@given(text=masks.predicates())
@settings(max_examples=150, deadline=None, database=None)
def test_any_expression_is_what_torch_says(text):
    shape = (2, 2, 13, 11)
    expected = masks.truth(text, *shape)
    assert torch.equal(masks.traced(text).dense(*shape), expected), text


def test_torch_functions_and_ours():
    made = mask(
        lambda b, h, q, k: (
            torch.logical_and(
                torch.abs(q - k) < 4, torch.where(k > 2, torch.maximum(q, k), minimum(q, 3)) != 5
            )
            | torch.logical_not(maximum(1, q) % 4 == k)
        )
    )
    chosen = torch.where(K > 2, torch.maximum(Q, K), Q.clamp(max=3)) != 5
    expected = (((Q - K).abs() < 4) & chosen) | ~(Q.clamp(min=1) % 4 == K)
    assert torch.equal(made.dense(1, 1, S, S)[0, 0], expected)


def test_ours_take_tensors_and_numbers_too():
    assert torch.equal(where(Q > 3, 1, Q), torch.where(Q > 3, 1, Q))
    assert torch.equal(minimum(Q, 3), Q.clamp(max=3))
    assert int(maximum(2, 3)) == 3


def test_captured_scalars_floats_and_numpy():
    numpy = pytest.importorskip("numpy")
    n, slope = torch.tensor(4), torch.tensor([0.5, 0.25])
    made = mask(lambda b, h, q, k: ((q - k) * slope[h] < 1.5) & (k < n) & (numpy.int64(9) > q))
    expected = torch.stack([((Q - K) * s < 1.5) & (K < 4) & (Q < 9) for s in slope])
    assert torch.equal(made.dense(1, 2, S, S)[0], expected)
    assert [x is y for x, y in zip(made.tensors, (slope, n))] == [True, True]


def test_a_tensor_captured_twice_is_one():
    made = document(DOC) & document(DOC) & mask(lambda b, h, q, k: DOCS[b, q] == DOC[k])
    assert len(made.tensors) == 2 and made.tensors[0] is DOC


def test_what_is_read_and_not_used_is_not_captured():
    """Tensors of a mask stand before those of a score function, by their number."""

    def reads(b, h, q, k):
        _ = DOC[q]
        return q >= k

    assert mask(reads).tensors == ()
    q, bias = torch.randn(1, S, 1, 8), torch.randn(S)
    biased = score(lambda s, b, h, q, k: s + bias[k])
    out = attention(q, q, q, mask_mod=mask(reads), score_mod=biased)
    torch.testing.assert_close(out, attention(q, q, q, mask_mod=causal(), score_mod=biased))


NOT_LOADED = {
    "float8": (
        lambda: torch.zeros(S, dtype=torch.float8_e4m3fn),
        "torch.float8_e4m3fn",
        "x.float()",
    ),
    "float8 scale": (
        lambda: torch.ones(S, dtype=torch.float8_e8m0fnu),
        "torch.float8_e8m0fnu",
        "x.float",
    ),
    "complex": (
        lambda: torch.zeros(S, dtype=torch.complex64),
        "torch.complex64",
        "x.real or x.imag",
    ),
    "uint64": (lambda: torch.zeros(S, dtype=torch.uint64), "torch.uint64", "x.long()"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.zeros(S), 1.0, 0, torch.quint8),
        "torch.quint8",
        "x.dequantize()",
    ),
    "sparse": (lambda: torch.zeros(S).to_sparse(), "torch.sparse_coo", "x.to_dense()"),
    "negated": (
        lambda: torch.zeros(S, dtype=torch.complex64).conj().imag,
        "negated",
        "x.resolve_neg()",
    ),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", NOT_LOADED)
@pytest.mark.parametrize("make", [mask, score], ids=["mask", "score"])
def test_tensors_that_kernels_cannot_load_are_refused(name, make):
    """On a CPU too: it would serve what a GPU then does not."""
    create, what, remedy = NOT_LOADED[name]
    x = create()
    with pytest.raises(ArgumentError) as raised:
        make(lambda *at: x[at[-1]] > 0 if make is mask else at[0] + x[at[-1]])
    assert what in str(raised.value) and remedy in str(raised.value)


def test_negative_indices_count_from_the_end():
    made = mask(lambda b, h, q, k: (DOC[q - 1] == DOC[k - q]) & (DOCS[-1, q] != DOC[-2]))
    expected = (DOC[Q - 1] == DOC[K - Q]) & (DOCS[-1, Q] != DOC[-2])
    assert torch.equal(made.dense(1, 1, S, S)[0, 0], expected)
    assert mask(lambda b, h, q, k: DOC[-1] == q).key == mask(lambda b, h, q, k: DOC[S - 1] == q).key


@pytest.mark.parametrize("index", [lambda q: q + 2, lambda q: 2 - 2 * q])
def test_computed_indices_past_an_end_are_an_error(index):
    made = mask(lambda b, h, q, k: DOC[index(q)] == DOC[k])
    for evaluated in (lambda: made.dense(1, 1, S, S), lambda: create_block_mask(made, 1, 1, S, S)):
        with pytest.raises(ArgumentError, match=r"shape \(12,\): index .*torch\.clamp"):
            evaluated()


FROM_THE_END = {
    "difference": lambda q, k: q - k,
    "shifted": lambda q, k: q - 5,
    "chosen": lambda q, k: torch.where(q < k, 0, q - k),
    "loaded": lambda q, k: DOC[q],
    "negated": lambda q, k: -q,
}
NEVER_NEGATIVE = {
    "plain": lambda q, k: k,
    "quotient": lambda q, k: q // 4,
    "remainder": lambda q, k: (q - k) % 4,
    "sum": lambda q, k: 2 * q + k,
    "distance": lambda q, k: abs(q - k),
    "held": lambda q, k: maximum(k - q, 0),
    "bytes": lambda q, k: DOC.to(torch.uint8)[q],
}


@pytest.mark.parametrize("name", FROM_THE_END | NEVER_NEGATIVE)
def test_kernels_count_from_the_end_where_indices_may_be_negative_alone(name):
    index = (FROM_THE_END | NEVER_NEGATIVE)[name]
    text = codegen.source_of(mask(lambda b, h, q, k: DOC[index(q, k)] == 1).expr)
    assert (" + captured[0].sizes[0], " in text) == (name in FROM_THE_END)


def test_masks_inside_masks():
    inner = causal() & document(DOC)
    outer = mask(lambda b, h, q, k: inner(b, h, q, k) | (k < 2) & sliding_window(4)(b, h, q, k))
    expected = (Q >= K) & (DOC[:, None] == DOC) | (K < 2) & (K >= Q - 4)
    assert torch.equal(outer.dense(1, 1, S, S)[0, 0], expected)
    shifted = mask(lambda b, h, q, k: causal()(b, h, q + 2, k))
    assert shifted.key == mask(lambda b, h, q, k: k <= q + 2).key


def test_calls_broadcast_and_take_ints():
    assert causal()(0, 0, Q, K).shape == (S, S)
    assert bool(causal()(0, 0, 3, 3)) and not bool(causal()(0, 0, 2, 3))
    assert torch.equal(evaluate(causal().expr, 0, 0, Q, K), Q >= K)
    assert causal()(0, 0, Q.int(), K.short()).dtype == torch.bool


def test_equal_programs_have_one_key():
    def window(size):
        return mask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < size))

    assert window(8).key == window(8).key != window(9).key
    assert document(DOC).key == document(DOC.clone()).key  # values are data
    assert document(DOC).key != mask(lambda b, h, q, k: DOC.long()[q] == DOC.long()[k]).key
    assert causal().key == mask(lambda b, h, q, k: q + 0 >= 0 + k).key
    constants = [mask(lambda b, h, q, k, c=c: where(q < k, c, 2) == 1).key for c in (1, 1.0)]
    assert constants[0] != constants[1]
    assert expressions.lookup(window(8).key) == window(8).expr


def test_a_key_names_the_tree_alone():
    assert re.fullmatch("mask_[0-9a-f]{24}", causal().key)
    assert causal().key == expressions.intern(
        expressions.Node("<=", (expressions.Node("k_idx"), expressions.Node("q_idx")))
    )


def test_the_table_is_bounded(monkeypatch):
    monkeypatch.setattr(expressions, "TABLE_SIZE", 8)
    first = causal(diagonal=1000)
    name = first.key
    for i in range(20):
        _ = causal(diagonal=i).key
    assert len(expressions._table) <= 8
    with pytest.raises(ArgumentError, match="no longer known.*build the mask again"):
        expressions.lookup(name)
    assert expressions.lookup(first.key) == first.expr  # reading the key registers it again


def test_trees_are_described_as_written():
    assert repr(document(DOC)) == "Mask((t0[q_idx] == t0[k_idx]))"
    assert repr(dilated(3)) == "Mask(((abs((q_idx - k_idx)) % 3) == 0))"
    assert repr(mask(lambda b, h, q, k: q > -0.5)) == "Mask(((-0.5) < q_idx))"


UNTRACEABLE = {
    "and": (lambda b, h, q, k: q >= k and k > 2, "truth of (k_idx <= q_idx)", "&, | and ~"),
    "or": (lambda b, h, q, k: q >= k or k > 2, "truth of (k_idx <= q_idx)", "&, | and ~"),
    "not": (lambda b, h, q, k: not q >= k, "truth of (k_idx <= q_idx)", "&, | and ~"),
    "if": (lambda b, h, q, k: k > 1 if q > 2 else k > 3, "truth of (2 < q_idx)", "mods.where"),
    "chain": (lambda b, h, q, k: 0 <= q < k, "chained comparison", "each comparison in brackets"),
    "in": (lambda b, h, q, k: q in (1, 2), "truth of (q_idx == 1)", "&, | and ~"),
    "contains": (lambda b, h, q, k: 3 in q, "`in` on q_idx", "with |"),
    "min": (lambda b, h, q, k: min(q, k) > 0, "truth of (k_idx < q_idx)", "mods.where"),
    "/": (lambda b, h, q, k: q / 2 > k, "(q_idx / 2)", "divide with //"),
    "r/": (lambda b, h, q, k: 2 / q > k, "(2 / q_idx)", "divide with //"),
    "**": (lambda b, h, q, k: q**0.5 > k, "sqrt(q_idx) has no meaning in a mask", "may use"),
    "@": (lambda b, h, q, k: q @ k, "@ on q_idx", "may use"),
    "divmod": (lambda b, h, q, k: divmod(q, 2), "divmod of q_idx", "use // and %"),
    "list": (lambda b, h, q, k: [1, 2][q] == k, "q_idx as a Python number", "torch tensor"),
    "range": (lambda b, h, q, k: list(range(q)), "q_idx as a Python number", "loop"),
    "iter": (lambda b, h, q, k: [*q], "q_idx as a Python number", "loop over nothing"),
    "int": (lambda b, h, q, k: int(q) > k, "q_idx as a Python number", "torch tensor"),
    "attribute": (lambda b, h, q, k: q.shape[0] > k, "`.shape` of q_idx", "may use"),
    "call": (lambda b, h, q, k: q(k), "a call of q_idx", "may use"),
    "exp": (lambda b, h, q, k: torch.exp(q) > k, "exp(q_idx) has no meaning in a mask", "may use"),
    "torch": (lambda b, h, q, k: torch.sin(q) > k, "sin(q_idx) has no meaning", "may use"),
    "keyword": (lambda b, h, q, k: torch.clamp(q, top=3) > k, "TypeError: clamp()", "may use"),
    "logical": (lambda b, h, q, k: torch.logical_and(q, k), "torch's `logical_and`", "may use"),
    "whole": (lambda b, h, q, k: DOC == q, "shape (12,)", "like doc[q_idx]"),
    "too few": (lambda b, h, q, k: DOCS[q] == k, "shape (2, 12)", "one index for each dimension"),
    "half": (lambda b, h, q, k: DOC[q][k] == 1, "t0[q_idx][...]", "doc[b, q_idx]"),
    "slice": (lambda b, h, q, k: DOC[q:] == 1, "q_idx as a Python number", "torch tensor"),
    "ellipsis": (lambda b, h, q, k: DOCS[..., q] == 1, "Ellipsis", "not a slice, None or ..."),
    "by bool": (lambda b, h, q, k: DOC[q > k] == 1, "indexed by (k_idx < q_idx)", "use integers"),
    "negative": (lambda b, h, q, k: DOCS[-3, q] == 1, "indexed by", "must lie in [-2, 2)"),
    "bool - int": (
        lambda b, h, q, k: (q > k) - 1 > 0,
        "`-` does not take (k_idx < q_idx) (bool)",
        "where",
    ),
    "int & bool": (lambda b, h, q, k: q & (q > k), "`&` does not take q_idx (int)", "compare"),
    "float //": (
        lambda b, h, q, k: q // 0.5 > k,
        "`//` does not take q_idx (int) and 0.5",
        "float",
    ),
    "text": (lambda b, h, q, k: q == "a", "'a' (str)", "may use"),
    "none": (lambda b, h, q, k: None, "None (NoneType)", "may use"),
    "nan": (lambda b, h, q, k: q < float("nan"), "nan (float)", "may use"),
    "huge": (lambda b, h, q, k: q < 2**64, "(int)", "may use"),
    "past fp32": (lambda b, h, q, k: q < 1e39, "1e+39, past 3.4e+38,", "use math.inf"),
    "complex": (lambda b, h, q, k: torch.ones(3) * 1j == q, "shape (3,)", "like doc[q_idx]"),
    "int result": (lambda b, h, q, k: q + k, "returns (q_idx + k_idx), which is int", "compare"),
    "arguments": (
        lambda q, k: q >= k,
        "<lambda> cannot be traced (TypeError",
        "(b, h, q_idx, kv_idx)",
    ),
    "their error": (lambda b, h, q, k: {}[0], "cannot be traced (KeyError", "may use"),
    "hash": (lambda b, h, q, k: {q: 1}[k], "unhashable", "may use"),
    "too long": (lambda b, h, q, k: sum([q] * 500) > k, "more than 400", "compute a tensor"),
    "doubling": (
        lambda b, h, q, k: __import__("functools").reduce(lambda x, _: x + x, range(500), q) > k,
        "more than 400 operators",
        "compute a tensor",
    ),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_is_refused_is_named_with_a_remedy(name):
    function, named, remedy = UNTRACEABLE[name]
    with pytest.raises(ArgumentError) as raised:
        mask(function)
    assert named in str(raised.value) and remedy in str(raised.value), raised.value


BAD = {
    "diagonal": (lambda: causal(diagonal=1.5), "diagonal is a float: it must be an int"),
    "left": (lambda: sliding_window(-2, 0), "left=-2: it must be at least -1"),
    "right": (lambda: sliding_window(2, True), "right is a bool: it must be an int"),
    "prefix": (lambda: prefix_lm(-1), "prefix=-1: it must be at least 0"),
    "prefix dtype": (
        lambda: prefix_lm(torch.ones(2)),
        "prefix.dtype is torch.float32.*prefix.int()",
    ),
    "prefix shape": (lambda: prefix_lm(DOCS), r"prefix has shape \(2, 12\): it must be \(batch,\)"),
    "documents": (lambda: document([0, 1]), "doc_ids is a list: it must be an int32 torch.Tensor"),
    "documents dtype": (lambda: document(DOC.float()), "doc_ids.dtype is torch.float32.*int32"),
    "documents shape": (lambda: document(DOCS[None]), r"doc_ids has shape \(1, 2, 12\)"),
    "size": (lambda: chunked(0), "size=0: it must be at least 1"),
    "stride": (lambda: dilated(-1), "stride=-1: it must be at least 1"),
    "not a function": (lambda: mask(3), "mask_mod is an int: it must be a Mask or a function"),
    "operand": (lambda: causal() & 3, "`&` joins a mask with an int"),
    "truth": (lambda: causal() and 3, "truth value.*join masks with &"),
    "too large": (lambda: causal().dense(1, 1, 1 << 14, 1 << 14), "dense mask.*create_block_mask"),
    "too short": (
        lambda: document(DOC).dense(1, 1, S + 1, S),
        r"t0\[q_idx\] of a tensor of shape \(12,\) and seqlen_q is 13: dimension 0 is too short",
    ),
    "batch": (lambda: document(DOCS).dense(3, 1, S, S), "batch is 3: dimension 0 is too short"),
    "device": (lambda: document(DOC).dense(1, 1, S, S, device="meta"), "on cpu.*mask.to"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    make, message = BAD[name]
    with pytest.raises(ArgumentError, match=message):
        make()


def test_to_moves_the_tensors():
    moved = document(DOC).to("meta")
    assert moved.tensors[0].device.type == "meta" and moved.key == document(DOC).key
    mixed = mask(lambda b, h, q, k: moved.tensors[0][q] == DOC[k])
    with pytest.raises(ArgumentError, match="cpu, meta: move them to one device"):
        mixed.device()
