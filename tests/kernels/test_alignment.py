"""Tensors at any address, with any strides: a call is served rightly, or a backend is not chosen.
On a GPU it would end in a fault that takes the whole process with it; the emulator raises where an
address is not the multiple that the kernel promised its compiler.
"""

import itertools
import random

import pytest
import torch
from fuzz.places import UNITS, lying
from helpers.alignment import drawn, unit_of
from helpers.caches import paged, sequences
from helpers.eight_bits import quantised
from helpers.tiers import sample_rows

import tilewise
from tilewise import cache
from tilewise.errors import ArgumentError
from tilewise.kernels.common.alignment import TMA, VECTORS, Access, fits
from tilewise.testing import use_emulator, use_interpreter

HALF = torch.float16


@pytest.mark.parametrize("seed", range(4))
def test_what_fits(seed):
    """As counting the bytes of each row says."""
    rng = random.Random(seed)
    for _ in range(50):
        x = drawn(rng, torch.zeros(2, 3, 2, 5, dtype=rng.choice((HALF, torch.float32))))
        for unit in UNITS[x.itemsize // 2 :]:
            assert fits(x, Access(unit)) == (unit_of(x) % unit == 0)
    x = torch.zeros(2, 1, 8).half()
    assert fits(x.as_strided((2, 1, 8), (8, 3, 1)), TMA)  # nothing steps along one row
    assert fits(x[:1].expand(2, 1, 8), VECTORS) and not fits(x[:1].expand(2, 1, 8), TMA)


def of_a_cache(page_size, eight_bits=False, headdim=64):
    """A small call of two sequences."""
    if eight_bits:
        x = quantised([1, 3], [70, 30], torch.int8, "row", headdims=(headdim, headdim))
        arguments = dict(q=torch.cat(x.s.q), **x.cache(page_size))
    else:
        s = sequences([1, 3], [70, 30], (4, 2), (headdim, headdim), HALF)
        k, v, table = paged(s, page_size)
        arguments = dict(q=torch.cat(s.q), k=k, v=v, page_table=table)
        arguments |= dict(seqused_k=s.lengths, cu_seqlens_q=s.starts)
    arguments |= dict(alibi_slopes=torch.rand(4), sinks=torch.randn(4).to(arguments["q"].dtype))
    return arguments | dict(out=torch.zeros_like(arguments["q"]))


def attend(backend, given):
    with use_interpreter(), use_emulator():
        return tilewise.attention(
            **given, causal=True, split_size=128, backend=backend, return_lse=True
        )


def check_cache(backend, given, rng, name=None):
    """All tensors, or one, lie anywhere: the same bits, or a refusal where the table has one."""
    expected = [x.clone() for x in attend(backend, given)]
    moved = {n: drawn(rng, x) if name in (None, n) else x for n, x in given.items()}
    is_served = backend != "hopper" or all(unit_of(moved[n]) == 16 for n in "qkv")
    if not is_served:
        with pytest.raises(NotImplementedError, match="must begin at a multiple of 16 bytes"):
            attend(backend, moved)
        attend(None, moved)
        return False
    for mine, theirs in zip(attend(backend, moved), expected, strict=True):
        assert torch.equal(mine, theirs)
    return True


CACHES = list(itertools.product(("hopper", "portable"), (False, True), (16, 3)))


@pytest.mark.parametrize(
    ("backend", "eight_bits", "page_size"),
    sample_rows(CACHES, ("hopper", False, 16), ("portable", True, 3)),
)
def test_a_cache(backend, eight_bits, page_size):
    """What TMA copies, and what threads do."""
    arguments, rng = of_a_cache(page_size, eight_bits), random.Random(page_size)
    other_names = [n for n in arguments if n not in "qkv"]
    assert check_cache(backend, arguments, rng, rng.choice(other_names))
    check_cache(backend, arguments, rng)


@pytest.mark.slow
@pytest.mark.parametrize("name", of_a_cache(16))
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_each_tensor_of_a_cache(backend, name):
    for seed, headdim in enumerate((64, 128)):
        check_cache(backend, of_a_cache(16, headdim=headdim), random.Random(seed), name)


@pytest.mark.parametrize("unit", UNITS[:-1])
def test_the_reported_crash(unit):
    """q is part of rows that are an element wider, over pages that are as they should be."""
    arguments = of_a_cache(16)
    arguments["q"] = lying(arguments["q"], unit, (unit, unit))
    with pytest.raises(NotImplementedError, match="hopper: q must begin at a multiple of 16"):
        attend("hopper", arguments)
    assert attend(None, arguments)[0] is arguments["out"]


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_an_append(seed, eight_bits):
    rng = random.Random(seed)
    dtype = torch.int8 if eight_bits else HALF
    arguments = {n: torch.zeros(4, 8, 2, 32, dtype=dtype) for n in ("k_cache", "v_cache")}
    arguments |= {n: torch.randn(2, 3, 2, 32).half() for n in "kv"}
    arguments |= dict(seqused_k=torch.tensor([5, 14], dtype=torch.int32))
    arguments |= dict(page_table=torch.tensor([[2, 0], [1, 3]], dtype=torch.int32))
    if eight_bits:
        arguments |= {n: torch.ones(4, 8, 2) for n in ("k_descale", "v_descale")}
    tables = torch.randn(2, 16, 8).unbind(0)

    def appended(place):
        tensors = {n: place(x) for n, x in arguments.items()}
        rotary = cache.Rotary(*map(place, tables), False)
        with use_interpreter():
            cache.append(**tensors, rotary=rotary)
        return [x for n, x in tensors.items() if n.endswith(("cache", "descale"))]

    expected = appended(torch.clone)
    for mine, theirs in zip(appended(lambda x: drawn(rng, x)), expected, strict=True):
        assert torch.equal(mine, theirs)


def of_training(backend, headdim):
    dtype = torch.float32 if backend == "portable" else HALF
    arguments = {n: torch.randn(2, 20, 2, headdim).to(dtype) for n in ("q", "k", "v", "dout")}
    arguments |= dict(bias=torch.randn(1, 2, 20, 20).to(dtype), sinks=torch.randn(2).to(dtype))
    return arguments | dict(alibi_slopes=torch.rand(2, 2), dlse=torch.randn(2, 2, 20))


def trained(backend, given):
    leaves = {n: x.detach().requires_grad_() for n, x in given.items() if n not in NO_GRADIENT}
    slopes = given["alibi_slopes"]
    with use_interpreter(), use_emulator():
        options = dict(backend=backend, causal=True, return_lse=True)
        outputs = tilewise.attention(**leaves, alibi_slopes=slopes, **options)
        into = [given["dout"], given["dlse"]]
        return *outputs, *torch.autograd.grad(outputs, list(leaves.values()), into)


NO_GRADIENT = ("dout", "dlse", "alibi_slopes")
TRAINED = [("hopper", 64, 1), ("hopper", 100, 1), ("portable", 40, 3)]


@pytest.mark.parametrize(("backend", "headdim", "seeds"), sample_rows(TRAINED, TRAINED[0]))
def test_training(backend, headdim, seeds):
    """Rows of Hopper's that TMA cannot read are copied where headdim is no multiple of 8."""
    arguments = of_training(backend, headdim)
    expected = trained(backend, arguments)
    for seed in range(seeds):
        rng = random.Random(seed)
        least = 16 if (backend, headdim) == ("hopper", 64) else 2
        moved = {n: drawn(rng, x) for n, x in arguments.items()}
        if least == 16:
            moved |= {n: lying(arguments[n], 16, (16, 16, 16)) for n in "qkv"}
        for mine, theirs in zip(trained(backend, moved), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", "qkv")
def test_training_is_refused_where_tma_reads(name):
    arguments = of_training("hopper", 64)
    arguments[name] = lying(arguments[name], 16, (16, 16, 8))
    with pytest.raises(NotImplementedError, match="multiples of 16 bytes"):
        trained("hopper", arguments)


@pytest.mark.filterwarnings("ignore::tilewise.errors.PerformanceWarning")
@pytest.mark.parametrize("name", ["q", "k", "v_t"])
def test_eight_bits_that_are_dense_and_begin_anywhere(name):
    """`contiguous()` would copy nothing of them."""
    x = tilewise.quantize(*torch.randn(3, 1, 128, 2, 64).unbind(0))
    field = getattr(x, name)
    moved = torch.empty(field.numel() + 8, dtype=field.dtype)[8:].view(field.shape).copy_(field)
    with use_emulator():
        expected = tilewise.attention(x, backend="hopper")
        outputs = tilewise.attention(x._replace(**{name: moved}), backend="hopper")
    assert moved.is_contiguous() and torch.equal(outputs, expected)


def at_an_odd_byte(x):
    """x over memory that is not its own, as other libraries may hand it over."""
    storage = torch.zeros(x.numel() * x.itemsize + 1, dtype=torch.uint8).untyped_storage()[1:]
    return torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape, x.stride()).copy_(x)


@pytest.mark.parametrize("name", ["q", "page_table", "sinks", "out"])
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_elements_at_odd_bytes_are_refused(backend, name):
    arguments = of_a_cache(16)
    arguments[name] = at_an_odd_byte(arguments[name])
    with pytest.raises(ArgumentError, match=f"^{name} begins at address"):
        attend(backend, arguments)


def test_elements_at_odd_bytes_are_refused_elsewhere():
    odd = at_an_odd_byte(x := torch.randn(1, 16, 1, 16))
    used = torch.tensor([16], dtype=torch.int32)
    with use_interpreter():
        with pytest.raises(ArgumentError, match="^k begins at address"):
            tilewise.attention(x, odd, x, backend="portable")
        with pytest.raises(ArgumentError, match="^v begins at address"):
            cache.append(
                torch.zeros(1, 32, 1, 16), torch.zeros(1, 32, 1, 16), x, odd, seqused_k=used
            )
        leaf = x.clone().requires_grad_()
        out = tilewise.attention(leaf, x, x, backend="portable")
        with pytest.raises(ArgumentError, match="^dout begins at address"):
            out.backward(odd)
    torch.testing.assert_close(tilewise.attention(odd, x, x), tilewise.attention(x, x, x))
