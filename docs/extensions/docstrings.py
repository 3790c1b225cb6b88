"""Docstrings as the library writes them, for Sphinx: plain text with three habits.

`name: what it is` begins a line where a parameter is explained; an indented block is code; names
stand in single backticks. The first becomes a list of parameters, the second a literal block, and
the third is what `default_role` reads.
"""

import inspect
import re

PARAMETER = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (.+)$")
SECTION = re.compile(r"^(Args|Raises|Returns):$")
INDENTED = re.compile(r"^    +\S")


def parameters_of(what: object) -> set[str]:
    """The names in a signature; of a class its fields, too."""
    try:
        names = set(inspect.signature(what).parameters)
    except (TypeError, ValueError):
        names = set()
    return names


def with_parameters(lines: list[str], known: set[str]) -> list[str]:
    """Lines `name: text` of known names become definitions, with what continues them."""
    made: list[str] = []
    inside = False
    for line in lines:
        found = PARAMETER.match(line)
        if found and set(found[1].split(", ")) <= known:
            if not inside and made and made[-1]:
                made.append("")
            names = ", ".join(f"**{name}**" for name in found[1].split(", "))
            made += [names, f"    {found[2]}"]
            inside = True
        elif inside and line.strip():
            made.append(f"    {line.strip()}")
        else:
            inside = False
            made.append(line)
    return made


def with_sections(lines: list[str]) -> list[str]:
    """`Args:` and `Raises:` of Google's style: their indented lines become definitions."""
    made: list[str] = []
    inside = False
    for line in lines:
        if found := SECTION.match(line):
            made += [f"{'Parameters' if found[1] == 'Args' else found[1]}:", ""]
            inside = True
        elif inside and (entry := re.match(r"^    (\w[\w, ]*): (.+)$", line)):
            names = ", ".join(f"**{name}**" for name in entry[1].split(", "))
            made += [names, f"    {entry[2]}"]
        elif inside and line.startswith("     "):
            made.append(f"    {line.strip()}")
        else:
            inside = inside and not line.strip()
            made.append(line)
    return made


def with_code(lines: list[str]) -> list[str]:
    """A block that is indented after an empty line becomes literal."""
    made: list[str] = []
    inside = False
    for place, line in enumerate(lines):
        is_first = place == 0 or not lines[place - 1].strip()
        if not inside and is_first and INDENTED.match(line) and ">>>" not in line:
            before = next((x for x in reversed(made) if x.strip()), "")
            if not before.endswith("::") and not before.lstrip().startswith("**"):
                made += [".. code-block:: python" if is_code(lines[place:]) else "::", ""]
            inside = True
        elif inside and line.strip() and not line.startswith("    "):
            inside = False
        made.append(line)
    return made


def is_code(lines: list[str]) -> bool:
    """Whether a block parses as Python; formulas and shell commands do not."""
    block = []
    for line in lines:
        if line.strip() and not line.startswith("    "):
            break
        block.append(line[4:])
    try:
        compile("\n".join(block), "<docstring>", "exec")
    except SyntaxError:
        return False
    return True


def escaped(lines: list[str]) -> list[str]:
    """Bars are bars in text: reStructuredText would look for a substitution between two."""
    return [x if x.startswith("    ") or ">>>" in x else x.replace("|", r"\|") for x in lines]


def process(app, what, name, obj, options, lines) -> None:
    """Called by autodoc for each docstring."""
    made = escaped(lines)
    made = with_sections(made) if any(map(SECTION.match, made)) else with_code(made)
    lines[:] = with_parameters(made, parameters_of(obj))


def setup(app) -> dict:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
