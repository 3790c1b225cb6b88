"""`tilewise info` works on any machine, and gives a reason and a remedy for each "no"."""

import json

import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

from tilewise.cli import info, machine  # noqa: E402


def invoke(*arguments):
    done = testing.CliRunner(env={"COLUMNS": "200"}).invoke(info.info, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def lines():
    return {(line["section"], line["name"]): line for line in json.loads(invoke("--json"))}


def test_says_what_serves():
    text = invoke()
    assert "cpu tensors by cpu" in text
    assert "torch" in text and "transformers" in text


def test_every_no_has_a_reason():
    for line in lines().values():
        if line["mark"] == "no":
            assert line["value"]
            if line["section"] == "machine":
                assert line["remedy"], line


def test_portable_on_cpu_tensors_names_the_interpreter():
    line = lines()["backends for cpu tensors", "portable"]
    assert line["mark"] == "no" and (
        "use_interpreter" in line["value"] or "triton" in line["value"]
    )


def test_markdown_is_one_table():
    rows = invoke("--markdown").strip().splitlines()
    assert all(row.startswith("|") and row.endswith("|") for row in rows)
    assert len(rows) == len(lines()) + 2


def test_without_triton(monkeypatch):
    from tilewise.bench import row

    monkeypatch.setattr(row, "triton_version", lambda: "none")
    assert lines()["machine", "triton"]["remedy"].startswith("`pip install triton`")


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    line = lines()["machine", "C compiler"]
    assert line["mark"] == "no" and "gcc" in line["remedy"]


def test_caches_are_sized(tmp_path, monkeypatch):
    (tmp_path / "kernel.bin").write_bytes(b"0" * (1 << 20))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert "1.0 MiB" in lines()["caches", "compiled kernels"]["value"]
