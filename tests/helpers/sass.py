"""Machine code that `build` made, by its loops."""

import re

from tilewise.testing import offline


def innermost_loops(kernel, instruction):
    """The instructions of each loop that has a certain one, and no such loop within."""
    labels, code = {}, []
    for line in offline._disassemble(kernel.asm["cubin"]).splitlines():
        if name := re.match(r"(\.L_x_\d+):", line):
            labels[name[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(found[1])
    spans = []
    for at, line in enumerate(code):
        branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if branch and labels[branch[1]] <= at:
            spans.append((labels[branch[1]], at + 1))
    inner = []
    for first, stop in sorted(spans, key=lambda span: span[1] - span[0]):
        has_one = any(re.search(rf"\b{instruction}\b", line) for line in code[first:stop])
        if has_one and not any(first <= a and b <= stop for a, b in inner):
            inner.append((first, stop))
    return [code[first:stop] for first, stop in inner]


def spills_in(loop):
    """How many instructions read or write what is spilled."""
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in loop)
