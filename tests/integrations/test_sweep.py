"""The sweep over transformers' classes: rows are repeated, the page is theirs, errors are seen."""

import functools
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from integrations.sweep import run  # noqa: E402
from integrations.sweep.outcomes import EQUAL, NEVER, SERVED, WRONG  # noqa: E402
from integrations.sweep.page import PAGE, page, sentence  # noqa: E402
from integrations.sweep.rows import load, outcomes  # noqa: E402
from integrations.sweep.shrink import shrunk  # noqa: E402
from integrations.sweep.subjects import Subject, subjects  # noqa: E402

from tilewise.integrations import transformers as integration  # noqa: E402
from tilewise.integrations.transformers import attend  # noqa: E402

ROWS = load()
SAMPLE = (  # each for a reason of its own
    "LlamaForCausalLM",
    "GptOssForCausalLM",  # sinks and windows
    "GPTNeoForCausalLM",  # from a table of classes; eager's static cache is wrong
    "DeepseekV3ForCausalLM",  # headdim_v is another
    "GotOcr2ForConditionalGeneration",  # hands its logits_to_keep down
    "T5GemmaForConditionalGeneration",  # a window on both sides
    "BloomForCausalLM",  # refused
    "DebertaForMaskedLM",  # an attention of its own
    "ViTForImageClassification",
)


TASKS = pytest.mark.parametrize("task", ["causal", "masked", "encoder-decoder", "vision"])


@pytest.fixture(autouse=True)
def as_in_the_sweep():
    integration.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        yield
    torch.set_num_threads(threads)


def agree(row, known):
    """With the committed row; in another version of transformers nothing is wrong, at least."""
    assert not set(outcomes(row)) & set(NEVER), row
    if transformers.__version__ == known["transformers"]:
        assert outcomes(row) == outcomes(known)


def test_page_says_what_the_rows_say():
    command = "python -m tests.integrations.sweep writes it"
    assert PAGE.read_text("utf-8") == page(list(ROWS.values())), command


def test_nothing_is_wrong_in_silence():
    for row in ROWS.values():
        assert set(outcomes(row)) <= set(SERVED), row["name"]
        for cell in row.get("cells", {}).values():
            if cell["outcome"] == "refused":
                assert "attn_implementation=" in sentence(cell["reason"]), row["name"]


def test_every_class_has_a_row():
    if any(row["transformers"] == transformers.__version__ for row in ROWS.values()):
        assert ROWS.keys() == subjects().keys()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample(name):
    agree(run.row_of(subjects()[name]), ROWS[name])


@pytest.mark.slow
@TASKS
def test_every_class(task):
    run.warm()
    for name, subject in subjects().items():
        if subject.task == task and name in ROWS:
            agree(run.apart(subject), ROWS[name])


def test_all_cells_of_the_first_of_the_sample_are_equal():
    assert set(outcomes(ROWS["LlamaForCausalLM"])) == {EQUAL}


FUTURE = dict(causal=False, window=None)
MUTANTS = {
    "the future is seen": lambda right, q, k, v, **how: right(q, k, v, **how | FUTURE),
    "another scale": lambda right, q, k, v, **how: right(q, k, v, **how | dict(scale=0.3)),
    "half of a gradient": lambda right, q, k, v, **how: right(q, (k + k.detach()) / 2, v, **how),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_sweep_sees(name, monkeypatch):
    """What an integration could get wrong."""
    monkeypatch.setattr(attend, "attention", functools.partial(MUTANTS[name], attend.attention))
    row = run.row_of(Subject("LlamaForCausalLM", "causal"))
    assert row["cells"]["gradients"]["outcome"] == WRONG
    if name != "half of a gradient":
        assert set(outcomes(row)) == {WRONG}


@pytest.mark.slow
@TASKS
def test_the_sweep_sees_it_in_every_class(task, monkeypatch):
    """A scale that is wrong by a tenth."""

    def scaled(q, k, v, scale=None, **how):
        return right(q, k, v, scale=1.1 * (scale or q.shape[-1] ** -0.5), **how)

    def called(q, k, v, numbers, **how):
        scale = 1.1 * (numbers.scale or q.shape[-1] ** -0.5)
        return raw(q, k, v, numbers=numbers._replace(scale=scale), **how)

    right, raw = attend.attention, attend.call
    run.warm()
    monkeypatch.setattr(attend, "attention", scaled)
    monkeypatch.setattr(attend, "call", called)
    for name, row in ROWS.items():
        if row["task"] == task and row.get("cells", {}).get("full", {}).get("outcome") == EQUAL:
            assert outcomes(run.apart(subjects()[name], ["full"])) == [WRONG], name


def test_a_bare_error_is_seen(monkeypatch):
    def bare(*args, **how):
        raise TypeError("unsupported operand")

    monkeypatch.setattr(attend, "attention", bare)
    row = run.row_of(Subject("LlamaForCausalLM", "causal"))
    assert set(outcomes(row)) == {"bare error"}


def test_layers_of_every_kind_stay():
    config = shrunk(transformers.Gemma3TextConfig())
    assert sorted(config.layer_types) == ["full_attention", "sliding_attention"]
    assert config.num_hidden_layers == 2 and config.sliding_window == 5
    sizes = dict(num_attention_heads=8, num_key_value_heads=8)
    grouped, whole = (
        shrunk(transformers.LlamaConfig(**x)) for x in (dict(num_key_value_heads=8), sizes)
    )
    assert grouped.num_key_value_heads == 2 and whole.num_key_value_heads == 4
