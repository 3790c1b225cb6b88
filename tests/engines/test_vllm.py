"""vLLM's own engine serves small models on a CPU with tilewise, and its own classes choose tilewise
for a GPU: `make test-engines`.

Each case is an engine of its own, in a fork of one process (vllm_cases.py). Tokens are those of
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
has_vllm = importlib.util.find_spec("vllm") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_vllm, reason="vLLM is not installed: make test-engines"),
]
BACKEND = "tilewise.integrations.vllm.backend.TilewiseBackend"
IMPL = "tilewise.integrations.vllm.impl.TilewiseImpl"


def python(program, *arguments, **options):
    return subprocess.run([sys.executable, HERE / program, *arguments], check=True, **options)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each case found; TILEWISE_ENGINE_CASES is a folder in which they have run already."""
    folder = os.environ.get("TILEWISE_ENGINE_CASES")
    if folder is None:
        folder = tmp_path_factory.mktemp("vllm")
        python("vllm_cases.py", folder)
    return json.loads((Path(folder) / "cases.json").read_text())


@pytest.fixture(scope="module")
def classes():
    """What vLLM's classes say without an engine."""
    printed = python("vllm_classes.py", capture_output=True, text=True).stdout
    return json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="module")
def note(results):
    """Notes of features, which are kept at the end, in the order of the tests."""
    notes = {}
    yield notes.__setitem__
    table.write("vllm", f"vLLM {results['vllm']}: its whole engine, on a CPU", notes)


@pytest.fixture
def case(request, results):
    found = results["cases"][request.param]
    assert "error" not in found, found["error"]
    # The engine's layers are ours, and were called
    assert found["impls"] and all(x.split(".")[-1].startswith("Tilewise") for x in found["impls"])
    assert found["forwards"] > 0
    return found


def of(*names):
    return pytest.mark.parametrize("case", names, indirect=True)


GENERATED = {
    "llama": "chunks of prefill and single tokens in one step",
    "llama, heads first": "the other layout",
    "llama, compiled": "a model that the engine compiles",
    "llama, preemption": "preemption",
    "llama, prefix": "prefix caching",
    "llama, drafts": "speculation by n-grams",
    "mistral": "sliding window",
    "gpt_oss": "sliding window and sinks, two groups of layers",
    "bloom": "ALiBi",
}


@of(*GENERATED)
def test_tokens_are_those_of_transformers(case, note, request):
    name = request.node.callspec.params["case"]
    gap, difference = compare.tokens(case["found"], case["expected"])
    print(f"{name}: the smallest gap of two logits is {gap}, log-probabilities {difference}")
    assert case["appends"] == case["forwards"]
    counted = {
        "preempted": f", {case['preempted']} preemptions",
        "accepted": f", {case['accepted']} drafts accepted",
        "cached": f", {sum(case['cached'])} tokens found",
    }
    extra = "".join(text for key, text in counted.items() if case[key] and sum_of(case[key]))
    note(GENERATED[name], f"tokens equal{extra}")


def sum_of(number):
    return sum(number) if isinstance(number, list) else number


@of("llama", "llama, heads first")
def test_steps_mix_chunks_and_single_tokens(case):
    assert case["impls"] == [IMPL]
    assert case["mixed"] >= 1


@of("llama, preemption")
def test_requests_were_preempted(case):
    assert case["preempted"] >= 1


@of("llama, prefix")
def test_prefixes_were_found(case):
    assert sum(n >= 192 for n in case["cached"]) >= 4


@of("llama, drafts")
def test_drafts_were_accepted(case):
    assert case["accepted"] >= 1


def test_both_layouts_and_block_sizes_ran(results):
    rows, heads = results["cases"]["llama"], results["cases"]["llama, heads first"]
    (_, nheads, size, width), (_, head, row, _) = rows["shapes"][0], rows["strides"][0]
    assert (size, head, row) == (128, width, nheads * width)
    (_, nheads, size, width), (_, head, row, _) = heads["shapes"][0], heads["strides"][0]
    assert (size, head, row) == (16, size * width, width)


@of("llama, ranks")
def test_two_ranks_with_half_of_the_keys_each(case, note):
    """Both are processes of their own, which have loaded the plug-in."""
    assert case["impls"] == [IMPL] and case["parts"] == [2]
    compare.tokens(case["found"], case["expected"])
    note("the entry point, in processes that the engine starts", "tokens equal")
    note("context parallelism for decoding, two ranks", "tokens equal")


@of("gemma2")
def test_a_softcap_by_log_probabilities(case, note):
    """Tied random embeddings repeat one token, so tokens would say little."""
    difference = compare.largest(case["found"], case["expected"])
    assert difference <= compare.CLOSE
    assert compare.largest(case["found"], case["without"]) > 100 * compare.CLOSE
    note("softcap and sliding window", f"log-probabilities within {compare.CLOSE:.0e}")


@of("llama, fp8", "llama, fp8_per_token_head", "llama, int8_per_token_head")
def test_caches_of_8_bits_are_those_of_a_reference_that_rounds(case, note, request):
    """A value on the edge of two codes may round the other way in transformers, so the mean
    difference is compared with the mean of what rounding does.
    """
    triples = [
        triple
        for of_prompt in zip(case["found"], case["expected"], case["without"])
        for triple in zip(*of_prompt)
    ]
    mean = sum(abs(x - y) for x, y, _ in triples) / len(triples)
    of_rounding = sum(abs(y - z) for _, y, z in triples) / len(triples)
    print(f"mean difference of log-probabilities {mean}, of rounding {of_rounding}")
    assert mean < of_rounding / 20
    kind = request.node.callspec.params["case"].split(", ")[1]
    note(f"--kv-cache-dtype {kind}", "log-probabilities of a reference that rounds K and V")


@of("bert")
def test_encoders_have_transformers_hidden_states(case, note):
    difference = compare.largest(case["found"], case["expected"])
    assert difference <= compare.CLOSE
    note("encoder-only layers", f"hidden states within {compare.CLOSE:.0e}")


# without an engine


def test_cross_attention_through_vllms_wrapper(classes, note):
    assert classes["crossed"] < 1e-5
    note("cross attention", "vLLM's classes, without the engine")


SERVED = ["plain", "sinks and a window", "fp8", "rows with scales", "scales by head", "an encoder"]
SERVED += ["TILEWISE", "batch invariance on Hopper"]
REFUSED = {
    "MLA": "MLA not supported",
    "sparse": "sparse not supported",
    "PrefixLM": "partial multimodal token full attention not supported",
    "e5m2": "kv_cache_dtype not supported",
    "wide heads": "head_size not supported",
    "another dtype": "a cache of float16 with a model of torch.bfloat16",
    "batch invariance before Hopper": "batch invariance not supported",
    "batch invariance of wide heads": "batch invariance is what Hopper's kernels promise",
    "another version": "tilewise serves vLLM 0.31 to 0.33 and this is 0.40.0",
}


@pytest.mark.parametrize("asked", SERVED)
def test_vllms_selector_for_gpus_chooses_tilewise(classes, asked):
    assert classes["chosen"][asked] == BACKEND


@pytest.mark.parametrize("asked", REFUSED)
def test_vllms_selector_for_gpus_says_what_is_refused(classes, note, asked):
    assert REFUSED[asked] in classes["chosen"][asked]
    if asked in ("MLA", "PrefixLM", "sparse"):
        note(asked, "refused")


def test_both_names_are_one_member_on_the_command_line(classes):
    assert classes["parsed"] == ["CUSTOM", "CUSTOM"] and classes["is_pickled"]


def test_cpus_have_vllms_own_backend_unless_asked(classes):
    assert "tilewise" not in classes["of_cpus"]
