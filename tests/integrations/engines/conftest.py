"""SGLang's backend over fakes of SGLang, for tests of this folder."""

import importlib
import sys

import pytest
from helpers import sglang_names as names


@pytest.fixture
def backend(monkeypatch):
    """The module under test, imported over fakes."""
    names.install(monkeypatch)
    for name in [x for x in sys.modules if x.startswith("tilewise.integrations.sglang")]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("tilewise.integrations.sglang.backend")
    for name in [x for x in sys.modules if x.startswith("tilewise.integrations.sglang")]:
        del sys.modules[name]
