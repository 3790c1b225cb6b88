"""Programs of one small kernel pass it addresses and numbers, past Triton once it is compiled for
them. No GPU: kernels are fakes that record their calls.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers.fake_kernels import Kernel, fake_kernels, plain

from tilewise.kernels.portable import launches

CPU = torch.device("cpu")


class Place(NamedTuple):
    table: Any
    number: int


@pytest.fixture
def kernel(monkeypatch):
    """A kernel on a device that is current."""
    kernel = Kernel("kernel", fake_kernels(monkeypatch, launches))
    kernel.arg_names = ["table", "sources", "tiles", "COUNT", "BLOCK"]
    return kernel


def test_addresses_and_numbers_of_each_call(kernel):
    programs = launches.programs_of(kernel, dict(sources="COUNT"), BLOCK=128)
    tables = [torch.zeros(4) for _ in range(3)]
    for n, table in enumerate(tables):
        programs(CPU, 7, COUNT=2).run((table, 16 * n, 32, 5 + n))
    assert [how for _, how, *_ in kernel.log] == ["front", "again", "again"]
    for n, (_, _, programs, args) in enumerate(kernel.log):
        assert programs == 7
        assert plain(args) == (tables[n].data_ptr(), (16 * n, 32), 5 + n, 2, 128)


def test_what_it_is_compiled_for(kernel):
    programs = launches.programs_of(kernel, dict(sources="COUNT"), BLOCK=128)
    for number in (3, 2**40, 4, 2**41):
        looks = (number < 2**31,)
        program = programs(CPU, 1, compiled_for=looks, COUNT=1)
        program.run((torch.zeros(4), 16, number))
    assert [how for _, how, *_ in kernel.log] == ["front", "front", "again", "again"]


@pytest.mark.parametrize("kind, later", [("i32", "again"), ("constexpr", "front")])
def test_a_record_of_numbers(kernel, kind, later):
    """A Triton that has compiled a number of one call in is asked at every call."""
    kernel.arg_names, signature = ["place", "BLOCK"], dict(place=("*fp32", kind), BLOCK="constexpr")
    kernel.src = SimpleNamespace(signature=signature)
    programs = launches.programs_of(kernel, dict(place=Place), BLOCK=128)
    tables = [torch.zeros(4) for _ in range(2)]
    for n, table in enumerate(tables):
        programs(CPU, 1).run(Place(table, 1 + n))
    assert [how for _, how, *_ in kernel.log] == ["front", later]
    for n, (*_, args) in enumerate(kernel.log):
        assert plain(args) == ((tables[n].data_ptr(), 1 + n), 128)
