"""The same call with other tensors: later ones go past Triton's launcher, and the answer is theirs.

On CPU tensors the emulator runs, and there is no launcher: only the answers are looked at.
"""

import pytest
import torch
from helpers.tiers import sample

import tilewise
from tilewise.kernels.hopper import launch
from tilewise.ops import calls
from tilewise.sparse import create_block_mask
from tilewise.testing import use_emulator
from tilewise.testing.tolerance import judge

BF16 = torch.bfloat16
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_hopper])]
on_devices = pytest.mark.parametrize("device", DEVICES)
SEQLEN, NHEADS = 200, 4


@pytest.fixture
def quick(monkeypatch):
    """Relaunches, with an empty cache of calls."""
    launches, relaunch_of = [], launch.Launch.relaunch_of
    calls._entry.cache_clear()

    def noted(self, *args):
        again = relaunch_of(self, *args)
        return again and (lambda *row: launches.append(self) or again(*row))

    monkeypatch.setattr(launch.Launch, "relaunch_of", noted)
    return launches


def bias(device, by=0, dtype=torch.float32):
    """A bias that begins `by` elements past an aligned address."""
    shape = 2, NHEADS, SEQLEN, SEQLEN
    n = 2 * NHEADS * SEQLEN * SEQLEN
    return dict(bias=torch.randn(n + by, device=device).to(dtype)[by:].view(shape))


def block_mask(device):
    documents = torch.arange(SEQLEN, device=device) // 70
    table = torch.randn(SEQLEN, device=device)
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: documents[q_idx] == documents[kv_idx],
        *(2, NHEADS, SEQLEN, SEQLEN),
        device=device,
    )
    return dict(block_mask=mask, score_mod=lambda score, b, h, q_idx, kv_idx: score + table[kv_idx])


CALLS = {
    "sinks": lambda device: dict(sinks=torch.randn(NHEADS, device=device), causal=True),
    "slopes": lambda device: dict(alibi_slopes=torch.rand(NHEADS, device=device)),
    "slopes of batches": lambda device: dict(alibi_slopes=torch.rand(2, NHEADS, device=device)),
    "bias": bias,
    "moved bias": lambda device: bias(device, 1),
    "half a pair": lambda device: bias(device, 1, BF16),
    "turned bias": lambda device: dict(bias=bias(device)["bias"].transpose(2, 3)),
    "dropout": lambda device: dict(
        dropout_p=0.3, dropout_rng=torch.randint(1 << 40, (2,), device=device)
    ),
    "block mask": block_mask,
}


def tensors(device, packed=False):
    shape = (SEQLEN,) if packed else (2, SEQLEN)
    q, k, v = (torch.randn(*shape, n, 64, device=device) for n in (NHEADS, 2, 2))
    return [x.to(BF16) for x in (q, k, v)]


def attend(q, k, v, **options):
    with use_emulator():
        return tilewise.attention(q, k, v, return_lse=True, backend="hopper", **options)


def check(found, q, k, v, **options):
    """Against fp64, and no further from it than a plain run of the same precision."""
    reference = tilewise.attention_reference
    wide = {n: x.double() if n in ("bias", "sinks") else x for n, x in options.items()}
    oracle = reference(q.double(), k.double(), v.double(), return_lse=True, **wide)
    plain = reference(q, k, v, return_lse=True, upcast=False, **options)
    for name, *results in zip(("out", "lse"), found, oracle, plain):
        verdict = judge(*results)
        assert verdict.ok, f"{name}: {verdict}"


FAST = ("sinks", "half a pair", "dropout", "block mask")


@on_devices
@pytest.mark.parametrize("name", sample(CALLS, "sinks", "dropout"))
def test_forward(name, device, quick):
    for repeat in range(2 if device == "cpu" else 3):  # a CPU has no launcher to go past
        q, k, v = tensors(device)
        options = CALLS[name](device)
        check(attend(q, k, v, **options), q, k, v, **options)
        assert device == "cpu" or len(quick) == repeat


@on_devices
def test_biases_of_one_shape_alternate(device, quick):
    """Strides and alignment distinguish them, and none is read as another."""
    looks = ("bias", "moved bias", "turned bias", "bias", "moved bias", "turned bias")
    for name in looks:
        q, k, v = tensors(device)
        options = CALLS[name](device)
        check(attend(q, k, v, **options), q, k, v, **options)
    assert device == "cpu" or len(quick) == 3


@on_devices
def test_packed(device, quick):
    """Other lengths of one total, first as one tensor for queries and keys."""
    for repeat, ends in enumerate(((50, 120), (1, 199), (100, 101))):
        q, k, v = tensors(device, packed=True)
        starts = torch.tensor([0, *ends, SEQLEN], device=device, dtype=torch.int32)
        others = starts if repeat == 0 else starts.clone()
        options = dict(cu_seqlens_q=starts, cu_seqlens_k=others, causal=True)
        out, lse = attend(q, k, v, **options)
        for first, stop in zip((0, *ends), (*ends, SEQLEN)):
            rows = [x[None, first:stop] for x in (q, k, v)]
            check((out[None, first:stop], lse[None, :, first:stop]), *rows, causal=True)
        assert device == "cpu" or len(quick) == repeat


def gradients(attend, inputs, dout, **options):
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
    q, k, v, *_ = leaves.values()
    rest = {n: x for n, x in leaves.items() if n not in "qkv"}
    out, lse = attend(q, k, v, **rest, **options)
    incoming = dout.to(out.dtype), torch.full_like(lse, 0.1)
    with use_emulator():
        return torch.autograd.grad([out, lse], [*leaves.values()], incoming)


def plain_attend(*tensors, **options):
    return tilewise.attention_reference(*tensors, return_lse=True, upcast=False, **options)


def exact_attend(*tensors, **options):
    return tilewise.attention_reference(*tensors, return_lse=True, **options)


@on_devices
@pytest.mark.parametrize("name", sample(CALLS, "half a pair", "block mask"))
def test_backward(name, device, quick):
    launches = []
    for _ in range(1 if device == "cpu" else 3):
        inputs = dict(zip("qkv", tensors(device)))
        options = CALLS[name](device)
        for given in ("sinks", "bias"):
            if given in options:
                inputs[given] = options.pop(given)
        dout = torch.randn(inputs["q"].shape, device=device).to(BF16)
        found = gradients(attend, inputs, dout, **options)
        launches.append(len(quick))
        wide = {n: x.double() for n, x in inputs.items()}
        oracle = gradients(exact_attend, wide, dout, **options)
        plain = gradients(plain_attend, inputs, dout, **options)
        for which, *results in zip(inputs, found, oracle, plain):
            verdict = judge(*results)
            assert verdict.ok, f"d{which}: {verdict}"
    assert device == "cpu" or launches == [0, 2, 4]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", ["sinks", "bias", "dropout", "block mask"])
def test_graph(name, quick):
    """A captured launch goes the quick way, too, and reads what is in its tensors at replay."""
    q, k, v = tensors("cuda")
    options = CALLS[name]("cuda")
    attend(q, k, v, **options)
    before = len(quick)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(q, k, v, **options)
    assert len(quick) == before + 1
    for _ in range(3):
        for old, new in zip((q, k, v), tensors("cuda")):
            old.copy_(new)
        for given, x in CALLS[name]("cuda").items():
            if isinstance(x, torch.Tensor):
                options[given].copy_(x)
        graph.replay()
        eager = attend(q, k, v, **options)
        assert all(torch.equal(a, b) for a, b in zip(captured, eager))
        check(captured, q, k, v, **options)


@pytest.mark.gpu
@needs_hopper
def test_compiled(quick):
    """A compiled model's calls are prepared once, too: the second, as torch looks at what operators
    do in the first one, by a dispatch mode.
    """
    compiled = torch.compile(attend_plainly)
    for repeat in range(4):
        q, k, v = tensors("cuda")
        sinks = torch.randn(NHEADS, device="cuda")
        check(compiled(q, k, v, sinks), q, k, v, sinks=sinks, causal=True)
        assert len(quick) == max(repeat - 1, 0)


def attend_plainly(q, k, v, sinks):
    return tilewise.attention(q, k, v, sinks=sinks, causal=True, return_lse=True, backend="hopper")
