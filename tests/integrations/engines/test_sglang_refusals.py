"""What SGLang's backend refuses, with the way out, and how the plug-in reaches SGLang."""

import logging
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers import sglang_names as names
from helpers.sglang_batches import Requests
from helpers.sglang_names import configure

from tilewise_plugins import sglang as plugin

RUNNERS = {
    "latent attention": (dict(use_mla_backend=True), {}, "triton"),
    "cross attention": (dict(encoder=True), {}, "triton"),
    "draft models": (dict(is_draft_worker=True), {}, "speculative-draft-attention-backend"),
    "denoise": ({}, dict(dllm="LowConfidence"), "triton"),
    "within chunks": (dict(attention_chunk_size=64), {}, "triton"),
    "context parallelism": ({}, dict(cp=2), "--attn-cp-size"),
    "speculation by UNO": ({}, dict(algorithm="UNO", drafts=4), "EAGLE"),
    "trees of over 64": ({}, dict(topk=4, drafts=65), "--speculative-num-draft-tokens"),
    "--enable-deterministic-inference": (
        dict(device="cuda"),
        dict(deterministic=True),
        "a Hopper GPU",
    ),
}
BITS = dict(page_size=1, heads=2, headdim=16)
POOLS = {
    "type OtherPool": (
        names.OtherPool(8, dtype=torch.float16, **BITS),
        "--disable-hybrid-swa-memory",
    ),
    "float8_e5m2": (
        names.MHATokenToKVPool(8, dtype=torch.float8_e5m2, **BITS),
        "--kv-cache-dtype auto or fp8_e4m3",
    ),
}


@pytest.mark.parametrize("what", RUNNERS)
def test_a_runner_is_refused(backend, monkeypatch, what):
    of_runner, of_server, way_out = RUNNERS[what]
    configure(backend, monkeypatch, **of_server)
    with pytest.raises(NotImplementedError, match=rf"{what}.*: .*{way_out}"):
        backend.TilewiseBackend(names.runner(**of_runner))


@pytest.mark.parametrize("what", POOLS)
def test_a_pool_is_refused(backend, what):
    pool, way_out = POOLS[what]
    with pytest.raises(NotImplementedError, match=rf"{what}.*: .*{way_out}"):
        backend.TilewiseBackend(names.runner(pool))


@pytest.mark.parametrize(
    ("of_layer", "others", "what"),
    [
        (dict(attn_type=names.AttentionType.DECODER_BIDIRECTIONAL), {}, "DECODER_BIDIRECTIONAL"),
        (dict(is_cross_attention=True), {}, "is_cross_attention"),
        (dict(xai_temperature_len=1024), {}, "xai_temperature_len"),
        (dict(logit_cap=1.0, logit_capping_method="clip"), {}, "clip"),
        ({}, dict(q_rope=torch.ones(1)), "q_rope"),
        ({}, dict(return_lse=True), "return_lse"),
    ],
    ids=str,
)
def test_a_layer_is_refused(backend, of_layer, others, what):
    runner = names.runner()
    requests = Requests(names, runner, names.layer(**of_layer))
    with pytest.raises(NotImplementedError, match=rf"{what} in layer 0: use --attention-backend"):
        requests.step([backend.TilewiseBackend(runner)], (3, 0, 0, 0), "EXTEND", **others)


def test_arguments_that_ask_for_nothing_are_no_reason(backend):
    runner = names.runner()
    requests = Requests(names, runner, names.layer())
    none = dict(q_rope=None, return_lse=False)
    requests.step([backend.TilewiseBackend(runner)], (3, 0, 0, 0), "EXTEND", **none)


@pytest.mark.parametrize("mode", ("DLLM_EXTEND", "DRAFT_EXTEND_V2"))
def test_a_kind_of_batch_is_refused(backend, mode):
    runner = names.runner()
    requests = Requests(names, runner, names.layer())
    with pytest.raises(NotImplementedError, match=f"mode {mode}: use"):
        requests.step([backend.TilewiseBackend(runner)], (3, 0, 0, 0), mode)


@pytest.mark.parametrize("has_images", (False, True))
def test_images_that_a_model_masks_are_refused(backend, has_images):
    """Its text is not."""
    runner = names.runner(model=SimpleNamespace(prepare_attn_masks=None))
    batch = Requests(names, runner, names.layer()).batch((3, 0, 0, 0), "EXTEND")
    batch.contains_image_inputs = lambda: has_images
    refusal = pytest.raises(NotImplementedError, match="images.*: use --attention-backend triton")
    with refusal if has_images else nullcontext():
        backend.TilewiseBackend(runner).init_forward_metadata(batch)


def test_drafts_of_different_numbers_are_refused(backend, monkeypatch):
    configure(backend, monkeypatch, drafts=3, topk=1)
    runner = names.runner()
    batch = Requests(names, runner, names.layer()).batch((3, 0, 0, 0), "TARGET_VERIFY", drafts=3)
    batch.spec_info.ragged_verify_layout = object()
    with pytest.raises(NotImplementedError, match="SGLANG_RAGGED_VERIFY_MODE=static"):
        backend.TilewiseBackend(runner).init_forward_metadata(batch)


def test_trees_and_windows_are_refused(backend, monkeypatch):
    configure(backend, monkeypatch, topk=2, drafts=2, algorithm="EAGLE")
    runner = names.runner()
    requests = Requests(names, runner, names.layer(sliding_window_size=9))
    served = backend.TilewiseBackend(runner)
    batch = requests.batch((2, 0, 0, 0), "TARGET_VERIFY", drafts=2, cells=torch.ones(4).bool())
    served.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="--speculative-eagle-topk 1"):
        served.forward(*requests.tokens((2,)), requests.module, batch)


def test_an_idle_batch(backend):
    runner = names.runner()
    requests = Requests(names, runner, names.layer())
    backend.TilewiseBackend(runner).init_forward_metadata(requests.batch((0,) * 4, "IDLE"))


def test_determinism_is_the_contract_of_the_cache(backend, monkeypatch):
    configure(backend, monkeypatch, deterministic=True)
    calls = []
    monkeypatch.setattr(backend, "batch_invariant", lambda: calls.append(1))
    backend.TilewiseBackend(names.runner())
    assert calls


# The plug-in


def test_the_plugin_adds_a_name(backend):
    plugin.register()
    plugin.register()  # each process may do it twice
    modules = {
        name.rpartition(".")[2]: x for name, x in sys.modules.items() if "sglang.srt" in name
    }
    assert modules["attention_registry"].ATTENTION_BACKENDS == {"tilewise": plugin.create}
    for name in vars(modules["choices"]):
        if name.isupper():
            assert getattr(modules["choices"], name) == ["triton", "tilewise"]


def test_an_error_does_not_stop_a_server(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups", None)
    with caplog.at_level(logging.WARNING, logger="sglang.tilewise"):
        plugin.register()
    assert "not among the attention backends of this SGLang" in caplog.text


@pytest.mark.parametrize("version", ("0.5.22", "0.6.0rc1", "1.0", "0.4.99.post2"))
def test_another_version_is_refused(version):
    from tilewise.integrations.sglang import check_version

    with pytest.raises(NotImplementedError, match=f"this is {version}: install"):
        check_version(version)


def test_versions_that_are_known():
    from tilewise.integrations.sglang import check_version

    for version in ("0.5.23", "0.5.23.post1", "0.5.24rc1"):
        check_version(version)
