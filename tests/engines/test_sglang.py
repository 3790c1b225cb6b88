"""SGLang's own engine serves small models on a CPU with tilewise: `make test-engines`.

Each case is an engine of its own, in a fork of one process (sglang_cases.py). Tokens are those of
transformers where the two largest logits are clearly apart, and log-probabilities within 1e-4.
What the tests note is the table of docs/serving-engines.md.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import compare, table

HERE = Path(__file__).parent
has_sglang = importlib.util.find_spec("sglang") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_sglang, reason="SGLang is not installed: make test-engines"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each case found; TILEWISE_ENGINE_CASES is a folder in which they have run already."""
    folder = os.environ.get("TILEWISE_ENGINE_CASES")
    if folder is None:
        folder = tmp_path_factory.mktemp("sglang")
        subprocess.run([sys.executable, HERE / "sglang_cases.py", folder], check=True)
    return json.loads((Path(folder) / "cases.json").read_text())


@pytest.fixture(scope="module")
def note(results):
    """Notes of features, which are kept at the end, in the order of the tests."""
    notes = {}
    yield notes.__setitem__
    table.write("sglang", f"SGLang {results['sglang']}: its whole engine, on a CPU", notes)


@pytest.fixture
def case(request, results):
    found = results["cases"][request.param]
    assert "error" not in found, found["error"]
    # The backend is ours, each layer of each batch was called, and no other wrote keys
    assert found["backends"] == 1 and found["appends"] == found["forwards"] > 0
    assert found["forwards"] == 3 * found["batches"]
    return found


def of(*names):
    return pytest.mark.parametrize("case", names, indirect=True)


GENERATED = {
    "llama": "chunks of prefill and single tokens in one step",
    "llama, page 1": "pages of one token",
    "llama, overlap": "the scheduler's work at the same time as the model's",
    "llama, retraction": "preemption",
    "llama, prefix": "prefix caching",
    "repeating, drafts": "speculation by n-grams",
    "repeating, wide drafts": "speculation by n-grams, trees",
}


@of(*GENERATED)
def test_tokens_are_those_of_transformers(case, note, request):
    name = request.node.callspec.params["case"]
    gap, difference = compare.tokens(case["found"], case["expected"])
    print(f"{name}: the smallest gap of two logits is {gap}, log-probabilities {difference}")
    for ours, (theirs, _, gaps) in zip(case["in_mixed_batches"], case["expected"], strict=True):
        apart = [x for x, y, _ in zip(ours, theirs, gaps) if x != y]
        assert len(ours) == len(theirs) and (not apart or min(gaps) <= compare.CLEAR)
    counted = {
        "retracted": f", {case['retracted']} preemption{'s' * (case['retracted'] > 1)}",
        "accepted": f", {case['accepted']} drafts accepted",
        "cached": f", {sum(case['cached'])} tokens found",
    }
    extra = "".join(text for key, text in counted.items() if case[key] and sum_of(case[key]))
    note(GENERATED[name], f"tokens equal{extra}")


def sum_of(number):
    return sum(number) if isinstance(number, list) else number


@of("llama", "llama, page 1", "llama, overlap")
def test_steps_mix_chunks_and_single_tokens(case):
    assert case["mixed"] >= 1 and case["prefixes"] >= 1


@of("llama, retraction")
def test_requests_were_preempted(case):
    assert case["retracted"] >= 1


@of("llama, prefix")
def test_prefixes_were_found(case):
    assert sum(n >= 192 for n in case["cached"]) >= 4
    assert sum(n >= 192 for n in case["cached_again"]) == 6  # when they came a second time


@of("repeating, drafts", "repeating, wide drafts")
def test_drafts_were_accepted(case):
    """SGLang's n-grams are trees even at a breadth of 1, whose tokens alone would not tell."""
    assert case["verified"] >= 1 and case["accepted"] >= 1


def test_the_plugin_is_found_by_new_processes(results, note):
    """By its entry point: the scheduler's process knows nothing of this one."""
    case = results["cases"]["llama, plug-in"]
    assert "error" not in case, case["error"]
    compare.tokens(case["found"], case["expected"])
    note("the entry point, in processes that the engine starts", "tokens equal")


@of("olmo3")
def test_windows_beside_sglangs_own_backend(case, results, note):
    """Its model is not quite transformers', so the tokens are those of its backend of plain torch,
    which has windows, too.
    """
    own = results["cases"]["olmo3, torch_native"]
    assert own["backends"] == 0 and own["in_mixed_batches"] == case["in_mixed_batches"]
    assert compare.largest([x for _, x in own["found"]], [x for _, x in case["found"]]) < 1e-4
    note("sliding window", "tokens of SGLang's torch_native equal")


@of("gemma2")
def test_a_softcap_by_log_probabilities(case, note):
    """Tied random embeddings repeat one token, so tokens would say little."""
    difference = compare.largest(case["found"], case["expected"])
    assert difference <= compare.CLOSE
    assert compare.largest(case["found"], case["without"]) > 100 * compare.CLOSE
    note("softcap and sliding window", f"log-probabilities within {compare.CLOSE:.0e}")


@of("llama, fp8")
def test_pools_of_8_bits_are_those_of_a_reference_that_rounds(case, note):
    difference = compare.largest(case["found"], case["expected"])
    of_rounding = compare.largest(case["without"], case["expected"])
    print(f"the largest difference of log-probabilities is {difference}, of rounding {of_rounding}")
    assert difference < of_rounding / 20
    note("--kv-cache-dtype fp8", "log-probabilities of a reference that rounds K and V")


@of("bert")
def test_encoders_have_transformers_hidden_states(case, note):
    assert compare.largest(case["found"], case["expected"]) <= compare.CLOSE
    note("encoder-only layers", f"hidden states within {compare.CLOSE:.0e}")
