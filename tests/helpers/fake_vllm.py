"""The few names of vLLM that the plug-in touches, for tests without vLLM; tests/engines has the
real ones.
"""

import importlib
import sys
import threading
import types
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import torch

from .waits import DEADLINE

T = TypeVar("T")


class Capability(NamedTuple):
    major: int
    minor: int = 0


class Base(Generic[T]):
    """An abstract class of vLLM's."""

    dcp_world_size = 1


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


class Group:
    """Ranks that are threads, each in `current.group` of its own."""

    current = threading.local()

    def __init__(self, ranks):
        self.world_size, self.barrier, self.tensors = (
            ranks,
            threading.Barrier(ranks),
            [None] * ranks,
        )

    @property
    def rank_in_group(self):
        return self.current.rank

    def _exchange(self, x):
        self.tensors[self.current.rank] = x
        self.barrier.wait(DEADLINE)
        tensors = list(self.tensors)
        self.barrier.wait(DEADLINE)
        return tensors

    def all_gather(self, x, dim):
        return torch.cat(self._exchange(x), dim)

    def reduce_scatter(self, x, dim):
        return sum(self._exchange(x)).chunk(self.world_size, dim)[self.current.rank]

    def run(self, work):
        """What `work(rank)` returns in each rank."""
        found = [None] * self.world_size

        def of_rank(rank):
            self.current.group, self.current.rank = self, rank
            found[rank] = work(rank)

        threads = [threading.Thread(target=of_rank, args=(i,)) for i in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        return found


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
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": dict(
            get_dcp_group=lambda: Group.current.group,
            get_dcp_world_size_and_rank=lambda: (
                Group.current.group.world_size,
                Group.current.rank,
            ),
        ),
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": backend,
        "vllm.v1.kv_cache_layout": dict(KVCacheLayout=Layout),
    }


def load(monkeypatch, **options):
    """The plug-in's modules, over the fakes."""
    for name, values in modules(**options).items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    ours = "tilewise.integrations.vllm"
    for name in [x for x in sys.modules if x == ours or x.startswith(f"{ours}.")]:
        monkeypatch.delitem(sys.modules, name)
    names = "backend", "metadata", "impl", "shards"
    found = [importlib.import_module(f"{ours}.{name}") for name in names]
    for name in (ours, *(f"{ours}.{name}" for name in names)):
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))
    return types.SimpleNamespace(**dict(zip(names, found)))


def layer(k_scale=1.0, v_scale=1.0):
    """What an impl reads of vLLM's layer."""
    return types.SimpleNamespace(_k_scale=torch.tensor(k_scale), _v_scale=torch.tensor(v_scale))
