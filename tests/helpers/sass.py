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


def assert_maxima_by_integers(loop, columns):
    """Maxima of two rows a thread, of so many columns each in two chains, are of three integers an
    instruction, and nothing is voted about between the wait for S and them.
    """
    of_three = [i for i, line in enumerate(loop) if "VIMNMX3" in line]
    integers = [i for i, line in enumerate(loop) if "VIMNMX" in line]
    assert len(of_three) == columns - 2 and len(integers) == columns
    path = loop[integers[0] : integers[-1]]
    assert not any("FMNMX" in line or "BRA" in line for line in path)
    waits = [i for i, line in enumerate(loop[: integers[0]]) if "WARPGROUP.DEPBAR" in line]
    votes = [i for i, line in enumerate(loop) if "VOTE.ALL" in line]
    assert len(votes) == 1 and votes[0] < waits[-1]
    assert not any("BSSY" in line for line in loop)  # the branch is of whole warps
