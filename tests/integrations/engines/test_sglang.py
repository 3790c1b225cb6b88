"""SGLang's backend with fakes of the few classes it touches: batches of all kinds against
attention over whole sequences, and what a graph records. `tests/engines` has the real classes.
"""

from types import SimpleNamespace

import pytest
import torch
from helpers import sglang_names as names
from helpers.sglang_batches import STEPS, Requests
from helpers.sglang_names import configure
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import attention_reference

SINKS = torch.tensor([0.3, 2.0, -1.0, 0.0])
LAYERS = {
    "plain": {},
    "window": dict(sliding_window_size=23),
    "softcap": dict(logit_cap=2.0),
    "sinks": dict(sliding_window_size=7),
}


def scores(module, **others):
    """The keywords of `attention_reference`."""
    left = module.sliding_window_size
    return (
        dict(
            causal=True,
            scale=module.scaling,
            window=(left, 0) if left >= 0 else None,
            softcap=module.logit_cap or None,
        )
        | others
    )


def check_whole(requests, served, **others):
    for b in range(len(requests.q)):
        whole = attention_reference(
            *(x.double() for x in requests.whole(b)), **scores(requests.module, **others)
        )
        torch.testing.assert_close(requests.out(served, b), whole[0].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", (1, 16))
@pytest.mark.parametrize("name", LAYERS)
def test_batches_give_what_whole_sequences_give(backend, name, page_size):
    runner, sinks = names.runner(page_size=page_size), SINKS if name == "sinks" else None
    served = backend.TilewiseBackend(runner)
    requests = Requests(names, runner, names.layer(**LAYERS[name]))
    for counts, mode in STEPS:
        requests.step([served], counts, mode, sinks=sinks)
    check_whole(requests, served, sinks=sinks)


def test_a_pool_with_heads_before_tokens(backend):
    pool = names.MHATokenToKVPool(
        256, page_size=16, dtype=torch.float32, heads=2, headdim=16, headdim_v=8, hnd=True
    )
    runner = names.runner(pool, page_size=16)
    served = backend.TilewiseBackend(runner)
    requests = Requests(names, runner, names.layer(v_head_dim=8))
    for counts, mode in STEPS:
        requests.step([served], counts, mode)
    check_whole(requests, served)


def test_an_encoder_sees_all_tokens(backend):
    runner = names.runner()
    served = backend.TilewiseBackend(runner)
    module = names.layer(attn_type=names.AttentionType.ENCODER_ONLY, sliding_window_size=6)
    requests = Requests(names, runner, module)
    requests.step([served], (5, 40, 17, 3), "EXTEND")
    check_whole(requests, served, causal=False, window=(6, 6))


def test_a_pool_of_8_bits_has_the_scales_of_its_layer(backend):
    runner = names.runner(
        names.MHATokenToKVPool(512, page_size=1, dtype=torch.float8_e4m3fn, heads=2, headdim=16)
    )
    served = backend.TilewiseBackend(runner)
    module = names.layer(k_scale=torch.tensor(0.02), v_scale=torch.tensor(0.05))
    requests = Requests(names, runner, module)
    for counts, mode in STEPS:
        requests.step([served], counts, mode)
    for sides, scale in ((requests.k, module.k_scale), (requests.v, module.v_scale)):
        for rows in sides:
            rows[:] = [(x / scale).to(torch.float8_e4m3fn).float() * scale for x in rows]
    check_whole(requests, served)


def test_scales_of_a_checkpoint_do_not_change_a_pool_of_16_bits(backend):
    runner = names.runner()
    served = backend.TilewiseBackend(runner)
    requests = Requests(names, runner, names.layer(k_scale=torch.tensor(0.02)))
    requests.step([served], (5, 3, 0, 0), "EXTEND")
    check_whole(requests, served)


def test_a_layer_may_read_what_another_wrote(backend):
    """K and V are None, or were written before."""
    runner = names.runner()
    served = backend.TilewiseBackend(runner)
    requests = Requests(names, runner, names.layer())
    (out,) = requests.step([served], (5, 3, 0, 0), "EXTEND")
    batch, q = requests.batch((0, 0, 0, 0), "EXTEND"), torch.cat([x for x, *_ in requests.q[:2]])
    for rows in ((None, None), (torch.full((8, 2, 16), torch.nan),) * 2):
        again = served.forward_extend(
            q, *rows, requests.module, batch, save_kv_cache=rows[0] is None
        )
        assert torch.equal(out, again)


def test_lengths_may_be_on_the_device_alone(backend):
    """Then a request may have as many keys as there are."""
    runner = names.runner(page_size=16)
    served = backend.TilewiseBackend(runner)
    requests = Requests(names, runner, names.layer())
    (out,) = requests.step([served], (5, 3, 0, 0), "EXTEND")
    q = torch.cat([x for x, *_ in requests.q[:2]])
    batch = SimpleNamespace(
        forward_mode=names.ForwardMode.TARGET_VERIFY,
        spec_info=SimpleNamespace(draft_token_num=1),
        seq_lens=torch.tensor([4, 2]),
        seq_lens_cpu=None,
        extend_seq_lens_cpu=None,
        req_pool_indices=torch.tensor([1, 2]),
    )
    served.init_forward_metadata(batch)
    assert served.forward_metadata.page_table.shape == (2, 32)
    last = served.forward_extend(q[[4, 7]], None, None, requests.module, batch)
    torch.testing.assert_close(last, out[[4, 7]])


# Speculation


def test_a_chain_of_drafts_gives_what_single_tokens_give(backend, monkeypatch):
    configure(backend, monkeypatch, topk=1, drafts=3, algorithm="EAGLE")
    runner = names.runner(page_size=16)
    served = backend.TilewiseBackend(runner)
    requests = Requests(names, runner, names.layer(sliding_window_size=23))
    requests.step([served], (5, 40, 14, 0), "EXTEND")
    requests.step([served], (3, 3, 3, 0), "TARGET_VERIFY", drafts=3)
    check_whole(requests, served)
    mask = served.verify_mask
    assert mask.fits(8) and not mask.fits(9) and not mask.is_read


class Static(TorchDispatchMode):
    """Fails where a graph could not be recorded: a value is read on the host, or a shape depends
    on values.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function) and "nonzero" not in str(function)
        return function(*args, **(kwargs or {}))


def graph_batch(batch, size):
    """The tensors a runner refreshes for a graph of `size` requests, with those that pad it."""
    more = size - batch.batch_size

    def padded(x, value):
        return torch.cat([x, torch.full((more,), value, dtype=x.dtype)])

    return SimpleNamespace(
        **vars(batch)
        | dict(
            batch_size=size,
            req_pool_indices=padded(batch.req_pool_indices, 0),
            seq_lens=padded(batch.seq_lens, 1),
        )
    )


@pytest.mark.parametrize("page_size", (1, 16))
def test_a_graph_follows_each_batch(backend, page_size):
    """What is captured once is run for other batches, whose tensors have the same addresses."""
    runner = names.runner(page_size=page_size)
    served = backend.TilewiseBackend(runner)
    served.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    requests = Requests(names, runner, names.layer())
    requests.step([served], (5, 70, 17, 0), "EXTEND")
    batch = requests.batch((1, 1, 1, 0), "DECODE")
    static = graph_batch(batch, size=4)
    served.init_forward_metadata_out_graph(static, in_capture=True)
    step = served.forward_metadata
    captured = [x.data_ptr() for x in (step.cu_seqlens_q, step.seqused_k, step.page_table)]
    for counts in ((0, 0, 0, 0), (1, 1, 1, 0), (0, 1, 0, 0)):
        batch = requests.batch(counts, "DECODE") if any(counts) else batch
        now = graph_batch(batch, size=4)
        static.seq_lens.copy_(now.seq_lens)
        static.req_pool_indices.copy_(now.req_pool_indices)
        served.init_forward_metadata_out_graph(static)  # replay: does nothing
        with Static():
            served.init_forward_metadata_in_graph(static)
        of_graph = served.forward_metadata
        q, k, v = requests.tokens((1,) * batch.batch_size)
        more = 4 - batch.batch_size
        rows = [torch.cat([x, torch.zeros(more, *x.shape[1:])]) for x in (q, k, v)]
        static.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(more).long()])
        out = served.forward(*rows, requests.module, static)
        assert out.isfinite().all()
        served.init_forward_metadata(batch)
        assert torch.equal(out[: batch.batch_size], served.forward(q, k, v, requests.module, batch))
        served.forward_metadata = of_graph
    assert captured == [
        x.data_ptr() for x in (of_graph.cu_seqlens_q, of_graph.seqused_k, of_graph.page_table)
    ]
    assert served.get_cuda_graph_seq_len_fill_value() == 1


def test_full_graphs_of_prompts_are_refused(backend):
    runner = names.runner()
    batch = Requests(names, runner, names.layer()).batch((5, 40, 17, 2), "EXTEND")
    served = backend.TilewiseBackend(runner)
    with pytest.raises(NotImplementedError, match="prompts: .*-graph-backend-prefill breakable"):
        served.init_forward_metadata_out_graph(batch, in_capture=True)


def test_the_output_goes_where_a_graph_of_prompts_reads_it(backend):
    runner = names.runner()
    served = backend.TilewiseBackend(runner)
    requests = Requests(names, runner, names.layer())
    batch, rows = requests.batch((5, 3, 0, 0), "EXTEND"), requests.tokens((5, 3))
    served.init_forward_metadata(batch)
    assert served.forward_metadata.max_seqlen_q == 5
    expected = served.forward(*rows, requests.module, batch)
    batch._attn_output = torch.empty(10, 64)[:8]
    out = served.forward(*rows, requests.module, batch)
    assert out.data_ptr() == batch._attn_output.data_ptr() and torch.equal(out, expected)


def parents_mask(parents):
    """drafts x drafts: a draft attends to itself and to its ancestors."""
    cells = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent is not None:
            cells[i] |= cells[parent]
    return cells


TREES = [(None, 0, 0, 1), (None, 0, 1, 2)], [(None, 0, 0, 0), (None, 0, 1, 0)]


def with_keys(cells, before):
    """The mask of drafts with the keys before them, flat, as SGLang has it for n-grams."""
    rows = [
        torch.cat([torch.ones(len(x), n, dtype=torch.bool), x], 1) for x, n in zip(cells, before)
    ]
    return torch.cat([x.flatten() for x in rows])


@pytest.mark.parametrize("in_graph", (False, True))
@pytest.mark.parametrize("algorithm", ("EAGLE", "NGRAM"))
def test_trees_of_drafts(backend, monkeypatch, algorithm, in_graph):
    """One graph verifies the trees of each batch, which EAGLE's draft stage writes to
    `verify_mask`; those of n-grams come with the keys before them, or without.
    """
    topk = 2 if algorithm == "EAGLE" else 1  # trees of n-grams are no chains at a breadth of 1
    configure(backend, monkeypatch, topk=topk, drafts=4, algorithm=algorithm)
    runner = names.runner()
    served = backend.TilewiseBackend(runner)
    served.init_cuda_graph_state(max_bs=8, max_num_tokens=32)
    requests = Requests(names, runner, names.layer(logit_cap=5.0))
    requests.step([served], (5, 40, 0, 0), "EXTEND")
    mask, before = served.verify_mask, [len(x) for x in requests.slots]
    assert mask.is_read and mask.mode == names.TreeMaskMode.QLEN_ONLY
    batch = requests.batch((4, 4, 0, 0), "TARGET_VERIFY", drafts=4)
    rows = requests.tokens((4, 4))
    static = graph_batch(batch, size=3)
    static.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(4).long()])
    if in_graph:
        served.init_forward_metadata_out_graph(static, in_capture=True)
        rows = [torch.cat([x, torch.zeros(4, *x.shape[1:])]) for x in rows]
    for trees, has_keys in zip(TREES, (True, False)):
        cells = [parents_mask(parents) for parents in trees]
        if algorithm == "NGRAM":
            flat = with_keys(cells, before) if has_keys else torch.stack(cells).flatten()
            batch.spec_info.custom_mask = flat
        else:
            mask.buffer[:32] = torch.stack(cells).flatten()
            batch.spec_info.custom_mask = mask.buffer
        if in_graph:
            served.init_forward_metadata_out_graph(static)
            with Static():
                served.init_forward_metadata_in_graph(static)
        else:
            served.init_forward_metadata(batch)
        out = served.forward(*rows, requests.module, static if in_graph else batch)
        out = out.unflatten(1, (4, 16)).split(4)
        for b in range(2):
            q, k, v = (x.double() for x in requests.whole(b))
            seen = torch.cat([torch.ones(4, before[b]).bool(), cells[b]], 1)
            hidden = torch.zeros(1, 1, *seen.shape).double().masked_fill(~seen, -torch.inf)
            expected = attention_reference(q[:, -4:], k, v, scale=0.25, softcap=5.0, bias=hidden)
            torch.testing.assert_close(out[b], expected[0].float(), rtol=1e-5, atol=1e-5)
