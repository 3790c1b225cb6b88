"""Triton's key of itself, kept on disk for as long as no file of Triton changes."""

import functools
import os
from types import SimpleNamespace

import pytest
import triton

from tilewise.kernels.common import triton_key
from tilewise.kernels.common.triton_key import NAME, remember, stamp_of

KEY = f"{triton.__version__}-0"


@pytest.fixture
def process(monkeypatch, tmp_path):
    """A process: which key Triton knows in it, and how often it was computed there."""

    def begin(stamp="as it is", key=KEY):
        computed = []

        @functools.lru_cache
        def compute():
            computed.append(key)
            return key

        own = SimpleNamespace(triton_key=compute)
        monkeypatch.setattr(triton_key, "cache", own)
        monkeypatch.setattr(triton_key, "stamp_of", lambda folder: stamp)
        remember()
        return own.triton_key(), len(computed)

    cache = SimpleNamespace(dir=str(tmp_path / "cache"))
    monkeypatch.setattr(triton_key, "knobs", SimpleNamespace(cache=cache))
    return begin


def test_only_the_first_process_computes_it(process):
    assert [process() for _ in range(3)] == [(KEY, 1), (KEY, 0), (KEY, 0)]


def test_a_triton_whose_files_changed_computes_it_again(process):
    process()
    other = f"{triton.__version__}-1"
    assert process("another", key=other) == (other, 1)
    assert process("another", key=other) == (other, 0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stamp": "as it is"}', '{"stamp": 1, "key": 2}'])
def test_what_is_no_key_is_written_again(process, tmp_path, text):
    process()
    (tmp_path / "cache" / NAME).write_text(text)
    assert process() == (KEY, 1)
    assert process() == (KEY, 0)


def test_a_key_of_another_version_is_not_taken(process):
    process(key="0.1-0")
    assert process() == (KEY, 1)


def test_a_folder_that_cannot_be_written(process, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    assert [process(), process()] == [(KEY, 1), (KEY, 1)]


def test_the_stamp_sees_sizes_times_and_names(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("1")
    stamps = [stamp_of(tmp_path)]
    assert stamp_of(tmp_path) == stamps[0]
    os.utime(file, ns=(1, 1))
    stamps.append(stamp_of(tmp_path))
    file.write_text("22")
    os.utime(file, ns=(1, 1))
    stamps.append(stamp_of(tmp_path))
    file.rename(tmp_path / "b.py")
    stamps.append(stamp_of(tmp_path))
    assert len(set(stamps)) == 4
