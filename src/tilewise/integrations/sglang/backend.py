"""The backend that SGLang's model runner creates: a `Step` for each batch, and for each layer the
two calls that serving engines make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from ...frontend.invariance import batch_invariant
from ..engines import Layer, Step
from . import metadata

Tensor = torch.Tensor
ANOTHER = "use --attention-backend triton"
STORED = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
# Whose drafts are chains, or trees as SGLang's mask says
DRAFTERS = "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP", "DFLASH", "NGRAM"
MAX_DRAFTS = 64  # of a tree: a row of its mask is an int64


def refuse(what: str, so: str = ANOTHER) -> None:
    """Raises what tilewise does not support, with the way out."""
    raise NotImplementedError(f"tilewise does not support {what}: {so}")


def has_invariant_bits(runner: Any) -> bool:
    """Whether prefills, chunks and single tokens have the same bits (docs/design/cache.md)."""
    if runner.device == "cpu":
        return True
    is_plain = runner.dtype.itemsize == 2 and runner.model_config.head_dim in range(8, 257, 8)
    return is_plain and torch.cuda.get_device_capability()[0] == 9


def has_trees() -> bool:
    """Whether drafts may be trees; those of n-grams are, whatever their breadth."""
    spec = get_spec()
    return spec.speculative_algorithm == "NGRAM" or (spec.speculative_eagle_topk or 1) > 1


def check_runner(runner: Any) -> None:
    """Refuses a model, a pool or an option that tilewise does not support."""
    pool, spec, parallel = runner.token_to_kv_pool, get_spec(), get_parallel()
    if runner.use_mla_backend:
        refuse("latent attention (MLA)")
    if runner.model_config.is_encoder_decoder:
        refuse("cross attention")
    if runner.is_draft_worker:
        refuse("draft models", so="pass --speculative-draft-attention-backend triton, too")
    if get_exec().dllm.dllm_algorithm is not None:
        refuse("models that denoise blocks of tokens")
    if runner.attention_chunk_size is not None:
        refuse("attention within chunks of keys")
    if parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1:
        refuse("context parallelism", so="leave out --attn-cp-size and --dcp-size")
    if type(pool) is not MHATokenToKVPool:
        refuse(
            f"a pool of type {type(pool).__name__}",
            so=f"pass --disable-hybrid-swa-memory to a model with windows, else {ANOTHER}",
        )
    if pool.dtype not in STORED:
        refuse(f"a cache of {pool.dtype}", so="pass --kv-cache-dtype auto or fp8_e4m3")
    if get_exec().deterministic.enable_deterministic_inference and not has_invariant_bits(runner):
        refuse("--enable-deterministic-inference here", so="use fa3, or 16 bits and a Hopper GPU")
    if spec.speculative_algorithm not in (None, *DRAFTERS):
        refuse(f"speculation by {spec.speculative_algorithm}", so="use EAGLE or NGRAM")
    if has_trees() and spec.speculative_num_draft_tokens > MAX_DRAFTS:
        refuse(f"trees of over {MAX_DRAFTS} drafts", so="lower --speculative-num-draft-tokens")


def layer_of(module: Any, *, sinks: Tensor | None, is_8bit: bool, others: dict[str, Any]) -> Layer:
    """A `RadixAttention` module as tilewise's layer; `others` are the call's other arguments, of
    which tilewise supports none.
    """
    unknown = [name for name, value in others.items() if value is not None and value is not False]
    if module.attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        unknown.append(str(module.attn_type))
    if module.is_cross_attention:
        unknown.append("is_cross_attention")
    if (module.xai_temperature_len or 0) > 0:
        unknown.append("xai_temperature_len")
    if module.logit_cap and module.logit_capping_method != "tanh":
        unknown.append(f"logit_capping_method={module.logit_capping_method}")
    if unknown:
        refuse(f"{', '.join(unknown)} in layer {module.layer_id}")
    causal = module.attn_type == AttentionType.DECODER
    left = module.sliding_window_size  # a query's own key not counted
    return Layer(
        module.scaling,
        causal=causal,
        window=None if left is None or left < 0 else (left, 0 if causal else left),
        softcap=module.logit_cap or None,
        sinks=sinks,
        k_descale=module.k_scale if is_8bit else None,
        v_descale=module.v_scale if is_8bit else None,
    )


class TilewiseBackend(AttentionBackend):
    """tilewise's attention over SGLang's pool of keys and values."""

    needs_cpu_seq_lens = False
    forward_metadata: Step
    # Drafts x drafts cells for each request, into which the draft stage writes its trees
    verify_mask: VerifyMask | None = None

    def __init__(self, runner: Any) -> None:
        super().__init__()
        check_runner(runner)
        self.device = runner.device
        self.page_size = runner.page_size
        self.max_context_len = runner.model_config.context_len  # read by SGLang
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.is_8bit = self.token_to_kv_pool.dtype == torch.float8_e4m3fn
        self.has_trees = has_trees()
        # Such a model gives masks of its images to SGLang's own backends alone
        self.masks_images = hasattr(runner.model, "prepare_attn_masks")
        self._new_mask(runner.req_to_token_pool.size)
        if get_exec().deterministic.enable_deterministic_inference:
            batch_invariant()  # from here on, as all models of a process have the option

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The step of a batch that runs without a graph."""
        if self.masks_images and forward_batch.contains_image_inputs():
            refuse("images whose tokens attend to later ones")
        queries = metadata.queries_of_each(forward_batch)
        lengths, counts = forward_batch.seq_lens_cpu, forward_batch.extend_seq_lens_cpu
        keys = self.req_to_token_pool.req_to_token.shape[1]  # of any request
        if lengths is not None:
            keys = min(keys, max(lengths.tolist(), default=0) + (queries or 0))
        step = metadata.new_step(
            len(forward_batch.seq_lens), pages=-(-keys // self.page_size), device=self.device
        )
        step.max_seqlen_q = queries or (max(counts) if counts else None)
        self.forward_metadata = step
        self._fill(forward_batch, cells=self._cells)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates the tensors that all graphs read."""
        pages = -(-self.req_to_token_pool.req_to_token.shape[1] // self.page_size)
        self._of_graphs = metadata.new_step(max_bs, pages=pages, device=self.device)
        self._new_mask(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Chooses the tensors of a graph that is about to be captured. A graph that is replayed
        fills its own, from trees that are where it reads them.
        """
        if self._verifies_trees(forward_batch) and not in_capture:
            cells = self._cells(forward_batch)
            self.verify_mask.buffer[: cells.numel()].copy_(cells)
        if in_capture:
            queries = metadata.queries_of_each(forward_batch)
            if queries is None:
                way_out = "pass --cuda-graph-backend-prefill breakable"
                refuse("full CUDA graphs of prompts", so=way_out)
            step = metadata.first_of(self._of_graphs, len(forward_batch.seq_lens))
            step.max_seqlen_q = queries
            self.forward_metadata = step

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """What a graph records first: it fills the step."""
        self._fill(forward_batch, cells=lambda batch: self.verify_mask.buffer)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a request that pads a graph."""
        return 1

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Does nothing: the trees are read where they are used."""

    def _fill(self, batch: Any, *, cells: Callable[[Any], Tensor]) -> None:
        step, slots = self.forward_metadata, self.req_to_token_pool.req_to_token
        metadata.fill(step, batch, slots=slots, page_size=self.page_size)
        if self._verifies_trees(batch):
            drafts = batch.spec_info.draft_token_num
            step.mask_mod = metadata.draft_tree(step, cells(batch), drafts=drafts)

    def _verifies_trees(self, batch: Any) -> bool:
        return self.has_trees and batch.forward_mode.is_target_verify()

    def _cells(self, batch: Any) -> Tensor:
        """The batch's trees: in our memory, alone, or with the keys before them."""
        spec = batch.spec_info
        mask, drafts = spec.custom_mask, spec.draft_token_num
        if mask.data_ptr() == self.verify_mask.buffer.data_ptr():
            return mask[: len(batch.seq_lens) * drafts**2]
        if mask.numel() == spec.draft_token.numel() * drafts:
            return mask
        return metadata.cells_of(mask, seq_lens=batch.seq_lens, drafts=drafts)

    def _new_mask(self, batch: int) -> None:
        drafts = get_spec().speculative_num_draft_tokens
        if drafts and not (self.verify_mask and self.verify_mask.fits(batch)):
            cells = torch.zeros(batch * drafts**2, dtype=torch.bool, device=self.device)
            mode = TreeMaskMode.QLEN_ONLY
            self.verify_mask = VerifyMask(cells, mode=mode, max_bs=batch, is_read=self.has_trees)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """A layer: writes new keys and values to their slots, and attends to all of a request's."""
        step, pool = self.forward_metadata, self.token_to_kv_pool
        of_layer = layer_of(layer, sinks=sinks, is_8bit=self.is_8bit, others=others)
        if step.mask_mod is not None and of_layer.scores["window"] is not None:
            refuse("trees of drafts with a window", so="draft by EAGLE, --speculative-eagle-topk 1")
        k_cache, v_cache = map(self._pages, pool.get_kv_buffer(layer.layer_id))
        if save_kv_cache and k is not None and v is not None:
            slots = forward_batch.out_cache_loc
            of_layer.append(k, v, k_cache=k_cache, v_cache=v_cache, slots=slots)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = getattr(forward_batch, "_attn_output", None)  # where a graph of prompts reads it
        if out is None:
            out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        out = out.view(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        of_layer.attend(q, step, k_cache=k_cache, v_cache=v_cache, out=out)
        return out.flatten(1)

    forward_decode = forward_extend

    def _pages(self, rows: Tensor) -> Tensor:
        """(num_pages, page_size, nheads_k, headdim) of a layer's rows, in a pool's two layouts."""
        if self.token_to_kv_pool.kv_cache_layout == "hnd":
            return rows.transpose(1, 2)
        return rows.unflatten(0, (-1, self.page_size))
