"""The flags by which kernels run on CPU tensors."""

import subprocess
import sys

import pytest

from tilewise import emulation
from tilewise.testing import interpreter_is_on, use_interpreter


def test_the_flag_nests_and_ends_after_an_error():
    assert not interpreter_is_on()
    with use_interpreter(), use_interpreter():
        assert interpreter_is_on()
    assert not interpreter_is_on()
    with pytest.raises(ZeroDivisionError), use_interpreter():
        assert 1 / 0
    assert not interpreter_is_on()


def test_the_flags_import_nothing():
    code = (
        "import importlib.util as u, sys\n"
        "for name in ('triton', 'torch', 'numpy', 'gluon_emulator'): sys.modules[name] = None\n"
        "spec = u.spec_from_file_location('emulation', sys.argv[1])\n"
        "module = u.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "assert not module.interpreter_is_on()"
    )
    subprocess.run([sys.executable, "-c", code, emulation.__file__], check=True)
