"""Masks, block masks, score functions, a bias and dropout in the Hopper forward."""

import pytest
import torch
from helpers.tiers import every, sample

import tilewise
from tilewise import mods
from tilewise.errors import Avoidable
from tilewise.kernels import hopper
from tilewise.kernels.hopper.fwd import launch
from tilewise.mods.flatten import modifiers_of
from tilewise.ops import calls
from tilewise.problem import Extras, Mods, Scalars, describe
from tilewise.sparse import create_block_mask
from tilewise.testing import use_emulator
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import guarded, make_inputs, poisoned
from tilewise.testing.modified import modifiers
from tilewise.testing.tolerance import judge

BF16, FP16 = torch.bfloat16, torch.float16
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")],
    ),
]
on_devices = pytest.mark.parametrize("device", DEVICES)
RNG = torch.tensor([1 << 40, 3])


def randn(*shape, device="cpu", dtype=BF16, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return guarded(values.to(device, dtype))


def inputs(batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, device, dtype=BF16):
    shapes = (seqlen_q, nheads), (seqlen_k, nheads_k), (seqlen_k, nheads_k)
    return [
        randn(batch, *shape, headdim, device=device, dtype=dtype, seed=i)
        for i, shape in enumerate(shapes)
    ]


def hopper_attention(q, k, v, seed=0, **options):
    """On CPU tensors in the emulator, by `seed`."""
    with torch.no_grad(), use_emulator(seed), poisoned():
        return tilewise.attention(q, k, v, return_lse=True, backend="hopper", **options)


def check(q, k, v, seed=0, **options):
    """Against fp64, and no further from it than a plain run of the same precision."""
    found = hopper_attention(q, k, v, seed, **options)
    wide = {
        name: x.double() if isinstance(x, torch.Tensor) and name in ("bias", "sinks") else x
        for name, x in options.items()
    }
    with torch.no_grad():
        attend = tilewise.attention_reference
        oracle = attend(q.double(), k.double(), v.double(), return_lse=True, **wide)
        plain = attend(q, k, v, return_lse=True, upcast=False, **options)
    for name, *tensors in zip(("out", "lse"), found, oracle, plain):
        verdict = judge(*tensors)
        assert verdict.ok, f"{name}: {verdict}"
    return found


MODIFIED = [
    case
    for case in CASES
    if any((case.features.mask, case.features.score, case.features.bias, case.features.dropout))
]


@on_devices
@pytest.mark.parametrize("case", every(2, MODIFIED), ids=lambda case: case.name)
def test_matrix(case, device):
    """The forward of the matrix, apart from the gradients."""
    given = make_inputs(case.sizes, case.features, BF16, device, case.seed)
    asked = case.features._asdict()
    options = {name: asked[name] for name in ("causal", "window", "softcap", "scale", "layout")}
    names = "alibi_slopes", "sinks", "seqused_k", "bias"
    options |= {name: getattr(given.extras, name) for name in names}
    options |= modifiers(case.sizes, case.features, device)
    try:
        check(given.q, given.k, given.v, **options)
    except NotImplementedError as refusal:
        is_small = case.features.blocks and case.features.blocks[0] < 128
        assert is_small or case.sizes.headdim > 256, refusal
        pytest.skip(str(refusal))


def by_batch_and_head(b, h, q_idx, kv_idx):
    """Another diagonal for each, and nothing to see for the first rows of some."""
    return q_idx >= kv_idx + 150 * h - 40 * b


def documents(lengths, device):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return mods.document(ids.int().to(device))


BLOCK_CASES = {
    # name: (batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim), block
    "by-head-and-batch": ((2, 300, 260, 4, 2, 64), (128, 128)),
    "wide-blocks": ((1, 300, 520, 2, 2, 64), (128, 256)),
    "narrow-blocks": ((1, 300, 200, 1, 1, 256), (128, 64)),
    "headdim-256": ((1, 200, 300, 2, 1, 256), (128, 128)),  # two tiles of keys a block
}


@on_devices
@pytest.mark.parametrize("name", BLOCK_CASES)
def test_block_masks(name, device):
    """Ragged ends, grouped heads, rows of blocks that list nothing: out 0 and lse -inf there."""
    sizes, block = BLOCK_CASES[name]
    batch, seqlen_q, seqlen_k, nheads, *_ = sizes
    extents = batch, nheads, seqlen_q, seqlen_k
    mask = create_block_mask(by_batch_and_head, *extents, device=device, block=block)
    q, k, v = inputs(*sizes, device)
    out, lse = check(q, k, v, block_mask=mask)
    if name == "by-head-and-batch":
        assert out[0, :128, -1].eq(0).all() and lse[0, -1, :128].eq(-torch.inf).all()
        assert mask.partial.counts[0, -1, 0] == 0 == mask.full.counts[0, -1, 0]


@on_devices
def test_a_block_mask_of_nothing_and_of_everything(device):
    q, k, v = inputs(1, 200, 300, 1, 1, 64, device)
    for first in (0, 300):
        mask = create_block_mask(keys_from(first), 1, 1, 200, 300, device=device)
        check(q, k, v, block_mask=mask)


def keys_from(first):
    return lambda b, h, q_idx, kv_idx: kv_idx >= first


@on_devices
def test_documents_by_blocks(device):
    """A captured tensor, partial and full blocks of keys far from the diagonal."""
    lengths = [130, 300, 40, 170]
    q, k, v = inputs(1, 640, 640, 2, 1, 64, device)
    mask = create_block_mask(documents(lengths, device), 1, 1, 640, 640)
    assert mask.full.counts.sum() > 0 and mask.partial.counts.sum() > 0
    check(q, k, v, block_mask=mask)
    check(q, k, v, mask_mod=documents(lengths, device))


@on_devices
@pytest.mark.parametrize("used", [(300, 129), (0, 1)])
def test_a_block_mask_does_not_know_of_unused_keys(used, device):
    q, k, v = inputs(2, 150, 300, 2, 2, 64, device)
    mask = create_block_mask(mods.prefix_lm(260), 2, 2, 150, 300, device=device)
    assert mask.full.counts.sum() > 0
    for b, n in enumerate(used):
        k[b, n:], v[b, n:] = torch.nan, torch.nan
    seqused_k = torch.tensor(used, dtype=torch.int32, device=device)
    check(q, k, v, block_mask=mask, seqused_k=seqused_k)


SEEDS = sample(range(10), 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_of_events(seed):
    """No deadlock and no wrong phase where some tiles visit nothing and others all blocks."""
    q, k, v = inputs(2, 300, 260, 4, 2, 64, "cpu")
    mask = create_block_mask(by_batch_and_head, 2, 4, 300, 260)
    check(q, k, v, seed, block_mask=mask)


BIASES = {
    "all": (2, 4, 150, 200),
    "batch": (2, 1, 1, 200),
    "heads": (1, 4, 1, 1),
    "queries": (1, 1, 150, 1),
    "keys": (1, 1, 1, 200),
    "shared": (1, 1, 150, 200),
    "odd": (1, 4, 150, 201),  # rows that pairs do not fit
}


@on_devices
@pytest.mark.parametrize("dtype", sample([BF16, torch.float32], BF16), ids=["16-bit", "fp32"])
@pytest.mark.parametrize("name", BIASES)
def test_bias(name, dtype, device):
    shape = BIASES[name]
    q, k, v = inputs(2, 150, 201 if name == "odd" else 200, 4, 2, 64, device)
    check(q, k, v, bias=randn(*shape, device=device, dtype=dtype))


@on_devices
@pytest.mark.parametrize(
    "memory", every(2, ["transposed", "sliced", "every-other", "reversed-dims"])
)
def test_bias_in_any_memory(memory, device):
    q, k, v = inputs(2, 150, 200, 2, 2, 128, device)
    bias = {
        "transposed": lambda: randn(2, 2, 200, 150, device=device).transpose(2, 3),
        "sliced": lambda: randn(2, 2, 151, 203, device=device)[:, :, 1:, 3:],
        "every-other": lambda: randn(2, 2, 150, 400, device=device)[..., ::2],
        "reversed-dims": lambda: randn(150, 200, 2, 2, device=device).permute(2, 3, 0, 1),
    }[memory]()
    check(q, k, v, bias=bias, causal=True)


@pytest.mark.emulator
@pytest.mark.parametrize("seed", sample(range(4), 0))
def test_a_copied_bias_in_any_order_of_events(seed):
    """No bias is read before it has landed or after its buffer was reused."""
    q, k, v = inputs(2, 300, 264, 2, 1, 64, "cpu")
    check(q, k, v, seed, bias=randn(1, 2, 300, 264), causal=seed % 2 == 0)


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_which_biases_are_copied(headdim):
    """Those whose tiles TMA can read, where shared memory has room for them."""
    q = torch.empty(2, 300, 4, headdim, dtype=BF16)
    bias = torch.empty(2, 4, 300, 264, dtype=BF16)

    def is_copied(bias):
        extras = Extras(bias=bias)
        problem = describe(q, q, q, extras, Scalars(1.0), "bottom_right", False)
        plan = launch.plan_for(problem, q, extras)
        assert plan.tile.BIAS_COPIED == (launch.in_pairs(extras, plan).bias.dtype != torch.int32)
        return plan.tile.BIAS_COPIED

    fits = headdim < 256
    assert is_copied(bias) == is_copied(bias[:1]) == is_copied(bias[..., :200]) == fits
    assert headdim == 256 or not is_copied(torch.empty(2, 4, 300, 260, dtype=BF16)[..., 4:])


def test_steps_of_a_bias():
    """What the kernel is told of its memory."""
    bias = torch.empty(2, 4, 10, 64, dtype=BF16)
    assert launch.bias_step(None) == 0 == launch.bias_step(bias[..., :1])
    assert launch.bias_step(bias) == 2
    assert launch.bias_step(bias[..., :63]) == 1  # the last pair would be half past the end
    assert launch.bias_step(bias[..., 1:63]) == 1  # at 2 bytes
    assert launch.bias_step(torch.empty(1, 1, 4, 63)) == 1
    assert launch.bias_step(torch.empty(1, 1, 1, 64)) == 2
    assert launch.bias_step(bias[..., ::2]) == -1


@on_devices
@pytest.mark.parametrize("headdim", [64, 256])
def test_what_hides_keys_without_a_mask(headdim, device):
    """-inf of a bias and of a score function, in whole rows too."""
    q, k, v = inputs(1, 150, 300, 2, 1, headdim, device)
    bias = randn(1, 2, 150, 300, device=device)
    bias[:, :, :70, :140] = -torch.inf
    bias[:, 1, 90:] = -torch.inf
    out, lse = check(q, k, v, bias=bias)
    assert out[:, 90:, 1].eq(0).all() and lse[:, 1, 90:].eq(-torch.inf).all()
    hide = lambda score, b, h, q_idx, kv_idx: torch.where(kv_idx > 140, score, -float("inf"))  # noqa: E731
    check(q, k, v, score_mod=hide, bias=bias)


def kept_of(q, k, dropout_p, device):
    """Which pairs dropout keeps."""
    nheads, seqlen_k = q.shape[2], k.shape[1]
    rng = RNG.to(device)
    threshold = tilewise.tile.dropout_numbers.threshold_of(dropout_p)
    heads = torch.arange(nheads, device=device)
    batch = torch.arange(q.shape[0], device=device)[:, None]
    return tilewise.tile.random_bytes.keep_tile(
        rng, batch, heads, 0, 0, q.shape[1], seqlen_k, threshold
    )


@on_devices
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_bit_for_bit(causal, device):
    """P of equal scores is 1 / n; with V the identity, O says of each pair whether it was kept."""
    batch, seqlen, nheads, headdim = 2, 200, 2, 256
    q = torch.zeros(batch, seqlen, nheads, headdim, device=device, dtype=FP16)
    v = torch.zeros_like(q)
    v[:, torch.arange(seqlen), :, torch.arange(seqlen)] = 1
    out, lse = hopper_attention(q, q, v, causal=causal, dropout_p=0.3, dropout_rng=RNG.to(device))
    seen = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device)
    seen = seen.tril() if causal else seen
    found = out[..., :seqlen].transpose(1, 2) != 0
    assert torch.equal(found, kept_of(q, q, 0.3, device) & seen)
    assert torch.allclose(lse, seen.sum(1).float().log().expand_as(lse))


@on_devices
@pytest.mark.parametrize("headdim", sample([64, 128], 128))
def test_everything_by_blocks(headdim, device):
    """A block mask, a score function, a bias, dropout, sinks and a softcap in one call."""
    sizes = 2, 300, 260, 4, 2
    q, k, v = inputs(*sizes, headdim, device)
    mask = create_block_mask(by_batch_and_head, 2, 4, 300, 260, device=device)
    table = torch.randn(4, 600, generator=torch.Generator().manual_seed(1)).to(device)
    check(
        q,
        k,
        v,
        block_mask=mask,
        score_mod=lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + 300],
        bias=randn(2, 1, 300, 260, device=device),
        dropout_p=0.2,
        dropout_rng=RNG.to(device),
        sinks=randn(4, device=device),
        softcap=20.0,
    )


PACKED = {
    "mask": dict(mask_mod=lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + b + h) % 3 != 0),
    "score": dict(score_mod=lambda s, b, h, q_idx, kv_idx: s + 0.1 * (b + 1) * (q_idx - kv_idx)),
    "dropout": dict(dropout_p=0.4),
}
PACKED["all"] = {name: x for options in PACKED.values() for name, x in options.items()}


@on_devices
@pytest.mark.parametrize("causal", sample([False, True], True))
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name, causal, device):
    """Positions, and the number of the sequence, are those within it."""
    lengths_q, lengths_k = (70, 0, 150, 9), (130, 20, 150, 0)
    options = dict(PACKED[name], causal=causal)
    if "dropout_p" in options:
        options["dropout_rng"] = RNG.to(device)
    for of, lengths in (("q", lengths_q), ("k", lengths_k)):
        starts = torch.tensor([0, *lengths]).cumsum(0)
        options[f"cu_seqlens_{of}"] = starts.int().to(device)
    q = randn(sum(lengths_q), 4, 64, device=device)
    k, v = (randn(sum(lengths_k), 2, 64, device=device, seed=i) for i in (1, 2))
    check(q, k, v, **options)


@on_devices
def test_unused_keys(device):
    q, k, v = inputs(2, 100, 200, 2, 2, 64, device)
    seqused_k = torch.tensor([150, 0], dtype=torch.int32, device=device)
    options = {name: x for name, x in PACKED["all"].items() if name != "dropout_p"}
    check(q, k, v, **options, seqused_k=seqused_k, bias=randn(2, 2, 100, 200, device=device))


def test_no_keys():
    q, k = randn(1, 5, 2, 64), randn(1, 0, 2, 64)
    out, lse = hopper_attention(q, k, k, bias=torch.zeros(1, 1, 5, 1), dropout_p=0.5)
    assert out.eq(0).all() and lse.eq(-torch.inf).all()


@pytest.mark.parametrize(
    "block, is_served",
    [
        ((128, 128), True),
        ((128, 384), True),
        ((256, 128), False),
        ((64, 128), False),
        ((128, 64), False),
    ],
)
def test_blocks_that_hold_a_tile(block, is_served):
    q = torch.empty(1, 256, 2, 64, dtype=BF16)
    names = Mods(mask=mods.causal().key, block=block)
    problem = describe(q, q, q, Extras(), Scalars(1.0), "bottom_right", False, names)
    with use_emulator():
        reason = hopper.supports(problem, torch.device("cpu"))
    if is_served:
        assert reason is None
        tile = launch.plan_for(problem, q).tile
        assert block[0] % tile.BLOCK_M == 0 and block[1] % tile.BLOCK_N == 0
    else:
        assert isinstance(reason, Avoidable) and "(128, 128)" in reason


def test_launches_are_kept_apart_by_what_modifies_scores():
    """Dtypes, alignment and strides of what is captured and of a bias."""
    q = torch.empty(1, 64, 2, 64, dtype=BF16)
    floats = torch.zeros(65)
    keys = set()
    for table in (floats[:64], floats[1:], floats[:64].half(), torch.zeros(64, 2)[:, 0]):
        for bias in (None, torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 64, 64).bfloat16()):
            score = lambda s, b, h, q_idx, kv_idx, table=table: s + table[q_idx]  # noqa: E731
            given = modifiers_of(None, score, None, (1, 2, 64, 64))
            extras = Extras(bias=bias, captured=given.captured)
            keys.add((given.mods, *calls.signature((q, q, q, *extras.tensors))))
    assert len(keys) == 12
