"""Fakes of the names of SGLang that the plug-in touches, as modules under SGLang's paths."""

import enum
import sys
from types import ModuleType, SimpleNamespace

import torch

ForwardMode = enum.IntEnum(
    "ForwardMode",
    "EXTEND DECODE MIXED IDLE TARGET_VERIFY DRAFT_EXTEND_V2 PREBUILT SPLIT_PREFILL DLLM_EXTEND",
)
ForwardMode.is_decode_or_idle = lambda self: self in (ForwardMode.DECODE, ForwardMode.IDLE)
ForwardMode.is_target_verify = lambda self: self == ForwardMode.TARGET_VERIFY
AttentionType = enum.Enum("AttentionType", "DECODER DECODER_BIDIRECTIONAL ENCODER_ONLY")
TreeMaskMode = enum.IntEnum("TreeMaskMode", "FULL_MASK QLEN_ONLY")
ForwardBatch = SimpleNamespace


class AttentionBackend:
    verify_mask = property(lambda self: None)

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **others):
        is_decode = forward_batch.forward_mode == ForwardMode.DECODE
        call = self.forward_decode if is_decode else self.forward_extend
        return call(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **others)


class VerifyMask:
    def __init__(self, buffer, mode, max_bs, is_read=True):
        self.buffer, self.mode, self.max_bs, self.is_read = buffer, mode, max_bs, is_read

    def fits(self, bs):
        return bs <= self.max_bs


class MHATokenToKVPool:
    def __init__(self, size, page_size, dtype, heads, headdim, headdim_v=None, hnd=False):
        self.size, self.dtype = size, dtype
        self.kv_cache_layout = "hnd" if hnd else "nhd"
        self.rows = []
        for width in (headdim, headdim_v or headdim):
            if hnd:
                rows = torch.zeros(size // page_size + 1, heads, page_size, width, dtype=dtype)
            else:
                rows = torch.zeros(size + page_size, heads, width, dtype=dtype)
            self.rows.append(rows)

    def get_kv_buffer(self, layer_id):
        return tuple(self.rows)


class OtherPool(MHATokenToKVPool):
    pass


def layer(**changes):
    """The attributes of a `RadixAttention`."""
    of = dict(tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, qk_head_dim=16, v_head_dim=16)
    of |= dict(scaling=0.25, layer_id=0, logit_cap=0.0, logit_capping_method="tanh")
    of |= dict(sliding_window_size=-1, is_cross_attention=False, xai_temperature_len=-1)
    of |= dict(attn_type=AttentionType.DECODER, k_scale=None, v_scale=None)
    return SimpleNamespace(**of | changes)


def settings(**changes):
    """What `runtime_context` returns: its three bags, with what the plug-in reads of each."""
    values = dict(algorithm=None, topk=None, drafts=None, dllm=None, deterministic=False)
    values |= dict(cp=1, dcp=1) | changes
    return dict(
        get_spec=lambda: SimpleNamespace(
            speculative_algorithm=values["algorithm"],
            speculative_eagle_topk=values["topk"],
            speculative_num_draft_tokens=values["drafts"],
        ),
        get_exec=lambda: SimpleNamespace(
            dllm=SimpleNamespace(dllm_algorithm=values["dllm"]),
            deterministic=SimpleNamespace(enable_deterministic_inference=values["deterministic"]),
        ),
        get_parallel=lambda: SimpleNamespace(
            attn_cp_size=values["cp"], attn_dcp_size=values["dcp"]
        ),
    )


def configure(backend, monkeypatch, **changes):
    """Other settings for the backend's module."""
    for name, get in settings(**changes).items():
        monkeypatch.setattr(backend, name, get)


def runner(pool=None, page_size=1, **changes):
    """The attributes of a `ModelRunner`."""
    pool = pool or MHATokenToKVPool(1024, page_size, dtype=torch.float32, heads=2, headdim=16)
    table = torch.zeros(9, 512, dtype=torch.int32)
    of = dict(device="cpu", page_size=page_size, dtype=torch.float32, token_to_kv_pool=pool)
    of |= dict(req_to_token_pool=SimpleNamespace(req_to_token=table, size=8))
    of |= dict(use_mla_backend=False, is_draft_worker=False, attention_chunk_size=None)
    model = dict(context_len=512, head_dim=16, is_encoder_decoder=changes.pop("encoder", False))
    of |= dict(model=object())
    return SimpleNamespace(**of | changes, model_config=SimpleNamespace(**model))


def install(monkeypatch):
    """Puts the fakes where the plug-in imports from."""
    choices = "ATTENTION_BACKEND DETERMINISTIC_ATTENTION_BACKEND"
    lists = {f"{name}_CHOICES": ["triton"] for name in choices.split()}
    lists["RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND"] = ["triton"]
    backends = {}
    modules = {
        "arg_groups.choices": lists,
        "layers.attention.attention_registry": dict(
            ATTENTION_BACKENDS=backends,
            register_attention_backend=lambda name: lambda made: backends.setdefault(name, made),
        ),
        "layers.attention.base_attn_backend": dict(AttentionBackend=AttentionBackend),
        "layers.attention.verify_mask": dict(VerifyMask=VerifyMask),
        "layers.radix_attention": dict(AttentionType=AttentionType),
        "mem_cache.memory_pool": dict(MHATokenToKVPool=MHATokenToKVPool),
        "runtime_context": settings(),
        "speculative.eagle_utils": dict(TreeMaskMode=TreeMaskMode),
    }
    for path, names in modules.items():
        for depth in range(len(path.split("."))):
            above = ".".join(["sglang", "srt", *path.split(".")[:depth]])
            monkeypatch.setitem(sys.modules, above, sys.modules.get(above) or ModuleType(above))
        module = ModuleType(f"sglang.srt.{path}")
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
