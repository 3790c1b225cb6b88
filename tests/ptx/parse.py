"""PTX text as a list of instructions.

Braces open scopes, in which inline assembly declares registers and labels of its own; here each
gets a name that no other scope has. `.loc` says which line of the kernel an instruction is of.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from .errors import UnknownInstruction

Operand = "Register | Immediate | Vector | Address | Name | Pair"


class Register(NamedTuple):
    """A register, or a special one such as %tid.x; `!p` is negated."""

    name: str
    is_negated: bool = False


class Immediate(NamedTuple):
    """A number: an integer, or the bits of a float of `float_bits` bits."""

    value: int
    float_bits: int = 0


class Name(NamedTuple):
    """A label, a parameter, a variable in memory, or the sink `_`."""

    name: str


class Vector(NamedTuple):
    """{a, b, ...}"""

    items: tuple


class Pair(NamedTuple):
    """Two destinations, d|p."""

    first: Register | Name
    second: Register | Name


class Address(NamedTuple):
    """[base + offset], or [base, {coordinates}]."""

    base: Register | Name | Immediate
    offset: int = 0
    coordinates: Vector | None = None


@dataclass
class Instruction:
    """One instruction: `@guard opcode.modifiers operands;`."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: list
    guard: Register | None
    text: str
    line: str  # of the kernel

    def __str__(self) -> str:
        return f"`{self.text}`" + (f" of {self.line}" if self.line else "")


@dataclass
class Parameter:
    """A parameter of the entry."""

    name: str
    type: str  # b8 for bytes
    count: int  # of bytes, for b8


@dataclass
class Kernel:
    """An entry."""

    name: str = ""
    parameters: list[Parameter] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # name to type
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # to the instruction that follows
    tables: dict[str, list[str]] = field(default_factory=dict)  # .branchtargets
    max_registers: int = 0  # .maxnreg
    threads: int = 128  # .reqntid


_ENTRY = re.compile(r"\.entry\s+(?P<name>[\w$]+)\s*\((?P<parameters>.*?)\)(?P<rest>[^{]*)\{", re.S)
_PARAMETER = re.compile(r"\.param\s+(?P<head>[^,]*?)(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?\s*$")
_LOC = re.compile(r"^\s*\.loc\s+([^\n]*)$", re.M)
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
_OPCODE = re.compile(
    r"(?:@(?P<guard>!?[%\w$]+)\s+)?(?P<opcode>[a-z]\w*)(?P<modifiers>(?:(?:\.|::)\w+)*)"
)
_RANGE = re.compile(r"([%\w$]+)<(\d+)>")
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?$")


def parse(text: str) -> Kernel:
    """The only entry of a module."""
    found = _ENTRY.search(without_comments(text))
    if found is None:
        raise UnknownInstruction("this text has no .entry")
    kernel = Kernel(found["name"])
    for item in filter(str.strip, found["parameters"].split(",")):
        one = _PARAMETER.search(item)
        kind = re.search(r"\.([a-z]\d+)\b", one["head"])[1]
        kernel.parameters.append(Parameter(one["name"], kind, int(one["count"] or 0)))
    limit = re.search(r"\.maxnreg\s+(\d+)", found["rest"])
    kernel.max_registers = int(limit[1]) if limit else 0
    threads = re.search(r"\.reqntid\s+(\d+)", found["rest"])
    kernel.threads = int(threads[1]) if threads else 128
    parse_body(found.string[found.end() :], kernel)
    return kernel


def parse_body(text: str, kernel: Kernel) -> None:
    """Adds the statements of a body, up to its closing brace."""
    scopes, scope_count = [_Scope(0, kernel)], 0
    pending, braces, line = "", 0, ""  # a statement's text so far, and its open braces
    for token in re.findall(r"[;{}]|[^;{}]+", text):
        if token == "{" and not pending.strip():
            scope_count += 1
            scopes.append(_Scope(scope_count, kernel))
        elif token == "}" and not braces:
            _finish(scopes.pop(), kernel)
            if not scopes:
                return
        elif token != ";" or braces:
            braces += (token == "{") - (token == "}")
            pending += token
            while label := _LABEL.match(pending):
                name = scopes[-1].define_label(label[1])
                pending = pending[label.end() :]
                if ".branchtargets" in pending:
                    pending = f".branchtargets {name}, {pending.split('.branchtargets')[1]}"
                else:
                    kernel.labels[name] = len(kernel.instructions)
        else:
            statement, pending = " ".join(pending.split()), ""
            if statement.startswith(".loc"):
                line = statement.removeprefix(".loc").strip()
            elif statement.startswith(".branchtargets"):
                name, *targets = re.split(r"[,\s]+", statement)[1:]
                kernel.tables[name] = targets
            elif statement.startswith(".reg"):
                scopes[-1].declare(statement)
            elif statement and not statement.startswith(".pragma"):
                scopes[-1].statements.append((len(kernel.instructions), list(scopes)))
                kernel.instructions.append(_instruction(statement, line, scopes))
    while scopes:  # of assembly without braces
        _finish(scopes.pop(), kernel)


class _Scope:
    """What is declared between two braces."""

    def __init__(self, number: int, kernel: Kernel) -> None:
        self.suffix = f"@{number}" if number else ""
        self.kernel = kernel
        self.names: dict[str, str] = {}
        self.statements: list[tuple[int, list[_Scope]]] = []

    def declare(self, statement: str) -> None:
        """`.reg .b32 a, b, %r<5>;`"""
        _, kind, names = statement.split(None, 2)
        for name in re.split(r"\s*,\s*", names):
            several = _RANGE.fullmatch(name)
            every = [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name]
            for one in every:
                self.names[one] = one + self.suffix
                self.kernel.registers[one + self.suffix] = kind.lstrip(".")

    def define_label(self, name: str) -> str:
        """Its own name, as other scopes may have the same label."""
        self.names[name] = name + self.suffix
        return self.names[name]


def _finish(scope: _Scope, kernel: Kernel) -> None:
    """Labels may follow the branches to them: names are known at the end of a scope."""
    for at, scopes in scope.statements:
        instruction = kernel.instructions[at]
        instruction.operands = [
            Name(_found(x.name, scopes)) if isinstance(x, Name) else x for x in instruction.operands
        ]


def _found(name: str, scopes: list[_Scope]) -> str:
    """What a name is, of the innermost scope that has it."""
    for scope in reversed(scopes):
        if name in scope.names:
            return scope.names[name]
    return name


def without_comments(text: str) -> str:
    """Without comments, but those of `.loc`, which say the line; these end with a semicolon."""
    text = _LOC.sub(lambda found: f".loc {_line(found[1])};", text)
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def _line(loc: str) -> str:
    """file:line:column of a `.loc`, and of the calls that led there."""
    _, has_comment, comment = loc.partition("//")
    named = comment if has_comment else loc
    return re.sub(r"[;{}\[\]]", "", named).strip()


def _instruction(statement: str, line: str, scopes: list[_Scope]) -> Instruction:
    head = _OPCODE.match(statement)
    if head is None:
        raise UnknownInstruction(f"no instruction: {statement!r}")
    modifiers = tuple(re.split(r"\.|(?<=\w)(?=::)", head["modifiers"])[1:])
    joined: list[str] = []
    for one in modifiers:  # shared::cta is one modifier
        if one.startswith("::"):
            joined[-1] += one
        else:
            joined.append(one)
    guard = head["guard"]
    operands = [_operand(x, scopes) for x in _split(statement[head.end() :])]
    named = None if guard is None else _operand(guard, scopes)
    short = re.sub(r"\{([^{},]*,[^{},]*),[^{}]{80,}\}", r"{\1, ...}", statement)
    return Instruction(head["opcode"], tuple(joined), operands, named, short, line)


def _split(text: str) -> list[str]:
    """At commas outside of brackets and braces."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [x.strip() for x in parts if x.strip()]


def _operand(text: str, scopes: list[_Scope]):
    if text.startswith("{"):
        return Vector(tuple(_operand(x, scopes) for x in _split(text[1:-1])))
    if text.startswith("["):
        return _address(text[1:-1].strip(), scopes)
    if "|" in text:
        return Pair(*(_operand(x.strip(), scopes) for x in text.split("|")))
    if text.startswith("!"):
        return Register(_found(text[1:].strip(), scopes), True)
    if _NUMBER.match(text):
        return Immediate(int(text.rstrip("U"), 0))
    if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
        return Immediate(int(text[2:], 16), 32)
    if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
        return Immediate(int(text[2:], 16), 64)
    name = _found(text, scopes)
    is_register = name in scopes[0].kernel.registers or text.startswith("%")
    return Register(name) if is_register else Name(name)


def _address(text: str, scopes: list[_Scope]) -> Address:
    base, *more = _split(text)
    coordinates = _operand(more[0], scopes) if more else None
    name, plus, offset = (x.strip() for x in base.partition("+"))
    return Address(_operand(name, scopes), int(offset, 0) if plus else 0, coordinates)
