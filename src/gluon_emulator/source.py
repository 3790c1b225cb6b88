"""Kernel source, rewritten so that Python gives names the types the compiler gives them.

The compiler turns a number into a tensor when it is assigned and when it counts a loop. Plain
Python does not, so `n = 0; n.to(tl.int64)` would fail, and an index would never overflow int32.
Two rewrites restore this; everything else in a kernel means the same in Python.
"""

import ast
import linecache
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_TO_TENSOR, _LOOP_RANGE = "__to_tensor__", "__loop_range__"
_rewritten: dict[types.CodeType, types.CodeType | None] = {}
# By path: lines, and the definitions among them that are as they were read
_parsed: dict[str, tuple[list[str], dict[int, ast.FunctionDef]]] = {}


def as_compiled(fn: Callable[..., Any], to_tensor: Any, loop_range: Any) -> Callable[..., Any]:
    """Return `fn` with its assignments passed through `to_tensor`, its ranges `loop_range`.

    Globals, defaults and captured variables stay the function's own. A function without source
    is returned as it is.
    """
    if fn.__code__ not in _rewritten:
        _rewritten[fn.__code__] = _rewrite(fn)
    code = _rewritten[fn.__code__]
    if code is None:
        return fn
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or ()))
    cells |= {_TO_TENSOR: types.CellType(to_tensor), _LOOP_RANGE: types.CellType(loop_range)}
    closure = tuple(cells[name] for name in code.co_freevars)
    new = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    new.__kwdefaults__ = fn.__kwdefaults__
    return new


def _rewrite(fn: Callable[..., Any]) -> types.CodeType | None:
    function = _definition(fn)
    if function is None:
        return None
    # Evaluated once already, perhaps from names that are gone.
    function.decorator_list, function.returns = [], None
    function.args.defaults, function.args.kw_defaults = [], [None] * len(function.args.kwonlyargs)
    for arg in ast.walk(function.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    for statement in _statements(function.body):
        if isinstance(statement, ast.Assign):
            statement.value = _call(_TO_TENSOR, statement.value)
        elif isinstance(statement, ast.For) and isinstance(statement.iter, ast.Call):
            name = statement.iter.func
            if isinstance(name, ast.Name) and name.id == "range":
                name.id = _LOOP_RANGE
    # Captured variables are parameters of a function around it, hence its free variables again.
    names = (*fn.__code__.co_freevars, _TO_TENSOR, _LOOP_RANGE)
    outer = ast.parse(f"def outer({', '.join(names)}): pass")
    outer.body[0].body = [function]  # type: ignore[attr-defined]
    code = compile(outer, fn.__code__.co_filename, "exec")
    return _code_within(_code_within(code, "outer"), function.name)


def _definition(fn: Callable[..., Any]) -> ast.FunctionDef | None:
    """The function's definition in its parsed file, which the caller may change."""
    path, first = fn.__code__.co_filename, fn.__code__.co_firstlineno
    linecache.checkcache(path)
    lines = linecache.getlines(path, fn.__globals__)
    read, definitions = _parsed.get(path, ([], {}))
    if read is not lines or first not in definitions:  # or it was changed already
        definitions = _definitions("".join(lines))
        _parsed[path] = lines, definitions
    return definitions.pop(first, None)


def _definitions(text: str) -> dict[int, ast.FunctionDef]:
    """By the first line, that of a decorator if there is one."""
    # Cells of a notebook are files with `await`
    options = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    module: Any = compile(text, "<kernels>", "exec", options)
    return {
        min(x.lineno for x in (node, *node.decorator_list)): node
        for node in _statements(module.body)
        if isinstance(node, ast.FunctionDef)
    }


def _statements(body: Iterable[Any]) -> Iterator[Any]:
    """Statements and those within them."""
    for node in body:
        yield node
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            yield from _statements(getattr(node, field, ()))


def _call(name: str, argument: ast.expr) -> ast.Call:
    function = ast.copy_location(ast.Name(name, ast.Load()), argument)
    return ast.copy_location(ast.Call(function, [argument], []), argument)


def _code_within(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
