"""Words of four 8-bit floats whose halves ptxas may find equal, in PTX.

Where both halves of a word are one conversion, ptxas 12.8 and 12.9 convert once and leave the other
half as the register was (sm_90 and sm_100): a conversion merges its result into a register, and
nothing has been written to that one.
"""

import re

_CONVERSION = re.compile(r"cvt\.rn\.satfinite\.(relu\.)?e\dm\dx2\.f32")
_WORD = re.compile(r"mov\.b32\s+(\S+?),\s*\{\s*([^,\s]+),\s*([^,\s]+)\s*\}")
_INSTRUCTION = re.compile(r"([a-z][\w.]*)\s+(\{.*?\}|[^,\s]+),\s*(.+)")
# What gives the same of the same operands
_PURE = re.compile(r"(cvt|ex2|mul|add|sub|fma|max|min|mov|selp|and|or|xor|shl|shr)\.[^{\[]*$")


def equal_halves(ptx: str) -> list[str]:
    """The instructions that make such words. Values are equal here where the same instructions of
    the same operands gave them.
    """
    values: dict[str, object] = {}  # of registers; of others the name is the value
    numbered: dict[tuple, tuple] = {}
    found = []
    for line in re.split(r"[;\n]", re.sub(r"//.*", "", ptx)):
        line = line.strip().removeprefix("{").strip()
        if word := _WORD.fullmatch(line):
            result, low, high = word.groups()
            low, high = values.get(low, low), values.get(high, high)
            if low is high and isinstance(low, tuple) and _CONVERSION.match(low[0]):
                found.append(line)
            values[result] = object()
        elif one := _INSTRUCTION.fullmatch(line):
            operation, results, operands = one.groups()
            if _PURE.match(line):
                read = (values.get(x, x) for x in re.split(r",\s*", operands))
                key = operation, *(id(x) if isinstance(x, tuple) else x for x in read)
                values[results] = numbered.setdefault(key, key)
            else:
                values.update({x: object() for x in re.findall(r"%\w+", results)})
    return found
