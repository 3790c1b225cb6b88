"""Kernel source, rewritten so that Python gives names the types the compiler gives them.

The compiler turns a number into a tensor when it is assigned and when it counts a loop. Plain
Python does not, so `n = 0; n.to(tl.int64)` would fail, and an index would never overflow int32.
Two rewrites restore this; everything else in a kernel means the same in Python.
"""

import ast
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable
from typing import Any

_TO_TENSOR, _LOOP_RANGE = "__to_tensor__", "__loop_range__"
_rewritten: dict[types.CodeType, types.CodeType | None] = {}


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


class _AsCompiled(ast.NodeTransformer):
    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = ast.Call(ast.Name(_TO_TENSOR, ast.Load()), [node.value], [])
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        call = node.iter
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == "range"
        ):
            call.func.id = _LOOP_RANGE
        return node


def _rewrite(fn: Callable[..., Any]) -> types.CodeType | None:
    path, first = fn.__code__.co_filename, fn.__code__.co_firstlineno
    # As inspect.getsourcelines, which looks through all modules before
    linecache.checkcache(path)
    lines = linecache.getlines(path, fn.__globals__)
    if len(lines) < first:
        return None
    lines = inspect.getblock(lines[first - 1 :])
    function = ast.parse(textwrap.dedent("".join(lines))).body[0]
    if not isinstance(function, ast.FunctionDef):
        return None
    # Evaluated once already, perhaps from names that are gone.
    function.decorator_list, function.returns = [], None
    function.args.defaults, function.args.kw_defaults = [], [None] * len(function.args.kwonlyargs)
    for arg in ast.walk(function.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    # Captured variables are parameters of a function around it, hence its free variables again.
    names = (*fn.__code__.co_freevars, _TO_TENSOR, _LOOP_RANGE)
    outer = ast.parse(f"def outer({', '.join(names)}): pass")
    outer.body[0].body = [_AsCompiled().visit(function)]  # type: ignore[attr-defined]
    ast.increment_lineno(function, first - 1)
    code = compile(ast.fix_missing_locations(outer), fn.__code__.co_filename, "exec")
    return _code_within(_code_within(code, "outer"), function.name)


def _code_within(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
