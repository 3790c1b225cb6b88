"""The tour's matrix product: every kind against fp64, ragged sizes, and what it refuses."""

import pytest
import torch
import triton
import triton.language as tl
from helpers.tiers import every

from benchmarks import products
from benchmarks.matmul import CHOICE, CONFIGS, FULL_PRECISION, matmul, programs
from benchmarks.matmul_kernel import grouped_tile
from benchmarks.products import KINDS, Product
from tilewise.errors import ArgumentError
from tilewise.testing import interpret, tolerance


@triton.jit
def order_kernel(seen, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    tile = tl.program_id(0)
    m_block, n_block = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
    tl.store(seen + 2 * tile, m_block)
    tl.store(seen + 2 * tile + 1, n_block)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(200, 136, 80), (64, 64, 32), (16, 512, 16)])
@pytest.mark.parametrize("config", [None, "wide"])
def test_it_is_right_at_any_size(kind, m, n, k, config):
    product = Product(m, n, k, kind)
    a, b = products.operands(product, "cpu")
    exact = a.double() @ b.double()
    plain = products.plain_product(kind, a, b)
    got = products.our_product(KINDS[kind], config)(a, b)
    tolerance.assert_within(got, exact, plain)


@pytest.mark.parametrize("config", every(3, CONFIGS))
def test_every_configuration_takes_several_tiles_a_program(config):
    a, b = products.operands(Product(300, 520, 96, "fp32"), "cpu")
    assert programs(a, 520, CONFIGS[config]) > 1
    torch.testing.assert_close(matmul(a, b, config), a @ b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("by_column", [False, True])
def test_b_may_lie_either_way(by_column):
    a, b = torch.randn(48, 32), torch.randn(32, 80)
    b = b.T.contiguous().T if by_column else b
    torch.testing.assert_close(matmul(a, b), a @ b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_groups_visit_every_tile_once(group):
    tiles_m, tiles_n = 7, 5
    seen = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32)
    interpret(order_kernel)[(len(seen),)](seen, tiles_m, tiles_n, GROUP_M=group)
    seen = [tuple(place) for place in seen.tolist()]
    assert sorted(seen) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]
    if group == 3:
        assert seen[:4] == [(0, 0), (1, 0), (2, 0), (0, 1)]
        assert seen[-5:] == [(6, n) for n in range(5)]  # the last group is one row high


def test_what_is_chosen_exists():
    assert {*CHOICE.values(), FULL_PRECISION, "small"} <= CONFIGS.keys()


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((8, 16), (8, 16), "times"),
        ((16, 18), (18, 16), "18 elements"),
        ((16, 16), "half", "must be the same"),
        ((16, 16), "strided", "contiguous"),
        ("fp8", "fp8", "transposed"),
    ],
)
def test_what_it_cannot_read_is_refused(a, b, message):
    tensors = {
        "half": torch.ones(16, 16, dtype=torch.float16),
        "strided": torch.ones(32, 32)[::2, ::2],
        "fp8": torch.ones(16, 16).to(torch.float8_e4m3fn),
    }
    a, b = (tensors[x] if isinstance(x, str) else torch.ones(x) for x in (a, b))
    with pytest.raises(ArgumentError, match=message):
        matmul(a, b)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ArgumentError, match="tf32 or ieee"):
        matmul(torch.ones(16, 16), torch.ones(16, 16), precision="exact")


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_a_lost_block_of_k_has_no_row(kind, monkeypatch):
    def loses(of, config):
        return lambda a, b: a[:, :-16].contiguous() @ b[:-16]

    monkeypatch.setattr(products, "our_product", loses)
    (ours, torchs) = products.run_products(
        [Product(64, 64, 256, kind)], rounds=1, round_ms=1, show=lambda line: None
    )
    assert ours.row is None and ours.wrong.startswith("C: max ")
    assert torchs.row.provider == "torch" and torchs.row.tflops > 0


def test_a_product_that_raises_is_left_out(monkeypatch):
    def raises(of, config):
        def multiply(a, b):
            raise RuntimeError("no memory")

        return multiply

    monkeypatch.setattr(products, "our_product", raises)
    ours, torchs = products.run_products(
        [Product(32, 32, 32, "bf16")], rounds=1, round_ms=1, show=lambda line: None
    )
    assert ours.refused == "RuntimeError: no memory" and torchs.row is not None


def test_torchs_setting_is_left_as_it_was():
    before = torch.get_float32_matmul_precision()
    products.torch_product(KINDS["tf32"])(torch.ones(4, 4), torch.ones(4, 4))
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(1040, 528, 272), (4096, 4096, 512)])
def test_it_is_right_on_a_gpu(kind, m, n, k):
    configs = ("wide", "wide3", "tall", "once", "pair") if kind in ("bf16", "fp16") else ()
    done = products.run_products(
        [Product(m, n, k, kind)], (None, *configs), device="cuda", rounds=1, round_ms=1, show=print
    )
    assert all(outcome.row is not None for outcome in done), done
