"""The two calls that serving engines make, on plain pages: a prompt in chunks, then single tokens,
in steps that mix both, against attention over whole sequences.
"""

import pytest
import torch

from tilewise import attention_reference
from tilewise.integrations.engines import Layer, Step

INT32 = torch.int32
PAGE, NHEADS, NHEADS_K, HEADDIM = 16, 4, 2, 16
# The tokens of three sequences in each step: chunks, single tokens, and nothing
STEPS = [(5, 40, 0), (1, 30, 17), (1, 1, 1), (4, 1, 1)]
SLOPES, SINKS = torch.tensor([0.3, 0.1, 0.7, 0.2]), torch.tensor([0.3, 2.0, -1.0, 0.0])
LAYERS = {
    "plain": Layer(),
    "window": Layer(window=(23, 0), scale=0.3),
    "softcap": Layer(softcap=2.0),
    "slopes": Layer(alibi_slopes=SLOPES),
    "sinks": Layer(sinks=SINKS, window=(7, 0)),
}


class Pages:
    """A pool with rows of K and V side by side, as in engines, and the pages of each sequence."""

    def __init__(self, dtype=torch.float32):
        rows = torch.zeros(12, PAGE, NHEADS_K, 2 * HEADDIM).to(dtype)
        self.k, self.v = rows[..., :HEADDIM], rows[..., HEADDIM:]
        self.table = torch.tensor([[7, 2, -1, -1, -1], [0, 9, 4, 1, 11], [3, 6, -1, -1, -1]])
        self.lengths = [0, 0, 0]

    def step(self, counts, padding=0):
        """The step in which each sequence gets so many tokens, and their slots."""
        slots = []
        for b, n in enumerate(counts):
            positions = torch.arange(self.lengths[b], self.lengths[b] + n)
            slots.append(self.table[b, positions // PAGE] * PAGE + positions % PAGE)
            self.lengths[b] += n
        starts = torch.tensor([0, *counts]).cumsum(0, dtype=INT32)
        used = torch.tensor(self.lengths, dtype=INT32)
        slots = torch.cat([*slots, torch.full((padding,), -1)])
        return Step(starts, seqused_k=used, page_table=self.table.to(INT32)), slots


def draw():
    """q, k and v of each sequence."""
    generator = torch.Generator().manual_seed(0)
    lengths = [sum(counts) for counts in zip(*STEPS)]
    return [
        [torch.randn(n, nheads, HEADDIM, generator=generator) for n in lengths]
        for nheads in (NHEADS, NHEADS_K, NHEADS_K)
    ]


def served(layer, pages, q, k, v):
    """Outputs of each sequence, of all its tokens."""
    done, found = [0, 0, 0], [[], [], []]
    for counts in STEPS:
        step, slots = pages.step(counts)
        of_step = [
            torch.cat([x[b][done[b] : done[b] + n] for b, n in enumerate(counts)])
            for x in (q, k, v)
        ]
        layer.append(of_step[1], of_step[2], k_cache=pages.k, v_cache=pages.v, slots=slots)
        out = torch.full_like(of_step[0], torch.nan)
        layer.attend(of_step[0], step, k_cache=pages.k, v_cache=pages.v, out=out)
        for b, rows in enumerate(out.split(counts)):
            found[b].append(rows)
            done[b] += counts[b]
    return [torch.cat(rows) for rows in found]


@pytest.mark.parametrize("name", LAYERS)
def test_steps_give_what_whole_sequences_give(name):
    layer, (q, k, v) = LAYERS[name], draw()
    for b, out in enumerate(served(layer, Pages(), q, k, v)):
        whole = [x[b].unsqueeze(0).double() for x in (q, k, v)]
        torch.testing.assert_close(
            out, attention_reference(*whole, **layer.scores)[0].float(), rtol=1e-5, atol=1e-5
        )


def test_a_cache_of_8_bits_holds_what_its_scales_say():
    scales = torch.tensor(0.02), torch.tensor(0.05)
    layer, (q, k, v) = Layer(k_descale=scales[0], v_descale=scales[1]), draw()
    k, v = [[x / 2 for x in xs] for xs in (k, v)]
    stored = [
        [(x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale for x in xs]
        for xs, scale in zip((k, v), scales)
    ]
    found = served(layer, Pages(torch.float8_e4m3fn), q, k, v)
    for expected, out in zip(served(Layer(), Pages(), q, *stored), found):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_rows_that_pad_a_graph_are_left_alone():
    """A request of no tokens with length 0 and no pages, and tokens behind the last request."""
    (q, k, v), pages = draw(), Pages()
    step, slots = pages.step((5, 0, 0), padding=3)
    rows = [torch.cat([x[0][:5], x[1][:3]]) for x in (q, k, v)]
    Layer().append(rows[1], rows[2], k_cache=pages.k, v_cache=pages.v, slots=slots)
    assert pages.k.count_nonzero() == 5 * NHEADS_K * HEADDIM
    out = torch.full_like(rows[0], 7.0)
    found = Layer().attend(
        rows[0], step, k_cache=pages.k, v_cache=pages.v, out=out, return_lse=True
    )
    assert found[0] is out and found[1].shape == (NHEADS, 8)
    assert (out[5:] == 7).all() and out[:5].isfinite().all() and (out[:5] != 7).all()
