"""Instructions by which lanes of a warp meet: shuffles, votes, reductions, elections."""

import numpy as np

from .errors import Divergence
from .moves import put
from .parse import Immediate, Instruction, Pair, Register
from .program import Program, Step, instruction, unknown
from .registers import LANES, numpy_type

FULL = 0xFFFFFFFF


def by_warp(x: np.ndarray, group) -> np.ndarray:
    """(warps, lanes), of a register or a constant."""
    return np.broadcast_to(x, group.lanes.stop - group.lanes.start).reshape(-1, LANES)


def require_members(one: Instruction, mask: np.ndarray | int, group) -> None:
    """All lanes of a member mask execute it together."""
    if group.where is True:
        return
    active = group.where.reshape(-1, LANES)
    members = (int(np.ravel(mask)[0]) >> np.arange(LANES)) & 1 != 0
    if (members & ~active)[active.any(1)].any():
        raise Divergence(f"{one}: lanes of its member mask are elsewhere")


@instruction("shfl")
def shuffle(code: Program, one: Instruction) -> Step:
    """d = a of another lane of a segment; p: whether there is such a lane."""
    _, how, _ = one.modifiers
    target = one.operands[0]
    d, p = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    d, a = code.slots.write(d, "b32"), code.slots.read(one.operands[1], "b32")
    p = None if p is None else code.slots.write(p, "pred")
    b, c, mask = code.sources(one.operands[2:], "b32")
    lane = np.arange(LANES)

    def step(r, group):
        require_members(one, r[mask], group)
        by, clamp = by_warp(r[b], group) & 31, by_warp(r[c], group) & 31
        segment = (by_warp(r[c], group) >> 8) & 31
        first = lane & segment
        last = first | (clamp & ~segment)
        if how == "up":
            found, exists = lane - by.astype(int), lane - by.astype(int) >= last
        elif how == "down":
            found, exists = lane + by.astype(int), lane + by.astype(int) <= last
        elif how == "bfly":
            found, exists = lane ^ by, (lane ^ by) <= last
        else:
            found = first | (by & ~segment)
            exists = found <= last
        taken = np.where(exists, found, lane).astype(int)
        put(r[d], np.take_along_axis(by_warp(r[a], group), taken, 1).ravel(), group)
        if p is not None:
            put(r[p], exists.ravel(), group)

    return step


@instruction("vote")
def vote(code: Program, one: Instruction) -> Step:
    """What the active lanes' predicates are together."""
    _, how, type_ = one.modifiers
    source = one.operands[1]
    d, a = code.slots.write(one.operands[0], type_), code.slots.read(Register(source.name), "pred")
    mask = code.slots.read(one.operands[2], "b32")
    if how not in ("any", "all", "uni", "ballot"):
        raise unknown(one, how)

    def step(r, group):
        require_members(one, r[mask], group)
        active = by_warp(np.broadcast_to(group.where, r[a].shape), group)
        said = (by_warp(r[a], group) != source.is_negated) & active
        any_, all_ = said.any(1), (said | ~active).all(1)
        if how == "ballot":
            found = (said.astype(np.uint64) << np.arange(LANES, dtype=np.uint64)).sum(1)
        else:
            found = {"any": any_, "all": all_, "uni": all_ | ~any_}[how]
        put(r[d], np.repeat(found, LANES), group)

    return step


@instruction("redux")
def reduce(code: Program, one: Instruction) -> Step:
    """Of the active lanes."""
    _, how, type_ = one.modifiers
    d, a = code.slots.write(one.operands[0], type_), code.slots.read(one.operands[1], type_)
    mask = code.slots.read(one.operands[2], "b32")
    kind = numpy_type(type_)
    limits = np.iinfo(kind)
    function, neutral = {
        "add": (np.add, 0),
        "max": (np.maximum, limits.min),
        "min": (np.minimum, limits.max),
        "and": (np.bitwise_and, kind(-1) if limits.min else limits.max),
        "or": (np.bitwise_or, 0),
        "xor": (np.bitwise_xor, 0),
    }[how]

    def step(r, group):
        require_members(one, r[mask], group)
        active = np.where(np.broadcast_to(group.where, r[a].shape), r[a], kind(neutral))
        found = function.reduce(by_warp(active, group), 1, dtype=kind)
        put(r[d], np.repeat(found, LANES), group)

    return step


@instruction("elect")
def elect(code: Program, one: Instruction) -> Step:
    """One lane of the mask: the lowest."""
    target = one.operands[0]
    d, p = code.slots.write(target.first, "b32"), code.slots.write(target.second, "pred")
    mask = code.slots.read(one.operands[1], "b32")

    def step(r, group):
        require_members(one, r[mask], group)
        members = (by_warp(r[mask], group) >> np.arange(LANES, dtype=np.uint32)) & 1
        leader = np.repeat(members.argmax(1), LANES)
        put(r[d], leader, group)
        put(r[p], np.tile(np.arange(LANES), len(members)) == leader, group)

    return step


@instruction("bar")
def warp_barrier(code: Program, one: Instruction) -> Step:
    """bar.warp.sync"""
    if one.modifiers != ("warp", "sync"):
        raise unknown(one, *one.modifiers)
    mask = one.operands[0].value if isinstance(one.operands[0], Immediate) else FULL
    return lambda r, group: require_members(one, mask & FULL, group)
