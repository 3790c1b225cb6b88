"""What vLLM's own classes say of tilewise without an engine, as JSON: its selector with the class
of its CUDA platform, which needs no GPU, its command line, and its wrapper for cross attention.
"""

import json
import os
import pickle
import sys
import types

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
# vLLM's CPU build has no compiled part for GPUs; the class that selects backends calls none
sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")

import numpy  # noqa: E402
import torch  # noqa: E402
import vllm.platforms  # noqa: E402
from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.attention import cross_attention  # noqa: E402
from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import _cached_get_attn_backend, get_attn_backend  # noqa: E402
from vllm.v1.kv_cache_interface import CrossAttentionSpec  # noqa: E402

load_general_plugins()

ASKED = {
    "plain": {},
    "sinks and a window": dict(has_sink=True, has_sliding_window=True),
    "fp8": dict(kv_cache_dtype="fp8"),
    "rows with scales": dict(kv_cache_dtype="int8_per_token_head"),
    "scales by head": dict(kv_cache_dtype="fp8", use_per_head_quant_scales=True),
    "an encoder": dict(attn_type="encoder_only"),
    "MLA": dict(use_mla=True),
    "sparse": dict(use_sparse=True),
    "PrefixLM": dict(use_mm_prefix=True),
    "e5m2": dict(kv_cache_dtype="fp8_e5m2"),
    "wide heads": dict(head_size=576),
    "another dtype": dict(kv_cache_dtype="float16"),
}


def platform(*capability):
    """vLLM's CUDA platform, of a GPU that need not be there."""

    class Platform(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(*capability)

    return Platform()


def selected(config, name="CUSTOM", capability=(9, 0), **asked):
    """The path of the class that vLLM chooses, or why it refuses to."""
    config.attention_config = AttentionConfig(backend=name)
    asked = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto") | asked
    before = vllm.platforms.current_platform
    from tilewise.integrations.vllm import backend

    vllm.platforms._current_platform = backend.current_platform = platform(*capability)
    _cached_get_attn_backend.cache_clear()
    try:
        found = get_attn_backend(**asked)
        return f"{found.__module__}.{found.__qualname__}"
    except ValueError as error:
        return str(error)
    finally:
        vllm.platforms._current_platform = backend.current_platform = before


def chosen(config):
    from tilewise.integrations.vllm import backend

    found = {name: selected(config, **asked) for name, asked in ASKED.items()}
    found["TILEWISE"] = selected(config, name="TILEWISE")
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    found["batch invariance on Hopper"] = selected(config)
    found["batch invariance before Hopper"] = selected(config, capability=(8, 0))
    found["batch invariance of wide heads"] = selected(config, head_size=512)
    del os.environ["VLLM_BATCH_INVARIANT"]
    backend.wrong_version.__defaults__ = ("0.40.0",)
    found["another version"] = selected(config)
    return found


def parsed(*words):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine_args = EngineArgs.from_cli_args(parser.parse_args(["--model", "none", *words]))
    asked = engine_args.attention_backend
    return AttentionConfig(backend=asked).backend.name


def common(counts, encoder_lengths, table, computed):
    """vLLM's metadata of a step of an encoder-decoder model."""
    starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([n + m for n, m in zip(counts, computed)], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table,
        slot_mapping=torch.full((sum(counts),), -1),
        encoder_seq_lens=torch.tensor(encoder_lengths, dtype=torch.int32),
        encoder_seq_lens_cpu=numpy.array(encoder_lengths),
        seq_lens_cpu_upper_bound=lengths,
    )


def crossed(config):
    """The largest error of cross attention through vLLM's own wrapper: a first step, which stores
    the encoder's keys, and a second one, which has none.
    """
    from tilewise import attention_reference
    from tilewise.integrations.vllm.backend import TilewiseBackend

    made = cross_attention.create_cross_attention_backend(TilewiseBackend)
    spec = CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    builder = made.get_builder_cls()(spec, ["cross"], config, torch.device("cpu"))
    impl = made.get_impl_cls()(4, 32, 0.2, 2, None, None, "auto", None, "encoder_decoder")
    layer = types.SimpleNamespace(kv_sharing_target_layer_name=None)
    cache, table = torch.zeros(6, 2, 16, 64), torch.tensor([[3, 1], [5, 0]], dtype=torch.int32)
    lengths = [20, 7]
    k, v = torch.randn(2, sum(lengths), 2, 32).unbind(0)
    worst = 0.0
    for counts, computed, new in (([3, 2], [0, 0], (k, v)), ([1, 1], [3, 2], (None, None))):
        q = torch.randn(sum(counts), 4, 32)
        metadata = builder.build(0, common(counts, lengths, table, computed))
        out = impl.forward(layer, q, *new, cache, metadata, torch.empty_like(q))
        of_requests = zip(q.split(counts), k.split(lengths), v.split(lengths))
        rows = [attention_reference(*(x[None] for x in one), scale=0.2)[0] for one in of_requests]
        worst = max(worst, float((out - torch.cat(rows)).abs().max()))
    return worst


def main():
    config = VllmConfig()
    custom = AttentionBackendEnum["TILEWISE"]
    with set_current_vllm_config(config):
        found = dict(
            crossed=crossed(config),
            chosen=chosen(config),
            parsed=[parsed("--attention-backend", x) for x in ("CUSTOM", "TILEWISE")],
            is_pickled=pickle.loads(pickle.dumps(custom)) is custom,
            of_cpus=AttentionBackendEnum.CPU_ATTN.get_path(),
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
