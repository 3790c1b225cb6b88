"""tilewise's backend with SGLang's own classes: its pools, its batches, its layers and its backend
of plain torch, in batches of all kinds; and the signatures that the plug-in relies on.
"""

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import sglang_names
from helpers.sglang_batches import CONTEXT, STEPS, Requests

from tilewise import attention_reference

has_sglang = importlib.util.find_spec("sglang") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_sglang, reason="SGLang is not installed: make test-engines"),
    pytest.mark.filterwarnings("default"),
]
SINKS = torch.randn(8, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "plain": {},
    "window": dict(sliding_window_size=23),
    "softcap": dict(logit_cap=2.0),
    "sinks": dict(sliding_window_size=7),
    "headdim_v": dict(v_head_dim=48),
}


@pytest.fixture(scope="module")
def sglang():
    """The names of SGLang, in a process that has a configuration and no server."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.path.insert(0, str(Path(__file__).parent / "sglang_names"))
    from tilewise_plugins import sglang as plugin

    plugin.register()
    of = {
        "layers.attention.attention_registry": "ATTENTION_BACKENDS",
        "layers.attention.torch_native_backend": "TorchNativeAttnBackend",
        "layers.radix_attention": "AttentionType RadixAttention",
        "mem_cache.memory_pool": "MHATokenToKVPool MLATokenToKVPool ReqToTokenPool",
        "mem_cache.swa_memory_pool": "SWAKVPool",
        "model_executor.forward_batch_info": "ForwardBatch ForwardMode",
        "runtime_context": "get_context get_spec",
        "server_args": "ServerArgs",
    }
    names = {
        name: getattr(importlib.import_module(f"sglang.srt.{path}"), name)
        for path, wanted in of.items()
        for name in wanted.split()
    }
    with names["get_context"]().override_server_args():
        yield SimpleNamespace(**names)


def runner(sglang, page_size=1, dtype=torch.float32, headdim_v=64):
    """The attributes of a `ModelRunner`, with real pools."""
    pool = sglang.MHATokenToKVPool(
        1024, page_size, dtype, 2, 64, 1, "cpu", False, v_head_dim=headdim_v
    )
    made = sglang_names.runner(pool, page_size)
    made.req_to_token_pool = sglang.ReqToTokenPool(8, CONTEXT, "cpu", False)
    return made


def layer(sglang, **changes):
    return sglang.RadixAttention(8, 64, 0.125, 2, 0, **changes)


def backend(sglang, made):
    """As a runner makes it, by name."""
    return sglang.ATTENTION_BACKENDS["tilewise"](made)


def check_whole(requests, served, **others):
    module = requests.module
    left, causal = module.sliding_window_size, others.pop("causal", True)
    for b in range(len(requests.q)):
        whole = attention_reference(
            *(x.double() for x in requests.whole(b)),
            causal=causal,
            scale=module.scaling,
            window=None if left < 0 else (left, 0 if causal else left),
            softcap=module.logit_cap or None,
            **others,
        )
        torch.testing.assert_close(requests.out(served, b), whole[0].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", (1, 16))
@pytest.mark.parametrize("name", LAYERS)
def test_batches_beside_sglangs_own_backend(sglang, name, page_size):
    """Ours writes first, and reads what it wrote."""
    made = runner(sglang, page_size, headdim_v=LAYERS[name].get("v_head_dim", 64))
    served, theirs = backend(sglang, made), sglang.TorchNativeAttnBackend(made)
    requests = Requests(sglang, made, layer(sglang, **LAYERS[name]))
    is_theirs = name in ("plain", "window", "headdim_v")  # theirs has no softcap and no sinks
    sinks = dict(sinks=SINKS) if name == "sinks" else {}
    for counts, mode in STEPS:
        outs = requests.step([served, theirs] if is_theirs else [served], counts, mode, **sinks)
        torch.testing.assert_close(outs[0], outs[-1], rtol=1e-5, atol=1e-5)
    check_whole(requests, served, **sinks)


def test_a_pool_of_8_bits(sglang):
    made = runner(sglang, page_size=16, dtype=torch.float8_e4m3fn)
    served, module = backend(sglang, made), layer(sglang)
    module.k_scale, module.v_scale = torch.tensor(0.02), torch.tensor(0.05)
    requests = Requests(sglang, made, module)
    for counts, mode in STEPS:
        requests.step([served], counts, mode)
    for sides, scale in ((requests.k, module.k_scale), (requests.v, module.v_scale)):
        for rows in sides:
            rows[:] = [(x / scale).to(torch.float8_e4m3fn).float() * scale for x in rows]
    check_whole(requests, served)


def test_an_encoder(sglang):
    made = runner(sglang)
    served = backend(sglang, made)
    kind = sglang.AttentionType.ENCODER_ONLY
    requests = Requests(sglang, made, layer(sglang, attn_type=kind, sliding_window_size=6))
    requests.step([served], (5, 40, 17, 3), "EXTEND")
    check_whole(requests, served, causal=False)


def test_a_pool_with_heads_before_tokens(sglang, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    made = runner(sglang, page_size=16)
    assert made.token_to_kv_pool.kv_cache_layout == "hnd"
    requests = Requests(sglang, made, layer(sglang))
    served = backend(sglang, made)
    for counts, mode in STEPS:
        requests.step([served], counts, mode)
    check_whole(requests, served)


@pytest.mark.parametrize("page_size", (1, 16))
def test_a_chain_of_drafts(sglang, page_size):
    with sglang.get_spec().override(
        speculative_num_draft_tokens=3, speculative_eagle_topk=1, speculative_algorithm="EAGLE"
    ):
        made = runner(sglang, page_size)
        served = backend(sglang, made)
        requests = Requests(sglang, made, layer(sglang, sliding_window_size=23))
        requests.step([served], (5, 40, 14, 0), "EXTEND")
        requests.step([served], (3, 3, 3, 0), "TARGET_VERIFY", drafts=3)
        check_whole(requests, served)
        assert served.verify_mask.fits(8)


def test_rows_that_pad_a_graph(sglang):
    """What a decode graph does, through `AttentionBackend`'s own methods."""
    made = runner(sglang, page_size=16)
    served = backend(sglang, made)
    served.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    requests = Requests(sglang, made, layer(sglang))
    requests.step([served], (5, 40, 0, 0), "EXTEND")
    batch, rows = requests.batch((1, 1, 0, 0), "DECODE"), requests.tokens((1, 1))
    expected = served.init_forward_metadata(batch) or served.forward(*rows, requests.module, batch)
    fill = served.get_cuda_graph_seq_len_fill_value()
    batch.batch_size = 4
    batch.seq_lens = torch.cat([batch.seq_lens, torch.tensor([fill, fill])])
    for name in ("req_pool_indices", "out_cache_loc"):
        setattr(batch, name, torch.cat([getattr(batch, name), torch.zeros(2).long()]))
    served.init_forward_metadata_out_graph(batch, in_capture=True)
    served.init_forward_metadata_in_graph(batch)
    rows = [torch.cat([x, torch.zeros(2, *x.shape[1:])]) for x in rows]
    out = served.forward(*rows, requests.module, batch)
    assert torch.equal(out[:2], expected) and out.isfinite().all()


def test_pools_of_other_kinds_are_refused(sglang):
    for kind in (sglang.SWAKVPool, sglang.MLATokenToKVPool):
        made = runner(sglang)
        made.token_to_kv_pool = kind.__new__(kind)
        with pytest.raises(NotImplementedError, match=f"a pool of type {kind.__name__}: "):
            backend(sglang, made)


def test_the_name_is_a_choice(sglang):
    args = sglang.ServerArgs(model_path="none", attention_backend="tilewise")
    assert args.attention_backend == "tilewise"


# Signatures, read without an import: of the installed release, or of an unpacked wheel


@pytest.fixture(scope="module")
def source():
    """The syntax of a file of SGLang's. TILEWISE_SGLANG is the folder of a release."""
    root = (
        os.environ.get("TILEWISE_SGLANG") or Path(importlib.util.find_spec("sglang").origin).parent
    )
    return lambda path: ast.parse((Path(root) / "srt" / path).read_text())


def classes(tree):
    return {x.name: x for x in ast.walk(tree) if isinstance(x, ast.ClassDef)}


def methods(node):
    return {x.name: x for x in node.body if isinstance(x, ast.FunctionDef)}


def parameters(function):
    return [x.arg for x in (*function.args.args, *function.args.kwonlyargs)]


def test_methods_have_sglangs_parameters(source, sglang):
    from tilewise.integrations.sglang.backend import TilewiseBackend

    theirs = methods(classes(source("layers/attention/base_attn_backend.py"))["AttentionBackend"])
    ours = {
        name: x
        for name, x in vars(TilewiseBackend).items()
        if inspect.isfunction(x) and name[0] != "_"
    }
    assert len(ours) >= 8
    for name, function in ours.items():
        expected, found = parameters(theirs[name]), list(inspect.signature(function).parameters)
        assert found[: len(expected)] == expected, name


def test_names_that_are_read_are_there(source):
    layer = classes(source("layers/radix_attention.py"))["RadixAttention"]
    read = "k_scale v_scale logit_cap logit_capping_method sliding_window_size attn_type scaling"
    read += " xai_temperature_len is_cross_attention layer_id tp_q_head_num qk_head_dim v_head_dim"
    written = {
        x.attr
        for x in ast.walk(methods(layer)["__init__"])
        if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)
    }
    assert set(read.split()) <= written
    batch = classes(source("model_executor/forward_batch_info.py"))["ForwardBatch"]
    fields = {x.target.id for x in batch.body if isinstance(x, ast.AnnAssign)}
    read = "forward_mode req_pool_indices seq_lens seq_lens_cpu out_cache_loc input_ids spec_info"
    assert {*read.split(), "extend_seq_lens", "extend_seq_lens_cpu"} <= fields
    modes = {
        x.targets[0].id
        for x in classes(source("model_executor/forward_batch_info.py"))["ForwardMode"].body
        if isinstance(x, ast.Assign)
    }
    # A new kind of batch is refused by name; one that is gone is not
    assert {"EXTEND", "DECODE", "MIXED", "IDLE", "TARGET_VERIFY", "SPLIT_PREFILL"} <= modes
    pool = methods(classes(source("mem_cache/memory_pool.py"))["MHATokenToKVPool"])
    assert parameters(pool["get_kv_buffer"]) == ["self", "layer_id"]
    choices = {
        x.targets[0].id for x in source("arg_groups/choices.py").body if isinstance(x, ast.Assign)
    }
    assert {"ATTENTION_BACKEND_CHOICES", "DETERMINISTIC_ATTENTION_BACKEND_CHOICES"} <= choices
