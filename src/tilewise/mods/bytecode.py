"""The globals and free variables that a function reads, proven from its bytecode.

A few instructions are known to read nothing but the function's own values, globals and free
variables by name, and attributes of those. A function made of others is not proven to read nothing
else: it may import, call `eval` or read an attribute of whatever it computed.
"""

from __future__ import annotations

import builtins
import dis
import types

Path = tuple[str, ...]  # a name, and attributes of what it stands for
Paths = tuple[Path, ...]


# Builtins whose result depends on their arguments alone
PURE = {
    name: getattr(builtins, name)
    for name in (
        *("abs", "all", "any", "bool", "divmod", "enumerate", "float", "int", "len", "list"),
        *("max", "min", "pow", "range", "reversed", "round", "sum", "tuple", "zip"),
    )
}
LOADS = {"LOAD_GLOBAL", "LOAD_DEREF"}
ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
# From Python 3.11 to 3.14; what a newer one adds is not proven
OWN = {
    *("RESUME", "NOP", "CACHE", "COPY_FREE_VARS", "NOT_TAKEN", "RETURN_VALUE", "RETURN_CONST"),
    *("LOAD_CONST", "LOAD_CONST_IMMORTAL", "LOAD_CONST_MORTAL", "LOAD_SMALL_INT"),
    *("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_FAST_LOAD_FAST"),
    *("LOAD_FAST_BORROW", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"),
    *("STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST", "STORE_FAST_MAYBE_NULL"),
    *("POP_TOP", "COPY", "SWAP", "PUSH_NULL", "TO_BOOL"),
    *("UNARY_POSITIVE", "UNARY_NEGATIVE", "UNARY_NOT", "UNARY_INVERT"),
    *("BINARY_OP", "BINARY_SUBSCR", "BINARY_SLICE", "COMPARE_OP", "CONTAINS_OP", "IS_OP"),
    *("BUILD_TUPLE", "BUILD_LIST", "BUILD_SLICE", "LIST_APPEND", "LIST_EXTEND", "UNPACK_SEQUENCE"),
    *("GET_ITER", "FOR_ITER", "END_FOR", "POP_ITER"),
    *("PRECALL", "KW_NAMES", "CALL", "CALL_KW", "CALL_FUNCTION_EX"),
    *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
    *("JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP"),
}
JUMPS = "POP_JUMP_"  # on true, false, none, forward, backward


def reads_in(code: types.CodeType, methods: frozenset[str] = frozenset()) -> Paths | None:
    """All that the code reads from around its function, each once: free variables, which
    `co_freevars` names, and globals; None where that is not proven. `methods` read nothing, of
    whatever is computed.

    >>> reads_in((lambda x: abs(x) < math.pi).__code__)
    (('abs',), ('math', 'pi'))
    >>> reads_in((lambda x: x.y).__code__)
    """
    paths: dict[Path, None] = {}
    path: Path = ()  # of what lies on top of the stack
    for step in dis.get_instructions(code):
        if step.is_jump_target:  # something else may lie there
            paths[path] = None
            path = ()
        if step.opname == "EXTENDED_ARG":
            continue
        if step.opname in ATTRIBUTES and path:
            path = *path, step.argval
            continue
        paths[path] = None
        path = ()
        if step.opname in LOADS:
            path = (step.argval,)
        elif step.opname in ATTRIBUTES and step.argval in methods:
            continue
        elif step.opname not in OWN and not step.opname.startswith(JUMPS):
            return None
    return tuple(path for path in paths if path)
