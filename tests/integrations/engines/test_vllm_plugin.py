"""vLLM's plug-in over fakes of the classes that it touches: what it supports and refuses, the
metadata of a step, and the calls of a layer. tests/engines runs the engine.
"""

from types import SimpleNamespace

import pytest
import torch
from helpers import fake_vllm
from helpers.fake_vllm import Capability, Common

import tilewise
from tilewise.integrations.engines import Layer, Step

INT32, E4M3 = torch.int32, torch.float8_e4m3fn
NHEADS, NHEADS_K, HEADDIM, BLOCK = 4, 2, 16, 16
SLOPES, SINKS = [0.3, 0.1, 0.7, 0.2], torch.tensor([0.3, 2.0, -1.0, 0.0])


@pytest.fixture
def plugin(monkeypatch):
    return fake_vllm.load(monkeypatch)


# what is supported


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_in_a_sentence(plugin, version):
    assert "serves vLLM 0.31 to 0.33 and this is" in plugin.backend.wrong_version(version)


def test_cpus_refuse_other_versions_too(monkeypatch):
    plugin = fake_vllm.load(monkeypatch, version="0.40.0")
    with pytest.raises(NotImplementedError, match="serves vLLM 0.31 to 0.33 and this is 0.40.0"):
        plugin.backend.TilewiseBackend.get_impl_cls()


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1+cpu", "0.33.0rc1"])
def test_versions(plugin, version):
    assert plugin.backend.wrong_version(version) is None


def why(plugin, head_size=64, dtype=torch.bfloat16, cache="auto"):
    rest = dict(block_size=16, use_mla=False, has_sink=False, use_sparse=False, use_mm_prefix=False)
    rest |= dict(device_capability=Capability(9))
    return plugin.backend.TilewiseBackend.supports_combination(head_size, dtype, cache, **rest)


def test_plain_caches_have_the_models_dtype(plugin):
    assert why(plugin) is why(plugin, cache="bfloat16") is why(plugin, cache="fp8") is None
    assert "cache of float16 with a model of torch.bfloat16" in why(plugin, cache="float16")


def test_batch_invariance_is_what_tilewise_promises(monkeypatch):
    for capability, is_promised in ((Capability(9), True), (Capability(8), False), (None, False)):
        options = dict(is_cpu=False, capability=capability, batch_invariant=True)
        plugin = fake_vllm.load(monkeypatch, **options)
        assert plugin.backend.TilewiseBackend.supports_batch_invariance() == is_promised
    assert why(plugin) is why(plugin, head_size=80, cache="fp8") is None
    for asked in (dict(head_size=512), dict(dtype=torch.float32), dict(head_size=72, cache="fp8")):
        assert "batch invariance is what Hopper's kernels promise" in why(plugin, **asked)


def test_vllms_switch_of_batch_invariance_is_tilewises(monkeypatch):
    plugin = fake_vllm.load(monkeypatch, batch_invariant=True)
    try:
        plugin.impl.TilewiseImpl(NHEADS, HEADDIM, 0.25)
        assert tilewise.frontend.invariance.is_on
    finally:
        tilewise.batch_invariant(False)


def test_rows_with_scales_have_room_for_them(plugin):
    from dataclasses import dataclass

    @dataclass
    class Spec:
        kv_quant_mode: object
        head_size: int = 64
        head_size_v: int = 32
        state_content_bytes: int | None = None

    of_rows, of_tensor = (type("Mode", (), dict(is_per_token_head=x)) for x in (True, False))
    customize = plugin.backend.TilewiseBackend.customize_spec
    assert customize(Spec(of_rows)).state_content_bytes == 64 + 4 + 32 + 4
    assert customize(Spec(of_tensor)).state_content_bytes is None


# a step


def a_step(counts=(3, 1), lengths=(20, 5), padding=0):
    """Sequences with new tokens, in pages 1 and 2 and 4, and their slots."""
    starts = torch.tensor([0, *counts]).cumsum(0, dtype=INT32)
    table = torch.tensor([[1, 2], [4, -1]], dtype=INT32)
    slots = [
        int(table[b, j // BLOCK]) * BLOCK + j % BLOCK
        for b, (n, length) in enumerate(zip(counts, lengths))
        for j in range(length - n, length)
    ]
    step = Step(starts, seqused_k=torch.tensor(lengths, dtype=INT32), page_table=table)
    return step, torch.tensor(slots + [-1] * padding)


def builder(plugin):
    return plugin.metadata.TilewiseBuilder(None, [], None, torch.device("cpu"))


def test_metadata_is_the_engines_own_tensors(plugin):
    step, slots = a_step()
    common = Common(step, slots)
    made = builder(plugin).build(0, common)
    assert made.cu_seqlens_q is step.cu_seqlens_q and made.seqused_k is step.seqused_k
    assert made.page_table is step.page_table and made.slot_mapping is slots
    assert (made.max_seqlen_q, made.num_actual_tokens, made.causal) == (3, 4, True)


def test_building_reads_no_device(plugin):
    """Tensors without memory have nothing to read."""
    step, slots = a_step()
    common = Common(step, slots)
    for name, x in vars(common).items():
        if isinstance(x, torch.Tensor):
            setattr(common, name, x.to("meta"))
    made = builder(plugin).build(0, common)
    assert builder(plugin).update_block_table(made, made.page_table, made.slot_mapping)


@pytest.mark.parametrize("bound", [1, 4], ids=["decodes", "any batch of 4 tokens"])
def test_a_captured_step_keeps_the_bound_of_its_graph(plugin, bound):
    common = Common(*a_step())
    common.max_query_len = bound
    made = builder(plugin).build_for_cudagraph_capture(common)
    assert made.max_seqlen_q == bound and made.seqused_k.tolist() == [1, 1]


@pytest.mark.parametrize("total", [0.5, -torch.inf])
def test_a_rank_without_keys_of_a_row_adds_nothing(plugin, total):
    out, lse = torch.full((2, 3, 4), torch.nan), torch.full((3, 2), -torch.inf)
    share = plugin.shards._share(out, lse, total=torch.full((3, 2), total))
    assert share.shape == out.shape and not share.any()


def test_another_groups_table_leaves_the_first_as_it_is(plugin):
    made = builder(plugin).build(0, Common(*a_step()))
    table, slots = made.page_table + 1, made.slot_mapping + BLOCK
    updated = builder(plugin).update_block_table(made, table, slots)
    assert updated.page_table is table and updated.slot_mapping is slots
    assert made.page_table is not table and updated.seqused_k is made.seqused_k
    builder(plugin).update_draft_decode_metadata(updated)


@pytest.mark.parametrize(
    "changed, match",
    [
        (dict(causal=torch.tensor([True, False])), "some requests are causal and some are not"),
        (dict(mm_req_doc_ranges={}), "PrefixLM"),
        (dict(rswa_prefix_lens=torch.zeros(2)), "R-SWA"),
    ],
)
def test_other_masks_are_refused(plugin, changed, match):
    with pytest.raises(NotImplementedError, match=f"{match}.*--attention-backend TRITON_ATTN"):
        builder(plugin).build(0, Common(*a_step(), **changed))


# a layer


def kv_cache(dtype=torch.float32, heads_first=False, behind=0):
    """(blocks, nheads_k, block_size, content), each row K and V and `behind` bytes after each."""
    content = 2 * (HEADDIM + behind)
    if heads_first:
        return torch.zeros(6, NHEADS_K, BLOCK, content).to(dtype)
    return torch.zeros(6, BLOCK, NHEADS_K, content).to(dtype).transpose(1, 2)


def served(plugin, cache, common, q, k, v, layer=None, **options):
    """Two forwards of a layer: all keys but those of the step, then the step."""
    impl = plugin.impl.TilewiseImpl(
        NHEADS, HEADDIM, 0.25, NHEADS_K, options.pop("alibi_slopes", None), **options
    )
    layer = layer or fake_vllm.layer()
    lengths = common.seq_lens.tolist()
    _, slots = a_step(counts=lengths, lengths=lengths)
    impl.do_kv_cache_update(layer, torch.cat(k), torch.cat(v), cache, slots)
    counts = common.query_start_loc.diff().tolist()
    new = [torch.cat([x[-n:] for n, x in zip(counts, xs)]) for xs in (q, k, v)]
    padding = len(common.slot_mapping) - len(new[0])
    new = [torch.cat([x, x.new_zeros(padding + 2, *x.shape[1:])]) for x in new]
    impl.do_kv_cache_update(layer, new[1], new[2], cache, common.slot_mapping)
    out = torch.full_like(new[0], 7.0)
    made = builder(plugin).build(0, common)
    assert impl.forward(layer, *new, cache, made, out) is out
    assert (out[sum(counts) :] == 7).all()
    return out[: sum(counts)]


def draw(lengths=(20, 5)):
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(n, nheads, HEADDIM, generator=generator) for n in lengths]
        for nheads in (NHEADS, NHEADS_K, NHEADS_K)
    ]


def expected(q, k, v, counts=(3, 1), **scores):
    scores = Layer(0.25, **scores).scores
    rows = [
        tilewise.attention_reference(*(x[b].unsqueeze(0) for x in (q, k, v)), **scores)[0, -n:]
        for b, n in enumerate(counts)
    ]
    return torch.cat(rows)


LAYERS = {
    "plain": (dict(), dict()),
    "window": (dict(sliding_window=8), dict(window=(7, 0))),
    "softcap": (dict(logits_soft_cap=2.0), dict(softcap=2.0)),
    "no softcap": (dict(logits_soft_cap=0.0), dict()),
    "sinks": (dict(sinks=SINKS), dict(sinks=SINKS)),
    "slopes": (dict(alibi_slopes=SLOPES), dict(alibi_slopes=torch.tensor(SLOPES))),
}


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(plugin, name, heads_first):
    options, scores = LAYERS[name]
    q, k, v = draw()
    common = Common(*a_step(padding=2))
    found = served(plugin, kv_cache(heads_first=heads_first), common, q, k, v, **options)
    torch.testing.assert_close(found, expected(q, k, v, **scores), atol=1e-5, rtol=1e-5)


def test_queries_of_drafts_and_cross_attention_see_all_keys(plugin):
    (q, k, v), whole = draw(), dict(causal=False)
    of_drafts = served(plugin, kv_cache(), Common(*a_step(), causal=False), q, k, v)
    torch.testing.assert_close(of_drafts, expected(q, k, v, **whole), atol=1e-5, rtol=1e-5)
    crossed = served(plugin, kv_cache(), Common(*a_step()), q, k, v, attn_type="encoder_decoder")
    assert torch.equal(crossed, of_drafts)


# ranks that have parts of the keys


def parts(interleave, rank, lengths, counts):
    """The slots of a step's tokens in this rank's pages, and -1 for those of the other rank."""
    table = torch.tensor([[1, 2], [4, -1]])
    slots = []
    for b, (length, n) in enumerate(zip(lengths, counts)):
        j = torch.arange(length - n, length)
        row = j // (2 * interleave) * interleave + j % interleave
        is_mine = j // interleave % 2 == rank
        slots.append(torch.where(is_mine, table[b, row // BLOCK] * BLOCK + row % BLOCK, -1))
    return torch.cat(slots)


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("counts", [(3, 1), (20, 5)], ids=["with context", "without"])
def test_ranks_that_have_parts_of_the_keys(plugin, interleave, counts):
    """Two ranks, of one key head, each with half of the query heads and half of the keys."""
    lengths, generator = (20, 5), torch.Generator().manual_seed(0)
    q, k, v = (
        [torch.randn(n, nheads, HEADDIM, generator=generator) for n in lengths]
        for nheads in (NHEADS, 1, 1)
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=2, cp_kv_cache_interleave_size=interleave
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    step, _ = a_step(counts=counts)
    new = [torch.cat([x[-n:] for x, n in zip(xs, counts)]) for xs in (q, k, v)]

    def work(rank):
        spec = SimpleNamespace(dcp_sharded=True)
        made = plugin.metadata.TilewiseBuilder(spec, [], config, torch.device("cpu"))
        assert not made.supports_draft_decode_metadata_update
        impl = plugin.impl.TilewiseImpl(NHEADS // 2, HEADDIM, 0.25, 1, logits_soft_cap=3.0)
        cache = torch.zeros(6, 1, BLOCK, 2 * HEADDIM)
        slots = parts(interleave, rank, lengths, counts=lengths)
        impl.do_kv_cache_update(None, torch.cat(k), torch.cat(v), cache, slots)
        metadata = made.build(0, Common(step, parts(interleave, rank, lengths, counts)))
        mine = new[0].chunk(2, 1)[rank]
        out = torch.empty_like(mine)
        return impl.forward(None, mine, *new[1:], cache, metadata, out)

    found = torch.cat(fake_vllm.Group(2).run(work), 1)
    whole = expected(q, k, v, counts=counts, softcap=3.0)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("option", [dict(sliding_window=8), dict(sinks=SINKS)])
def test_what_ranks_with_parts_of_the_keys_refuse(plugin, monkeypatch, option):
    monkeypatch.setattr(plugin.impl.TilewiseImpl, "dcp_world_size", 2, raising=False)
    with pytest.raises(NotImplementedError, match="decode-context-parallel-size: leave that out"):
        plugin.impl.TilewiseImpl(NHEADS, HEADDIM, 0.25, **option)


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
def test_encoders_have_no_cache(plugin, kind):
    q, k, v = draw()
    packed = [torch.cat(x) for x in (q, k, v)]
    common = Common(*a_step(counts=(20, 5)))
    options = dict(attn_type=kind, sliding_window=4)
    impl = plugin.impl.TilewiseImpl(NHEADS, HEADDIM, 0.25, NHEADS_K, **options)
    impl.do_kv_cache_update(None, packed[1], packed[2], None, common.slot_mapping)
    out = torch.empty_like(packed[0])
    impl.forward(None, *packed, None, builder(plugin).build(0, common), out)
    whole = expected(q, k, v, counts=(20, 5), causal=False, window=(3, 3))
    torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head"])
def test_caches_of_8_bits(plugin, name):
    """vLLM hands over bytes, and scales of a layer as fp32 without dimensions."""
    (q, k, v), has_rows = draw(), name.endswith("head")
    largest = 127 if name.startswith("int8") else 448
    stored = torch.int8 if name.startswith("int8") else E4M3

    def rounded(x, scale):
        scale = x.abs().amax(-1, keepdim=True) / largest if has_rows else scale
        rows = x / scale
        return (rows.round() if largest == 127 else rows).to(stored).float() * scale

    cache = kv_cache(torch.uint8, behind=4 if has_rows else 0)
    layer = fake_vllm.layer(0.02, 0.05)
    common = Common(*a_step())
    found = served(plugin, cache, common, q, k, v, layer=layer, kv_cache_dtype=name)
    k, v = ([rounded(x, scale) for x in xs] for xs, scale in ((k, 0.02), (v, 0.05)))
    torch.testing.assert_close(found, expected(q, k, v), atol=1e-4, rtol=1e-4)


def test_a_new_cache_and_new_scales_are_seen(plugin):
    _, k, v = draw()
    impl = plugin.impl.TilewiseImpl(NHEADS, HEADDIM, 0.25, NHEADS_K, kv_cache_dtype="fp8")
    layer = fake_vllm.layer(0.02, 0.05)
    _, slots = a_step(counts=(20, 5))
    caches = [kv_cache(torch.uint8) for _ in range(2)]
    for cache in caches:
        impl.do_kv_cache_update(layer, torch.cat(k), torch.cat(v), cache, slots)
    assert torch.equal(*caches)
    layer._k_scale = torch.tensor([0.04])  # as some checkpoints have it
    impl.do_kv_cache_update(layer, torch.cat(k), torch.cat(v), caches[1], slots)
    assert not torch.equal(*caches)
    layer._k_scale = torch.tensor([0.02, 0.04])  # by head
    impl.do_kv_cache_update(layer, torch.cat(k), torch.cat(v), caches[1], slots)
    by_head = [cache[..., :HEADDIM] for cache in caches]
    assert torch.equal(by_head[0][:, 0], by_head[1][:, 0])
    assert not torch.equal(by_head[0][:, 1], by_head[1][:, 1])


def test_a_run_that_measures_memory_computes_nothing(plugin):
    impl = plugin.impl.TilewiseImpl(NHEADS, HEADDIM, 0.25)
    out = torch.ones(3, NHEADS, HEADDIM)
    assert impl.forward(None, out, out, out, torch.tensor([]), None, out) is out
    assert not out.any()


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(kv_cache_dtype="fp8_e5m2"), "--kv-cache-dtype fp8_e5m2: pass auto or one of fp8, "),
        (dict(kv_cache_dtype="bfloat16"), "a cache of bfloat16 with a model of torch.float32"),
        (dict(kv_cache_dtype="fp8", attn_type="encoder_only"), "which has no cache: leave it out"),
    ],
)
def test_layers_that_are_refused(plugin, options, match):
    with pytest.raises(NotImplementedError, match=match):
        plugin.impl.TilewiseImpl(NHEADS, HEADDIM, 0.25, **options)


def test_a_quantised_output_is_refused(plugin):
    impl = plugin.impl.TilewiseImpl(NHEADS, HEADDIM, 0.25)
    x = torch.ones(3, NHEADS, HEADDIM)
    with pytest.raises(NotImplementedError, match="does not quantise its output"):
        impl.forward(None, x, x, x, x, None, x, output_scale=x)
