"""Words of the environment's switches: on, off, or refused, never silently off."""

import re
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise.switches import is_on

SOURCES = Path(tilewise.__file__).parent


@pytest.mark.parametrize("name", ["TILEWISE_CHECK", "TILEWISE_BATCH_INVARIANT"])
def test_a_switch_has_words_for_on_and_off_and_refuses_others(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert not is_on(name)
    for words, expected in (("1 true True YES on", True), ("0 false No OFF", False)):
        for word in words.split():
            monkeypatch.setenv(name, word)
            assert is_on(name) is expected
    monkeypatch.setenv(name, "")
    assert not is_on(name)
    monkeypatch.setenv(name, "ture")
    with pytest.raises(tilewise.ArgumentError, match=f"{name}='ture' in the environment: .* 1, tr"):
        is_on(name)


def test_a_call_reads_its_switch(monkeypatch):
    x = torch.ones(1, 2, 8, 16)  # more heads than rows: a warning where checks are on
    tilewise.attention(x, x, x)
    monkeypatch.setenv("TILEWISE_CHECK", "2")
    with pytest.raises(tilewise.ArgumentError, match="TILEWISE_CHECK='2'"):
        tilewise.attention(x, x, x)
    monkeypatch.setenv("TILEWISE_CHECK", "true")
    tilewise.errors._said.clear()
    with pytest.warns(UserWarning, match="TILEWISE_CHECK"):
        tilewise.attention(x, x, x)


def test_no_other_code_reads_a_switch():
    pattern = re.compile(r"environ(\.get\(|\[).TILEWISE_(?!CACHE\b|COMMIT\b)")
    reading = [x.name for x in SOURCES.rglob("*.py") if pattern.search(x.read_text("utf-8"))]
    assert not reading
