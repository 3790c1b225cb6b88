"""Kernels that are compiled once for all lengths.

Triton compiles another kernel where an integer is 1 or a multiple of 16. Strides need that, because
it says how addresses are aligned. For lengths and counts it makes a dozen kernels where one would
do, 5 seconds each, some of them in the middle of serving. `do_not_specialize` prevents that for an
integer, but not for one in a tuple (Triton 3.6 to 3.9).

Triton has no public way to ask for it. What is replaced is private: the factory of a kernel's
`device_caches`, whose last item is the function that looks at arguments (`create_binder`). That
one is called first, and of what it returns only entries of integers change. A Triton whose items
are others fails at the first call of each kernel; one that looks at arguments elsewhere compiles
more kernels, with the same results, which `tests/kernels/test_lengths.py` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

INT32 = 2**31


def for_all_lengths(names: Iterable[str]) -> Callable[[Any], Any]:
    """A decorator of kernels: integers in these parameters, and in their tuples, do not select
    code. Of a field of a tuple the name is `parameter.field`.
    """

    def decorated(kernel: Any) -> Any:
        caches = getattr(kernel, "device_caches", None)
        if caches is not None:  # else Triton's own interpreter has it
            create, order = caches.default_factory, kernel.arg_names
            paths = [name.split(".") for name in names]
            places = [(order.index(name), fields) for name, *fields in paths]
            caches.default_factory = lambda: with_plain_integers(create(), places)
        return kernel

    return decorated


def with_plain_integers(cache: tuple, places: Iterable[tuple[int, list[str]]]) -> tuple:
    """What Triton keeps of a kernel for a device: last the function that looks at arguments."""
    *caches, bind = cache

    def bind_plainly(*args: Any, **options: Any) -> tuple:
        bound, looks, options = bind(*args, **options)
        values = tuple(bound.values())
        for place, fields in places:
            looks[place] = plain(looks[place], values[place], fields)
        return bound, looks, options

    return *caches, bind_plainly


def plain(look: tuple, value: Any, fields: list[str]) -> tuple:
    """How Triton looks at a value, its type and what code is selected by, without the latter of
    integers; of one field, if there are some.
    """
    if isinstance(value, tuple):
        types, keys = map(list, look)
        for place, item in enumerate(value):
            if not fields or value._fields[place] == fields[0]:
                inner = types[place], keys[place]
                types[place], keys[place] = plain(inner, item, fields[1:])
        make = getattr(value, "_make", tuple)
        return make(types), make(keys)
    if type(value) is not int:
        return look
    return ("i32" if -INT32 <= value < INT32 else "i64"), ""
