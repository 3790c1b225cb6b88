"""`tilewise info` works on any machine, and gives a reason and a remedy for each "no"."""

import json

import pytest
import torch

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

from tilewise.cli import info, machine, tables  # noqa: E402


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """This machine's may have many files, of which each command would take the size."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


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


@pytest.mark.filterwarnings("ignore:enable_sdpa and torch.compile")
def test_whose_torchs_own_attention_is():
    import tilewise

    def line():
        return lines()["integrations", "torch"]

    assert "scaled_dot_product_attention is torch's" in line()["value"]
    assert "tilewise.enable_sdpa()" in line()["remedy"]
    with tilewise.enable_sdpa():
        assert "scaled_dot_product_attention is tilewise's" in line()["value"]


def test_features_name_the_backends_that_serve_them():
    """On CPU tensors the other backends serve nothing: why is said of the backend, once."""
    features = {name: x for (section, name), x in lines().items() if section.startswith("features")}
    assert "do not run in FP8" in features["FP8"]["value"]
    assert features["dropout"]["value"] == "cpu" and features["dropout"]["remedy"] == ""
    assert all(line["mark"] == "ok" for line in features.values())
    text = invoke()
    assert "served by" in text and "block_mask, deterministic gradients" in text


def test_a_refusal_of_one_feature_has_its_reason(monkeypatch):
    from tilewise import dispatch

    def ask(name, problem, device):
        if name == "cpu":
            return "computes on the CPU"
        if name == "hopper" and problem.has_dropout:
            return "dropout is not served yet"
        return "too wide" if problem.headdim > 256 else None

    monkeypatch.setattr(dispatch, "ask", ask)
    found = {line.name: line for line in info.served("cuda", torch.bfloat16)}
    assert found["plain"].value == "hopper, portable" and found["plain"].remedy == ""
    assert found["dropout"].value == "portable"
    assert found["dropout"].remedy == "hopper: dropout is not served yet"
    line = lines()["features for cpu tensors", "dropout"]
    assert line["value"] == "portable" and line["remedy"] == "hopper: dropout is not served yet"
    line = lines()["features for cpu tensors", "headdim 512"]
    assert line["mark"] == "no" and line["remedy"] == "hopper: too wide; portable: too wide"


def test_each_feature_asks_for_something_of_its_own():
    problems = info.problems(torch.bfloat16)
    assert len(set(problems.values())) == len(problems)


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_every_problem_is_one_that_a_backend_answers(backend):
    """The Hopper kernels' reasons, of an emulated GPU, and the portable ones'."""
    from tilewise.testing import use_emulator, use_interpreter

    pytest.importorskip("triton")
    with use_emulator(0) if backend == "hopper" else use_interpreter():
        found = {line.name: line.remedy for line in info.served("cpu", torch.bfloat16)}
    widest = {"hopper": "256", "portable": "512"}[backend]
    assert not found["plain"] and f"{backend}: " in found["headdim 513"]
    assert widest in found["headdim 513"].split(f"{backend}: ")[1]
    assert (not found["headdim 512"]) == (backend == "portable")
    assert "float64" in found["float64"].split(f"{backend}: ")[1]
    assert backend not in found["causal"]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (41, ["F.scaled_dot_product_attention is torch's"]),
        (24, ["F.scaled_dot_product_", "attention is torch's"]),
        (9, ["F.scaled_", "dot_", "product_", "attention", "is", "torch's"]),
    ],
)
def test_long_words_break_between_their_parts(width, lines):
    text = tables.Breaking("F.scaled_dot_product_attention is torch's")
    broken = text.wrap(tables.console(), width, overflow="fold")
    assert [line.plain.strip() for line in broken] == lines


def test_markdown_is_one_table():
    rows = invoke("--markdown").strip().splitlines()
    assert all(row.startswith("|") and row.endswith("|") for row in rows)
    assert len(rows) == len(lines()) + 2


def test_without_triton(monkeypatch):
    monkeypatch.setattr(machine, "triton_version", lambda: "none")
    assert lines()["machine", "triton"]["remedy"].startswith("`pip install triton`")


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    line = lines()["machine", "C compiler"]
    assert line["mark"] == "no" and "gcc" in line["remedy"]


def test_caches_are_sized(tmp_path, monkeypatch):
    (tmp_path / "kernel.bin").write_bytes(b"0" * (1 << 20))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert "1.0 MiB" in lines()["caches", "compiled kernels"]["value"]
