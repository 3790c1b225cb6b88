"""The user's own rows: whatever lies in their file costs a warning, and writers lose nothing."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tilewise import errors
from tilewise.cli.tune import tune
from tilewise.errors import PerformanceWarning
from tilewise.tuning import select, store
from tilewise.tuning.tables import TABLE, Config, Key, default

GPU = "NVIDIA Imaginary"
KEY = Key("sm90", "fwd", 64, 16, True)
MINE = Config(64, 32, 4, 2)
GOOD = {"key": list(KEY), "config": list(MINE)}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(errors, "_said", set())
    select._measured.cache_clear()
    yield tmp_path
    select._measured.cache_clear()


def of_rows(*rows):
    return json.dumps({GPU: rows}).encode()


def row(**changed):
    return {**GOOD, **changed}


BROKEN = {
    "empty": b"",
    "garbage": b"\x00\x01 no json at all",
    "truncated": of_rows(GOOD)[:-20],
    "extra data": of_rows(GOOD) + of_rows(GOOD)[-30:],
    "not utf-8": of_rows(GOOD).replace(b"fwd", b"f\xffd"),
    "a list": b"[1, 2]",
    "null": b"null",
    "nested": b"[" * 100_000,
    "rows a number": json.dumps({GPU: 3}).encode(),
    "a row a string": of_rows("row"),
    "no config": of_rows({"key": list(KEY)}),
    "no such kernel": of_rows(row(key=["sm90", "forward", 64, 16, True])),
    "a number for a string": of_rows(row(key=[90, "fwd", 64, 16, True])),
    "an int for a bool": of_rows(row(key=["sm90", "fwd", 64, 16, 1])),
    "short key": of_rows(row(key=["sm90", "fwd"])),
    "short config": of_rows(row(config=[64, 64])),
    "long config": of_rows(row(config=[64, 32, 4, 2, False, 1])),
    "floats": of_rows(row(config=[64.0, 32, 4, 2])),
    "a string in it": of_rows(row(config=["64", 32, 4, 2])),
    "no powers of two": of_rows(row(config=[100, 7, 4, 2])),
    "three warps": of_rows(row(config=[64, 32, 3, 2])),
    "no warps": of_rows(row(config=[64, 32, 0, 2])),
    "negative": of_rows(row(config=[-64, 32, 4, 2])),
    "no stages": of_rows(row(config=[64, 32, 4, 0])),
    "too many scores": of_rows(row(config=[1024, 1024, 4, 2])),
    "unknown tile of hopper": of_rows(
        row(key=["sm90", "hopper_fwd", 64, 16, True], config=[1024, 16, 8, 2])
    ),
}


def chosen(key=KEY):
    select._measured.cache_clear()  # as another process
    return select.select(key, torch.device("cuda"))


def warned(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = call()
    assert all(issubclass(x.category, PerformanceWarning) for x in found)
    return result, [str(x.message) for x in found]


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_one_warning(folder, content):
    path = folder / "tuning.json"
    path.write_bytes(content)
    config, messages = warned(lambda: [chosen(), chosen(), chosen(KEY._replace(block_d=32))])
    assert config[0] == TABLE[KEY]
    [message] = messages
    assert str(path) in message and "tilewise tune" in message and "delete it" in message
    assert path.read_bytes() == content, "reading changes nothing"


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_tune_keeps_what_was_broken_beside_the_new_file(folder, content):
    (folder / "tuning.json").write_bytes(content)
    path, [message] = warned(lambda: select.add_measured(torch.device("cuda"), {KEY: MINE}))
    assert store.read(path) == ({GPU: {KEY: MINE}}, "")
    assert (folder / "tuning.broken").read_bytes() == content
    assert str(folder / "tuning.broken") in message
    path.write_bytes(content)
    errors._said.clear()
    warned(lambda: select.add_measured(torch.device("cuda"), {KEY: MINE}))
    assert (folder / "tuning.broken2").read_bytes() == content


def test_good_rows_of_a_half_broken_file_count(folder):
    other = row(key=["sm90", "bwd_dq", 64, 16, True])
    rows = of_rows(GOOD, row(config=[100, 7, 4, 2]), 3, other)
    (folder / "tuning.json").write_bytes(rows)
    config, [message] = warned(chosen)
    assert config == MINE
    assert "2 rows" in message and "100, 7" in message
    warned(lambda: store.add("another", {KEY: MINE}))
    assert store.read(folder / "tuning.json") == (
        {GPU: {KEY: MINE, KEY._replace(kernel="bwd_dq"): MINE}, "another": {KEY: MINE}},
        "",
    )


def test_a_directory_and_what_may_not_be_read(folder, monkeypatch):
    path = folder / "tuning.json"
    path.mkdir()
    config, [message] = warned(chosen)
    assert config == TABLE[KEY] and str(path) in message and "IsADirectoryError" in message
    errors._said.clear()
    warned(lambda: store.add(GPU, {KEY: MINE}))
    assert chosen() == MINE
    assert (folder / "tuning.broken").is_dir()

    def refuse(name, *flags):
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(os, "open", refuse)
    errors._said.clear()
    config, [message] = warned(chosen)
    assert config == TABLE[KEY] and str(path) in message and "PermissionError" in message


def plant(kind, path, victim):
    """What another user leaves there."""
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "dangling link":
        path.symlink_to(victim.with_name("made through a link"))
    elif kind == "hard link":
        os.link(victim, path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe", "device", "folder"])
@pytest.mark.parametrize("name", ["tuning.json", "tuning.lock", "tuning.new", "tuning.broken"])
def test_what_others_leave_in_the_folder_is_neither_followed_nor_waited_for(folder, name, kind):
    """Whatever lies at whatever name: nothing outside of the folder is made, read or changed."""
    outside = folder / "outside"
    outside.mkdir()
    victim = outside / "victim"
    victim.write_bytes(of_rows(row(config=[32, 32, 4, 2])))
    content = victim.read_bytes()
    plant(kind, folder / name, victim)
    is_read = name == "tuning.json" and kind != "hard link"
    config, messages = warned(chosen)
    if name != "tuning.json" or kind != "hard link":
        assert config == TABLE[KEY] and len(messages) == is_read
    errors._said.clear()
    if name == "tuning.lock" and kind != "hard link":
        with pytest.raises(OSError, match=r"tuning\.lock"):
            store.add(GPU, {KEY: MINE})
    else:
        warned(lambda: store.add(GPU, {KEY: MINE}))
        assert chosen() == MINE
    assert victim.read_bytes() == content and list(outside.iterdir()) == [victim]
    assert not [x for x in folder.glob("*.new") if x.name != name], "what was begun is gone"


def test_a_lock_that_another_keeps_is_given_up(folder, monkeypatch):
    import fcntl

    monkeypatch.setattr(store, "LOCK_SECONDS", 0)
    with (folder / "tuning.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process keeps this lock"):
            store.add(GPU, {KEY: MINE})
    store.add(GPU, {KEY: MINE})
    assert chosen() == MINE


def test_a_file_without_end_is_not_read_whole(folder):
    with (folder / "tuning.json").open("wb") as file:
        file.truncate(2**40)
    config, [message] = warned(chosen)
    assert config == TABLE[KEY] and "more than 16 MiB" in message


def test_every_file_of_the_folder_is_opened_by_one_function():
    source = Path(store.__file__).read_text(encoding="utf-8")
    ways = r"(?<!_)\bopen\(|\.(?:read|write)_(?:text|bytes)\("
    assert len(re.findall(ways, source)) == 2, "os.open and open, of `_open`"


@pytest.mark.parametrize("cache", ["none", "/dev/null", "under a file"])
def test_where_there_is_no_file_there_are_no_rows(folder, monkeypatch, cache):
    (folder / "under a file").write_text("")
    monkeypatch.setenv("TILEWISE_CACHE", str(folder / cache))
    assert chosen() == TABLE[KEY]


def test_every_row_that_is_shipped_or_tried_can_be_kept(folder):
    from tilewise.explain.sweep import candidates

    rows = list(TABLE.items())
    for kernel in store.PORTABLE:
        for bits in (16, 32):
            key = KEY._replace(kernel=kernel, bits=bits)
            rows += [(key, config) for config in candidates(kernel, bits)]
            wide = key._replace(block_d=512)
            rows += [(wide, config) for config in candidates(kernel, bits, 512)]
            for block_d in (16, 32, 64, 128, 256, 512):
                for arch in ("sm80", "sm90", "gfx942", "unknown"):
                    key = Key(arch, kernel, block_d, bits, False, True)
                    rows.append((key, default(key)))
    told = of_rows(*({"key": key, "config": config} for key, config in rows))
    (folder / "tuning.json").write_bytes(told)
    assert store.read(folder / "tuning.json") == ({GPU: dict(rows)}, "")
    store.add("another", TABLE)
    assert store.read(folder / "tuning.json") == ({GPU: dict(rows), "another": TABLE}, "")


def test_tune_says_where_nothing_can_be_written(folder, monkeypatch):
    from tilewise.explain import sweep

    (folder / "a file").write_text("")
    monkeypatch.setenv("TILEWISE_CACHE", str(folder / "a file"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = sweep.Found(KEY, MINE, 1.0, 2.0)
    monkeypatch.setattr(sweep, "sweep", lambda device, **options: [found])
    ran = CliRunner().invoke(tune, ["--headdim", "64"])
    assert ran.exit_code == 1
    assert str(folder / "a file") in ran.output and "TILEWISE_CACHE" in ran.output
    assert "64 x 32" in ran.output, "what was measured is shown"


# One process imports torch, and four branch off it
AT_ONCE = """
import multiprocessing
from helpers.waits import until
from tilewise.tuning import store
from tilewise.tuning.tables import Config, Key

def write(mine):
    for i in range(20):
        key = Key(f"arch{mine}.{i}", "fwd", 64, 16, False)
        store.add(f"gpu{i % 2}", {key: Config(64, 64, 4, 2)})

def read():
    counts = [0]

    def all_are_there():
        tables, complaint = store.read(store.cache_file())
        assert not complaint, complaint
        counts.append(sum(map(len, tables.values())))
        assert counts[-1] >= counts[-2], counts
        return counts[-1] == 60

    until(all_are_there, "the reader sees what was written", pause=0)

fork = multiprocessing.get_context("fork")
processes = [fork.Process(target=read), *(fork.Process(target=write, args=(i,)) for i in range(3))]
for process in processes:
    process.start()
for process in processes:
    process.join()
assert [process.exitcode for process in processes] == [0] * 4
"""


def test_writers_at_once_lose_nothing_and_no_reader_sees_half_a_file(folder):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", AT_ONCE], env=env, check=True)
    tables, _ = store.read(folder / "tuning.json")
    names = {key.arch for table in tables.values() for key in table}
    assert names == {f"arch{i}.{j}" for i in range(3) for j in range(20)}
    assert sorted(x.name for x in folder.iterdir()) == ["tuning.json", "tuning.lock"]
