"""Trees as text: honest texts are the trees, and all others are refused, in bounded time."""

import copy
import functools
import json
import math
import pickle
import random
from collections import OrderedDict

import pytest
import torch
from helpers.work import at_most

from tilewise import ArgumentError, mods, scores
from tilewise.mods import causal, dilated, document, expressions, mask, where
from tilewise.mods import serialize as serialization
from tilewise.mods.expressions import Node
from tilewise.mods.serialize import (
    MASK,
    MAX_STEPS,
    SCORE_FUNCTION,
    deserialize,
    serialize,
    tree_of_text,
)

DOC = torch.tensor([0, 0, 1, 1, 1, 3, 3, 2, 2, 2, 2, 5], dtype=torch.int32)
TABLE = torch.linspace(-1, 1, 24).view(2, 12)
HONEST = {
    "masks joined": causal(3) & document(DOC) | ~dilated(3),
    "floats": mask(lambda b, h, q, k: (q * 0.5 > -0.0) & (k < math.inf)),
    "long": mask(lambda b, h, q, k: where(q > 2, DOC[k], -1) == 2**31),
    "constant": mask(lambda b, h, q, k: True),
    "a number captured": scores.score(
        lambda s, b, h, q, k: torch.exp(s) * torch.tensor(2.0, dtype=torch.bfloat16)
    ),
    "a bias": scores.score(lambda s, b, h, q, k: s + TABLE[h, (k - q) % 12]),
    "a derivative": scores.score(lambda s, b, h, q, k: s / 3 + k).derivative,
    "a long derivative": scores.score(
        lambda s, b, h, q, k: abs(abs(s) - 1.5) + torch.log(abs(s) + 1)
    ).derivative,
}


def told(name: str) -> tuple[str, str]:
    """A function's text, and what it is."""
    made = HONEST[name]
    return serialize(made.key), MASK if isinstance(made, mods.Mask) else SCORE_FUNCTION


@pytest.mark.parametrize("name", HONEST)
def test_a_text_is_the_tree(name, monkeypatch):
    """Also for a process that never saw the function."""
    text, what = told(name)
    monkeypatch.setattr(expressions, "_table", OrderedDict())
    serialization._told.cache_clear()
    assert deserialize(text, what) == HONEST[name]._name
    assert expressions.lookup(HONEST[name]._name) is HONEST[name].expr


def test_a_text_of_nothing():
    assert serialize("") == deserialize("", MASK) == deserialize("", SCORE_FUNCTION) == ""


TRUE, Q, SCORE = ["bool", [], True], ["q_idx", [], None], ["score", [], None]
ONE, HALF = ["int", [], 1], ["float", [], 0.5]


def loading(slot, dtype="bool", index=Q):
    return [index, ["load", [0], [slot, dtype]]]


REFUSED = {
    "no JSON": "[",
    "no list": "{}",
    "no steps": "[]",
    "a number": "7",
    "deep": "[" * 100_000,
    "a long number": f'[["int", [], {"9" * 10_000}]]',
    "long": " " * (serialization.MAX_LETTERS + 1),
    "no step": [7],
    "two parts": [["bool", []]],
    "no op": [[7, [], None]],
    "an op that no dict takes": [[[], [], None]],
    "an unknown op": [["import", [], None]],
    "a method": [["__class__", [], None]],
    "inputs by name": [TRUE, ["~", {"0": 0}, None]],
    "itself": [["~", [0], None]],
    "a later one": [["~", [1], None], TRUE],
    "from the end": [TRUE, TRUE, ["&", [0, -1], None]],
    "by bool": [TRUE, TRUE, ["&", [False, True], None]],
    "by float": [TRUE, ["~", [0.0], None]],
    "too few": [TRUE, ["&", [0], None]],
    "too many": [TRUE, ["~", [0, 0], None]],
    "an index of inputs": [TRUE, ["q_idx", [0], None], ["<", [1, 1], None]],
    "a value of an operator": [TRUE, ["~", [0], "x"]],
    "a value of an index": [["q_idx", [], 1], ["<", [0, 0], None]],
    "no kind": [TRUE, Q, ["+", [0, 1], None], ["<", [1, 2], None]],
    "bool as 1": [["bool", [], 1]],
    "bool as text": [["bool", [], "True"]],
    "int as bool": [["int", [], True], ["<", [0, 0], None]],
    "int as float": [["int", [], 1.0], ["<", [0, 0], None]],
    "int as text": [["int", [], "1) + print(1"], ["<", [0, 0], None]],
    "int past 64 bits": [["int", [], 2**63], ["<", [0, 0], None]],
    "float as int": [["float", [], 1], ["<", [0, 0], None]],
    "nan": [["float", [], math.nan], ["<", [0, 0], None]],
    "float past fp32": [["float", [], 1e39], ["<", [0, 0], None]],
    "a slot of source": loading("0].ptr)) or print(1) #"),
    "a slot below 0": loading(-1),
    "a slot as bool": loading(True),
    "a slot as float": loading(0.0),
    "a huge slot": loading(10**12),
    "no slot": [Q, ["load", [0], None]],
    "a slot alone": [Q, ["load", [0], [0]]],
    "an attribute of torch": loading(0, "load"),
    "a dtype that kernels lack": loading(0, "float8_e5m2"),
    "a dtype's repr": loading(0, "torch.bool"),
    "no dtype": loading(0, ["bool"]),
    "an index of floats": loading(0, index=HALF),
    "by 0": [Q, ["int", [], 0], ["%", [0, 1], None], ["<", [0, 2], None]],
    "by -1 bits": [Q, ["int", [], -1], [">>", [0, 1], None], ["<", [0, 2], None]],
    "int": [Q],
    "a mask that asks for the score": [SCORE, ["<", [0, 0], None]],
    "a mask that is a score function": [SCORE],
    "too many steps": [TRUE] * (MAX_STEPS + 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_texts_are_refused(name):
    text = REFUSED[name]
    text = text if isinstance(text, str) else json.dumps(text)
    with pytest.raises(ArgumentError, match="text of a mask is not one that tilewise writes"):
        deserialize(text, MASK)


@pytest.mark.parametrize("steps", [[TRUE], [Q]])
def test_a_score_function_gives_floats(steps):
    with pytest.raises(ArgumentError, match="text of a score function .*not float"):
        deserialize(json.dumps(steps), SCORE_FUNCTION)


PIECES = [
    *"[]{},:\"'\\ 0123456789-.eEtn",
    "null",
    "true",
    "NaN",
    "Infinity",
    '"load"',
    "\ud800",
    "é",
]
ODD_VALUES = [None, True, False, -1, 0, 1, 7, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 1e300]
ODD_VALUES += [math.inf, math.nan, "", "load", "int", "bool", "score", "q_idx", "//", "captured"]
ODD_VALUES += ["0].ptr) #", [], {}, [0], [0, "bool"], [0, "int32"], ["load", [0], [0, "int32"]]]


def mutated_letters(text: str, rng: random.Random) -> str:
    """The text with a few letters changed, taken out or put in."""
    letters = list(text)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(letters))
        letters[at : at + rng.randint(0, 3)] = rng.choices(PIECES, k=rng.randint(0, 2))
        letters = letters or ["["]
    return "".join(letters)


def mutated_values(text: str, rng: random.Random) -> str:
    """The text with a few values, at any depth, replaced, repeated or taken out."""
    root = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        holder = rng.choice(list(lists_in([root])))  # one at least: the root stays a list
        at = rng.randrange(len(holder))
        change = rng.randrange(4)
        if change == 0:
            holder.insert(at, copy.deepcopy(rng.choice(holder)))
        elif change == 1 and holder is not root:
            del holder[at]
        else:
            holder[at] = copy.deepcopy(rng.choice(ODD_VALUES))
    return json.dumps(root)


def lists_in(values: list):
    """The lists in these values that are not empty, at any depth."""
    for value in values:
        if isinstance(value, list) and value:
            yield value
            yield from lists_in(value)


@pytest.mark.parametrize("mutated", [mutated_letters, mutated_values])
def test_a_changed_text_is_a_tree_or_refused(mutated):
    """And whatever is taken, is told again as it was understood."""
    rng, taken, refused = random.Random(7), 0, 0
    for _ in range(1500):
        text, what = told(rng.choice(list(HONEST)))
        text = mutated(text, rng)
        with at_most(calls=10**5):  # however the text was changed
            try:
                expr = tree_of_text(text, what)
            except ArgumentError:
                refused += 1
            else:
                taken += 1
                again = tree_of_text(serialize(expressions.intern(expr)), what)
                assert again is expr, text
                serialization.check_tree(expr)
    assert taken > 20 and refused > 200, (taken, refused)


def doubling(op: str, leaf: Node, n: int) -> Node:
    """A tree of n + 1 distinct nodes and 2^n leaves."""
    for _ in range(n):
        leaf = Node(op, (leaf, leaf))
    return leaf


def test_what_stands_in_a_tree_many_times_is_looked_at_once():
    with at_most(calls=10**5):
        text = json.dumps([TRUE, *(["&", [i, i], None] for i in range(40))])
        name = deserialize(text, MASK)
        expr = expressions.lookup(name)
        assert expr is doubling("&", Node("bool", (), True), 40)
        assert hash(expr) == hash(doubling("&", Node("bool", (), True), 40))
        assert len(expressions.nodes_of(expr)) == 41 and serialize(name) == text
        mask = mods.Mask(expr)
        assert len(repr(expr)) < 2000 and len(repr(mask)) < 2000
        assert bool(mask(0, 0, torch.arange(3), 0))


def test_equal_trees_are_one_object():
    assert Node("~", (Node("q_idx"),)) is Node("~", (Node("q_idx"),))
    constants = {Node("int", (), 1), Node("float", (), 1.0), Node("bool", (), True)}
    constants |= {Node("float", (), 0.0), Node("float", (), -0.0)}
    assert len(constants) == 5


def test_trees_are_copied_and_pickled():
    """Of any depth, and the copy is the tree."""
    expr = functools.reduce(lambda x, _: Node("~", (x,)), range(MAX_STEPS), Node("q_idx"))
    assert copy.deepcopy(expr) is expr and pickle.loads(pickle.dumps(expr)) is expr
    made = pickle.loads(pickle.dumps(document(DOC)))
    assert made.expr is document(DOC).expr and torch.equal(made.tensors[0], DOC)
