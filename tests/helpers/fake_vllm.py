"""The few names of vLLM that the plug-in touches, for tests without vLLM; tests/engines has the
real ones.
"""

import importlib
import sys
import types
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Capability(NamedTuple):
    major: int
    minor: int = 0


class Base(Generic[T]):
    """An abstract class of vLLM's."""


class Builder(Generic[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec = kv_cache_spec


AttentionType = Enum(
    "AttentionType",
    {x.upper(): x for x in ("decoder", "encoder", "encoder_only", "encoder_decoder")},
    type=str,
)
Layout = Enum("KVCacheLayout", "LBHNC LBNHC LHBNC BLHNC BLNHC BHLNC")


class MultipleOf(NamedTuple):
    base: int


class Common(types.SimpleNamespace):
    """vLLM's metadata of a step."""

    def __init__(self, step, slots, causal=True, **others):
        starts = step.cu_seqlens_q
        super().__init__(
            query_start_loc=starts,
            seq_lens=step.seqused_k,
            block_table_tensor=step.page_table,
            slot_mapping=slots,
            num_actual_tokens=len(slots),
            max_query_len=int(starts.diff().max()),
            causal=causal,
            **others,
        )


def modules(version="0.33.0", is_cpu=True, capability=None, batch_invariant=False):
    platform = types.SimpleNamespace(
        is_cpu=lambda: is_cpu, get_device_capability=lambda: capability
    )
    backend = dict(
        AttentionBackend=Base,
        AttentionImpl=Base,
        AttentionMetadataBuilder=Builder,
        AttentionType=AttentionType,
        AttentionCGSupport=Enum("AttentionCGSupport", "NEVER ALWAYS"),
        CommonAttentionMetadata=Common,
        MultipleOf=MultipleOf,
    )
    envs = types.SimpleNamespace(VLLM_BATCH_INVARIANT=batch_invariant)
    return {
        "vllm": dict(__version__=version, envs=envs),
        "vllm.envs": vars(envs),
        "vllm.platforms": dict(current_platform=platform),
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": backend,
        "vllm.v1.kv_cache_layout": dict(KVCacheLayout=Layout),
    }


def load(monkeypatch, **options):
    """The plug-in's three modules, over the fakes."""
    for name, values in modules(**options).items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    ours = "tilewise.integrations.vllm"
    for name in [x for x in sys.modules if x == ours or x.startswith(f"{ours}.")]:
        monkeypatch.delitem(sys.modules, name)
    names = "backend", "metadata", "impl"
    found = [importlib.import_module(f"{ours}.{name}") for name in names]
    for name in (ours, *(f"{ours}.{name}" for name in names)):
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))
    return types.SimpleNamespace(**dict(zip(names, found)))


def layer(k_scale=1.0, v_scale=1.0):
    """What an impl reads of vLLM's layer."""
    return types.SimpleNamespace(_k_scale=torch.tensor(k_scale), _v_scale=torch.tensor(v_scale))
