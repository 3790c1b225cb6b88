"""wgmma, and the moves of matrices between shared memory and registers.

A wgmma reads its operands when it completes: at the wait for it, or with a seed at any time before.
Products of 16-bit floats are summed in fp32. Of 8-bit floats an instruction adds 32 products, each
cut to SHORT bits below the leading one of the largest, as measured on an H200
(gluon_emulator/hopper/wgmma.py).
"""

import re
from functools import lru_cache
from typing import Any

import numpy as np

from .copies import swizzled
from .errors import AsyncFault, Divergence, MemoryFault
from .formats import E4M3, E5M2, f32_from_bf16
from .memory import active, active_warps, address_slot, addresses_of
from .moves import put
from .parse import Instruction, Vector
from .program import Program, Step, Wait, instruction, names_of, unknown, waiting

SHORT = 13
SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}  # by bits 62 and 63 of a descriptor


def decoded(raw: np.ndarray, type_: str) -> np.ndarray:
    """fp32 of operands' bytes."""
    if type_ == "bf16":
        return f32_from_bf16(raw.view(np.uint16))
    if type_ == "f16":
        return raw.view(np.float16).astype(np.float32)
    return {"e4m3": E4M3, "e5m2": E5M2}[type_].decode(raw)


class Descriptor:
    """A matrix in shared memory, (rows, K bytes) of it, as a wgmma descriptor says."""

    def __init__(self, bits: int, one: Instruction) -> None:
        self.start = (bits & 0x3FFF) << 4
        self.leading = (bits >> 16 & 0x3FFF) << 4  # byte offsets
        self.stride = (bits >> 32 & 0x3FFF) << 4
        self.swizzle = SWIZZLES[bits >> 62]
        if bits >> 49 & 7:
            raise unknown(one, "base offset")

    def places(self, rows: int, k: int, element: int, is_transposed: bool) -> np.ndarray:
        """(rows, k, bytes of an element) of addresses."""
        key = rows, k, element, is_transposed, self.leading, self.stride, self.swizzle
        return swizzled(self.start + _offsets(*key), self.swizzle)


@lru_cache(maxsize=256)
def _offsets(
    rows: int, k: int, element: int, is_transposed: bool, leading: int, stride: int, swizzle: int
) -> np.ndarray:
    """The canonical layouts of the PTX ISA, before the swizzle."""
    i, j = np.arange(rows)[:, None], np.arange(k)[None, :]
    if not is_transposed:  # K-major: 8 rows of `swizzle` bytes, or of 16 bytes without
        row, byte = swizzle or 16, j * element
        found = i % 8 * row + i // 8 * stride + byte % row + byte // row * leading
    else:  # MN-major: 8 steps of K
        wide = (swizzle or 16) // element
        outer, inner = (leading, stride) if swizzle else (stride, leading)
        found = i % wide * element + i // wide * outer
        found = found + j % 8 * wide * element + j // 8 * inner
    return found[..., None] + np.arange(element)


class Matmul:
    """One wgmma.mma_async of a warpgroup."""

    def __init__(self, group, one: Instruction, shape: tuple[int, int], types: tuple) -> None:
        self.cta, self.one, self.shape, self.type = group.cta, one, shape, types[0]
        self.warps = [x.index for x in group.warps]
        self.d: list[np.ndarray] = []
        self.a: Any = None  # registers, or (descriptor, is transposed)
        self.b: Any = None
        self.adds = True
        fragments = [x for x in one.operands[:2] if isinstance(x, Vector)]
        self.registers = {x.name for vector in fragments for x in vector.items}

    def execute(self) -> None:
        n, k = self.shape
        element = 32 // k
        if isinstance(self.a, list):
            a = _left_fragments(self.a, element)
        else:
            a = self._operand(*self.a, 64, k, element)
        a = decoded(np.ascontiguousarray(a), self.type).reshape(64, k)
        b = decoded(self._operand(*self.b, n, k, element), self.type).reshape(n, k)
        acc = _accumulator(self.d) if self.adds else np.zeros((64, n), np.float32)
        found = _short_sum(a, b, acc) if element == 1 else rounded_once(a, b.T, acc)
        for target, values in zip(self.d, _to_accumulator(found)):
            target[:] = values

    def _operand(self, descriptor: Descriptor, is_transposed: bool, *shape: int) -> np.ndarray:
        shared = self.cta.shared
        places = descriptor.places(*shape, is_transposed)
        if places.max() >= len(shared.bytes):
            raise MemoryFault(f"{self.one}: an operand past shared memory")
        shared.check_fenced(places, self.warps, self.one)
        return shared.bytes[places]


def _left_fragments(registers: list[np.ndarray], element: int) -> np.ndarray:
    """(64, bytes): A of four registers, rows r and r + 8 of the first half of K, then the other."""
    words = np.stack(registers).reshape(2, 2, 4, 8, 4)  # half of K, of rows; warp, row, thread
    words = words.transpose(2, 1, 3, 0, 4)
    return np.ascontiguousarray(words).view(np.uint8).reshape(64, 32)


def _accumulator(registers: list[np.ndarray]) -> np.ndarray:
    """(64, N): of eight columns a thread has two, of rows r and r + 8."""
    values = np.stack(registers).reshape(
        -1, 2, 2, 4, 8, 4
    )  # eight, rows, column, warp, row, thread
    return values.transpose(3, 1, 4, 0, 5, 2).reshape(64, -1)


def _to_accumulator(values: np.ndarray) -> np.ndarray:
    """The opposite: (registers, lanes)."""
    parts = values.reshape(4, 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return parts.reshape(-1, 128)


def rounded_once(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """total + a b, of fp64: in fp32 a sum's order, and so its bits, would follow the shapes."""
    return (total + a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)


def _short_sum(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """The products of 32 columns of a and b, cut, added to the total."""
    products = a.T[:, :, None] * b.T[:, None, :]  # (32, 64, N)
    largest = np.maximum(np.abs(products).max(0), np.abs(total))
    unit = np.exp2(np.frexp(largest)[1] - np.float32(1 + SHORT)).astype(np.float32)
    products /= unit
    kept = (np.trunc(total / unit) + np.trunc(products, out=products).sum(0)) * unit
    is_plain = np.isfinite(largest) & (largest > 0)
    return np.where(is_plain, kept, rounded_once(a, b.T, total))


class Matmuls:
    """Those in flight of a warpgroup, by commit group."""

    def __init__(self) -> None:
        self.pending: list[Matmul] = []  # not committed
        self.groups: list[list[Matmul]] = []

    def issue(self, matmul: Matmul, random: Any) -> None:
        """With a seed, half of the times all in flight complete."""
        self.pending.append(matmul)
        if random is not None and random.random() < 0.5:
            for made in [x for group in self.groups for x in group] + self.pending:
                made.execute()
                made.execute = lambda: None

    def check_registers(self, block: Any) -> None:
        """Until their wait, no other instruction may name the registers of these."""
        for made in [x for group in self.groups for x in group] + self.pending:
            if both := made.registers & block.registers:
                names = " ".join(sorted(both)[:4])
                texts = [str(x) for x in block.instructions if both & set(names_of(x))]
                raise AsyncFault(f"{texts[0]} names {names} of {made.one}, which is in flight")


@instruction("wgmma")
def wgmma(code: Program, one: Instruction) -> Step:
    """fence, commit_group and mma_async."""
    if one.modifiers[0] == "fence":
        return lambda r, group: None
    if one.modifiers[0] == "commit_group":
        return _commit
    if one.modifiers[0] != "mma_async":
        raise unknown(one, *one.modifiers)
    *_, shape, d_type, a_type, b_type = one.modifiers
    n, k = map(int, re.fullmatch(r"m64n(\d+)k(\d+)", shape).groups())
    if d_type != "f32" or a_type != b_type or a_type not in ("f16", "bf16", "e4m3", "e5m2"):
        raise unknown(one, d_type, a_type, b_type)
    d, a, b, adds, *immediates = one.operands
    scales, transposes = immediates[:2], [bool(x.value) for x in immediates[2:]]
    if any(x.value != 1 for x in scales) or len(d.items) != n // 2:
        raise unknown(one, "scales")
    is_register = isinstance(a, Vector)
    trans_b = transposes[-1] if transposes else False
    trans_a = transposes[0] if transposes and not is_register else False
    if k == 32 and (trans_a or trans_b):
        raise unknown(one, "transposed operands of 8 bits")
    targets = code.sources(d.items, "f32")
    left = code.sources(a.items, "b32") if is_register else code.slots.read(a, "u64")
    right, adds = code.slots.read(b, "u64"), code.slots.read(adds, "pred")

    def step(r, group):
        if len(group.warps) != 4 or group.where is not True or group.warps[0].index % 4:
            raise Divergence(f"{one}: not of a whole warpgroup")
        made = Matmul(group, one, (n, k), (a_type,))
        made.d = [r[x] for x in targets]
        made.adds = bool(uniform(r[adds], one))
        if is_register:
            made.a = [r[x] for x in left]
        else:
            made.a = Descriptor(int(uniform(r[left], one)), one), trans_a
        made.b = Descriptor(int(uniform(r[right], one)), one), trans_b
        matmuls = group.cta.matmuls.setdefault(group.warps[0].index // 4, Matmuls())
        matmuls.issue(made, group.cta.machine.random)

    return step


def uniform(values: np.ndarray, one: Instruction) -> Any:
    """What all lanes of a warpgroup have."""
    if (values != np.ravel(values)[0]).any():
        raise Divergence(f"{one}: an operand differs between lanes")
    return np.ravel(values)[0]


def _commit(r, group) -> None:
    matmuls = group.cta.matmuls.setdefault(group.warps[0].index // 4, Matmuls())
    matmuls.groups.append(matmuls.pending)
    matmuls.pending = []


@waiting("wgmma.wait_group")
def wait_group(code: Program, one: Instruction) -> Wait:
    """Completes all groups but the newest."""
    count = one.operands[0].value

    def wait(r, group, warp):
        matmuls = group.cta.matmuls.get(warp.index // 4)
        if matmuls is None:
            return
        while len(matmuls.groups) > count:
            for made in matmuls.groups.pop(0):
                made.execute()
        if not matmuls.groups and not matmuls.pending:
            del group.cta.matmuls[warp.index // 4]

    return wait


@instruction("mma")
def mma(code: Program, one: Instruction) -> Step:
    """m16n8 of 32 bytes of K, by each warp, in fragments as those of a warp of a wgmma."""
    *head, d_type, a_type, b_type, c_type = one.modifiers
    is_known = head[:2] == ["sync", "aligned"] and head[3:] == ["row", "col"] and a_type == b_type
    k = {"m16n8k16": 16, "m16n8k32": 32}.get(head[2])
    if not is_known or {d_type, c_type} != {"f32"} or k != {"f16": 16, "bf16": 16}.get(a_type, 32):
        raise unknown(one, *one.modifiers)
    d = [code.slots.write(x, "f32") for x in one.operands[0].items]
    a, b = (code.sources(x.items, "b32") for x in one.operands[1:3])
    c = code.sources(one.operands[3].items, "f32")

    def step(r, group):
        for warp in group.warps:
            group.require_whole(warp, one)
        lanes = group.lanes.stop - group.lanes.start
        a_words, b_words, values = (
            np.stack([np.broadcast_to(r[x], lanes) for x in slots]) for slots in (a, b, c)
        )
        # half of K, of rows; warp, row, thread
        left = a_words.reshape(2, 2, -1, 8, 4).transpose(2, 1, 3, 0, 4)
        right = b_words.reshape(2, -1, 8, 4).transpose(1, 2, 0, 3)
        total = values.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
        left, right = (
            decoded(np.ascontiguousarray(x).view(np.uint8), a_type).reshape(len(x), -1, k)
            for x in (left, right)
        )
        found = rounded_once(left, right.transpose(0, 2, 1), total)
        parts = found.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        for slot, part in zip(d, parts):
            put(r[slot], part, group)

    return step


@instruction("ldmatrix", "stmatrix")
def move_matrices(code: Program, one: Instruction) -> Step:
    """Matrices of 8 rows of 16 bytes: lane 8 i + j has the address of row j of matrix i, and a lane
    has two neighbours of a row.
    """
    left = [x for x in one.modifiers if x not in ("sync", "aligned", "shared", "shared::cta")]
    is_transposed = "trans" in left
    left = [x for x in left if x != "trans"]
    if left[0] != "m8n8" or left[2:] != ["b16"] or left[1] not in ("x1", "x2", "x4"):
        raise unknown(one, *left)
    count, is_load = int(left[1][1]), one.opcode == "ldmatrix"
    registers, address = one.operands if is_load else one.operands[::-1]
    slots = [
        code.slots.write(x, "b32") if is_load else code.slots.read(x, "b32")
        for x in registers.items
    ]
    base, offset = address_slot(code, address)

    def step(r, group):
        if group.where is not True:
            for warp in group.warps:
                group.require_whole(warp, one)
        at = addresses_of(r, base, offset, group).reshape(-1, 32)
        warps = active_warps(group).reshape(-1, 32)[:, 0]
        shared = group.cta.shared
        for n, slot in enumerate(slots[:count]):
            rows = at[:, 8 * n : 8 * n + 8].ravel()
            if is_load:
                data = shared.load(rows, 16, one).view(np.uint16).reshape(-1, 8, 8)
                data = data.transpose(0, 2, 1) if is_transposed else data
                words = np.ascontiguousarray(data).view(np.uint32)
                r[slot].reshape(-1, 32)[warps - group.warps[0].index] = words.reshape(-1, 32)
                continue
            words = np.ascontiguousarray(active(r[slot], group)).reshape(-1, 8, 4)
            data = words.view(np.uint16).reshape(-1, 8, 8)
            data = data.transpose(0, 2, 1) if is_transposed else data
            data = np.ascontiguousarray(data).view(np.uint8).reshape(-1, 16)
            shared.store(rows, data, one, np.repeat(warps, 8))

    return step
