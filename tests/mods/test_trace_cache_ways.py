"""A function whose reads its bytecode does not prove is traced at every call."""

import builtins
import contextlib
import functools
import math
import operator
import os
import sys
import types

import pytest
import torch

from tilewise import mods
from tilewise.mods import trace

LIMIT = 3
users = types.ModuleType("settings")
users.limit = 3


class Settings:
    limit = 3


def furthest(least=1, *, more=2):
    return max(least, more)


def limit_of_global():
    return LIMIT


def ways():
    """A function, and then it would read something else; by its name."""

    def imported(patch):
        patch.setitem(sys.modules, "settings", users)

        def mask(b, h, q_idx, kv_idx):
            import settings

            return kv_idx < settings.limit

        yield mask
        patch.setattr(users, "limit", 4)

    def imported_name(patch):
        patch.setitem(sys.modules, "settings", users)

        def mask(b, h, q_idx, kv_idx):
            from settings import limit

            return kv_idx < limit

        yield mask
        patch.setattr(users, "limit", 4)

    def through_globals(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < globals()["LIMIT"]
        patch.setitem(globals(), "LIMIT", 4)

    def evaluated(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < eval("LIMIT")
        patch.setitem(globals(), "LIMIT", 4)

    def getattr_of_a_class(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < getattr(Settings, "limit")  # noqa: B009
        patch.setattr(Settings, "limit", 4)

    def environment(patch):
        patch.setenv("TILEWISE_LIMIT", "3")

        def mask(b, h, q_idx, kv_idx):
            import os

            return kv_idx < int(os.environ["TILEWISE_LIMIT"])

        yield mask
        patch.setenv("TILEWISE_LIMIT", "4")

    def global_environment(patch):
        patch.setenv("TILEWISE_LIMIT", "3")
        yield lambda b, h, q_idx, kv_idx: kv_idx < int(os.environ["TILEWISE_LIMIT"])
        patch.setenv("TILEWISE_LIMIT", "4")

    def a_file(patch, path):
        path.write_text("3")

        def mask(b, h, q_idx, kv_idx):
            with open(str(path)) as file:  # noqa: PTH123 - a way to read a file
                return kv_idx < int(file.read())

        yield mask
        path.write_text("4")

    def attribute_of_a_tensor(patch):
        table = torch.zeros(4)
        table.limit = 3
        yield lambda b, h, q_idx, kv_idx: kv_idx < table.limit
        table.limit = 4

    def method_of_one_tensor(patch):
        table = torch.zeros(4)
        table.size = lambda dim: 3
        yield lambda b, h, q_idx, kv_idx: kv_idx < table.size(0)
        table.size = lambda dim: 4

    def attribute_of_a_default(patch):
        table = torch.zeros(4)
        table.limit = 3
        yield lambda b, h, q_idx, kv_idx, table=table: kv_idx < table.limit
        table.limit = 4

    def attribute_through_a_local(patch):
        def mask(b, h, q_idx, kv_idx):
            library = torch
            return kv_idx < library.limit

        patch.setattr(torch, "limit", 3, raising=False)
        yield mask
        patch.setattr(torch, "limit", 4)

    def attribute_of_torch(patch):
        patch.setattr(torch, "limit", 3, raising=False)
        yield lambda b, h, q_idx, kv_idx: kv_idx < torch.limit
        patch.setattr(torch, "limit", 4)

    def attribute_of_a_module_in_torch(patch):
        patch.setattr(torch.nn.functional, "limit", 3, raising=False)
        yield lambda b, h, q_idx, kv_idx: kv_idx < torch.nn.functional.limit
        patch.setattr(torch.nn.functional, "limit", 4)

    def function_put_on_torch(patch):
        patch.setattr(torch, "abs", lambda x: x + 3)
        yield lambda b, h, q_idx, kv_idx: torch.abs(q_idx) < kv_idx
        patch.setattr(torch, "abs", lambda x: x + 4)

    def a_module_of_the_users(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < users.limit
        patch.setattr(users, "limit", 4)

    def gradients_enabled(patch):
        guard = contextlib.ExitStack()
        yield lambda b, h, q_idx, kv_idx: kv_idx < 3 + torch.is_grad_enabled()
        with guard:
            guard.enter_context(torch.no_grad())
            yield

    def requires_grad(patch):
        table = torch.zeros(4)
        yield lambda b, h, q_idx, kv_idx: kv_idx < 3 + table.requires_grad
        table.requires_grad_()

    def state_of_torch(patch):
        seed = torch.initial_seed()
        yield lambda b, h, q_idx, kv_idx: kv_idx < torch.initial_seed() % 1024
        torch.manual_seed((seed + 1) % 1024)

    def other_code(patch):
        def mask(b, h, q_idx, kv_idx):
            return kv_idx < 3

        yield mask
        mask.__code__ = (lambda b, h, q_idx, kv_idx: kv_idx < 4).__code__

    def other_code_of_equal_numbers(patch):
        def mask(b, h, q_idx, kv_idx):
            return kv_idx < 3

        yield mask
        mask.__code__ = (lambda b, h, q_idx, kv_idx: kv_idx <= 3).__code__

    def other_code_of_a_helper(patch):
        def reach():
            return 3

        yield lambda b, h, q_idx, kv_idx: kv_idx < reach()
        reach.__code__ = (lambda: 4).__code__

    def a_cell(patch):
        reach = 3
        yield lambda b, h, q_idx, kv_idx: kv_idx < reach
        reach = 4

    def a_cell_set_from_outside(patch):
        reach = 3
        mask = lambda b, h, q_idx, kv_idx: kv_idx < reach  # noqa: E731
        yield mask
        mask.__closure__[0].cell_contents = 4

    def counted_by_itself(patch):
        count = 0

        def mask(b, h, q_idx, kv_idx):
            nonlocal count
            count += 1
            return kv_idx < count

        yield mask

    def a_global(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < LIMIT
        patch.setitem(globals(), "LIMIT", 4)

    def a_default(patch):
        mask = lambda b, h, q_idx, kv_idx, n=3: kv_idx < n  # noqa: E731
        yield mask
        mask.__defaults__ = (4,)

    def a_keyword_default(patch):
        mask = lambda b, h, q_idx, kv_idx, *, n=3: kv_idx < n  # noqa: E731
        yield mask
        mask.__kwdefaults__["n"] = 4

    def a_global_of_a_helper(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < limit_of_global()
        patch.setitem(globals(), "LIMIT", 4)

    def a_default_of_a_helper(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < furthest()
        patch.setattr(furthest, "__defaults__", (5,))

    def a_keyword_default_of_a_helper(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < furthest()
        patch.setattr(furthest, "__kwdefaults__", {"more": 6})

    def another_helper(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < furthest()
        patch.setitem(globals(), "furthest", lambda: 4)

    def a_helper_of_a_helper(patch):
        reach = 3

        def far():
            return reach

        def near():
            return far()

        yield lambda b, h, q_idx, kv_idx: kv_idx < near()
        reach = 4

    def a_builtin_behind_a_global(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < max(2, 3)
        patch.setitem(globals(), "max", lambda *numbers: 4)

    def another_builtin(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < round(3.1)
        patch.setattr(builtins, "round", lambda x: 4)

    def another_function_of_math(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < math.floor(3.5)
        patch.setattr(math, "floor", math.ceil)

    def a_function_of_operator(patch):
        numbers = [3]
        yield lambda b, h, q_idx, kv_idx: kv_idx < operator.getitem(numbers, 0)
        numbers[0] = 4

    def a_class(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < Settings.limit
        patch.setattr(Settings, "limit", 4)

    def an_object(patch):
        own = Settings()
        yield lambda b, h, q_idx, kv_idx: kv_idx < own.limit
        own.limit = 4

    def a_list(patch):
        numbers = [3]
        yield lambda b, h, q_idx, kv_idx: kv_idx < numbers[0]
        numbers[0] = 4

    def a_dict(patch):
        numbers = {"n": 3}
        yield lambda b, h, q_idx, kv_idx: kv_idx < numbers["n"]
        numbers["n"] = 4

    def a_partial(patch):
        numbers = [3]
        reach = functools.partial(operator.getitem, numbers, 0)
        yield lambda b, h, q_idx, kv_idx: kv_idx < reach()
        numbers[0] = 4

    def an_inner_function(patch):
        yield lambda b, h, q_idx, kv_idx: kv_idx < (lambda: Settings.limit)()
        patch.setattr(Settings, "limit", 4)

    def a_value_of_a_tensor(patch):
        table = torch.tensor(3)
        yield lambda b, h, q_idx, kv_idx: kv_idx < table.item()
        table.fill_(4)

    def a_number_from_a_tensor(patch):
        table = torch.tensor(3)
        yield lambda b, h, q_idx, kv_idx: kv_idx < int(table)
        table.fill_(4)

    def the_truth_of_a_tensor(patch):
        table = torch.tensor(0)
        yield lambda b, h, q_idx, kv_idx: kv_idx < (4 if table else 3)
        table.fill_(1)

    def an_index_from_a_tensor(patch):
        table = torch.tensor(0)
        yield lambda b, h, q_idx, kv_idx: kv_idx < (3, 4)[table]
        table.fill_(1)

    def the_text_of_a_tensor(patch):
        table = torch.tensor(3)
        yield lambda b, h, q_idx, kv_idx: kv_idx < int("%d" % table)  # noqa: UP031
        table.fill_(4)

    def a_tensor_among_numbers(patch):
        table = torch.tensor(3)
        yield lambda b, h, q_idx, kv_idx: kv_idx < (3 if table in (2, 3) else 4)
        table.fill_(4)

    def a_range_up_to_a_tensor(patch):
        table = torch.tensor(3)
        yield lambda b, h, q_idx, kv_idx: kv_idx < len(range(table))
        table.fill_(4)

    def the_largest_of_a_tensor(patch):
        table = torch.tensor([1, 3])
        yield lambda b, h, q_idx, kv_idx: kv_idx < int(max(table))
        table.fill_(4)

    def what_a_loop_finds(patch):
        table = torch.tensor([3])

        def mask(b, h, q_idx, kv_idx):
            for x in table:
                return kv_idx < int(x)
            return None

        yield mask
        table.fill_(4)

    def a_shape(patch):
        table = torch.zeros(3)
        yield lambda b, h, q_idx, kv_idx: kv_idx < table.shape[0]
        table.data = torch.zeros(4)

    def a_dtype(patch):
        table = torch.zeros(3)
        yield lambda b, h, q_idx, kv_idx: kv_idx < (3 if table.dtype == torch.float32 else 4)
        table.data = torch.zeros(3, dtype=torch.float64)

    return [x for x in locals().values() if callable(x)]


@pytest.mark.parametrize("way", ways(), ids=lambda way: way.__name__)
def test_what_is_read_is_read_again(way, monkeypatch, tmp_path):
    takes_path = way.__code__.co_argcount == 2
    steps = way(monkeypatch, tmp_path / "limit") if takes_path else way(monkeypatch)
    function = next(steps)
    first, _ = mods.mask(function), mods.mask(function)
    next(steps, None)
    if way.__name__ == "counted_by_itself":
        assert mods.mask(function).key == mods.mask(lambda b, h, q_idx, kv_idx: kv_idx < 3).key
        return
    again = mods.mask(function)
    assert again.key == traced_again(function).key
    assert again.key != first.key


def traced_again(function):
    return mods.Mask(*trace.trace(function, trace.MASK))
