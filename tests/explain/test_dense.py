"""What `explain` finds: the backend, the tile, how much work, with no GPU."""

import pytest
import torch

from benchmarks.bench.shapes import packed, square
from tilewise import dispatch
from tilewise.explain import dense as explain_module
from tilewise.explain.call import call_of
from tilewise.explain.cards import CARDS, Roof, card_for, cpu_roof, occupancy
from tilewise.explain.dense import answers_of_call, explain, way_of_cpu
from tilewise.explain.shapes import Shape

H200 = CARDS["h200"]


def explained(shape, target="sm90", **options):
    card = None if target == "cpu" else card_for(target)
    return explain(shape, target, card, with_compiler=False, **options)


@pytest.fixture
def triton():
    return pytest.importorskip("triton")


def test_backends_answer_for_the_gpu_that_is_asked_about(triton):
    call = call_of(square("fwd", 512, 128, True))
    kinds = {x.backend: x.kind for x in answers_of_call(call, "sm90")}
    assert kinds == {"hopper": "serves", "portable": "serves", "cpu": "refuses"}
    kinds = {x.backend: x.kind for x in answers_of_call(call, "sm80")}
    assert kinds == {"hopper": "refuses", "portable": "serves", "cpu": "refuses"}
    kinds = {x.backend: x.kind for x in answers_of_call(call, "cpu")}
    assert kinds == {"hopper": "refuses", "portable": "refuses", "cpu": "serves"}
    small = {x.backend: x for x in answers_of_call(call_of(square("fwd", 512, 32, True)), "sm90")}
    assert (
        small["hopper"].kind == "slower" and "portable kernel is faster" in small["hopper"].reason
    )


def test_asking_leaves_no_trace(triton):
    from tilewise.kernels import hopper

    before = hopper._is_hopper
    answers_of_call(call_of(square("fwd", 512, 128, True)), "sm90")
    assert hopper._is_hopper is before
    assert dispatch.choose(call_of(square("fwd", 64, 64, True)).problem, torch.device("cpu")).NAME


def test_tiles_are_those_of_the_tables(triton):
    found = explained(square("fwd+bwd", 4096, 128, False))
    assert found.backend == "hopper"
    forward, backward = found.launches
    assert (forward.block_m, forward.block_n) == (128, 128)
    assert forward.tiles == 4 * 16 * 32 and forward.waves == 2048 / 132
    assert backward.kernel == "hopper_bwd_kernel"
    assert forward.built is None and forward.failed == "not asked"
    portable = explained(square("fwd+bwd", 4096, 64, True), backend="portable")
    names = [one.kernel for one in portable.launches]
    assert names == ["attn_fwd_kernel", "attn_bwd_dkdv_kernel", "attn_bwd_dq_kernel"]
    assert (portable.launches[0].block_m, portable.launches[0].block_n) == (64, 64)


@pytest.mark.compile
def test_the_compiler_is_asked(triton):
    found = explain(square("fwd", 256, 64, False, tokens=256), "sm80", card_for("sm80"))
    (one,) = found.launches
    assert not one.failed and one.built.registers > 32
    asked = one.built.registers, one.built.shared_memory, one.built.warps
    assert one.built.occupancy == occupancy("sm80", *asked)
    assert one.at_once == 108 * one.built.occupancy.programs


@pytest.mark.parametrize(
    "shape",
    [
        packed("fwd+bwd", "160,300", (4, 2, 64), True),
        square("fwd+bwd", 512, 64, False, tokens=512, hidden=128)._replace(modifier="documents"),
        square("fwd+bwd", 512, 64, False, tokens=512, hidden=128)._replace(modifier="learned-bias"),
        square("fwd+bwd", 512, 64, True)._replace(window=64, softcap=5.0, alibi=True, sinks=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("target", ["sm90", "gfx942", "cpu"])
def test_every_kind_of_shape_is_explained(triton, shape, target):
    found = explained(shape, target, deterministic=False)
    assert found.backend == {"sm90": "hopper", "gfx942": "portable", "cpu": "cpu"}[target]
    assert bool(found.how) == (target == "cpu") and bool(found.launches) == (target != "cpu")
    assert found.work.pairs > 0 and found.work.moved.once > 0


def test_pairs_are_counted_to_the_pair(triton):
    """One query at the end of its keys sees them all, and the heads of a group share its tile."""
    one = Shape("fwd", 32, 1, 8192, 16, 4, 128, 128, True, "bfloat16")
    found = explained(one)
    assert found.work.pairs == 32 * 16 * 8192 and found.work.side == "memory"
    (launched,) = found.launches
    assert launched.pack == 4 and launched.tiles == 32 * 4
    assert found.work.moved.tiled == found.work.moved.once
    causal = explained(square("fwd", 100, 64, True, tokens=100, hidden=64), "cpu")
    assert causal.work.pairs == 100 * 101 / 2


def test_a_large_batch_takes_no_memory(triton):
    found = explained(square("fwd+bwd", 65536, 128, True, tokens=65536 * 4096))
    assert found.launches[0].tiles == 4096 * 16 * 512


def test_what_nothing_serves_is_explained_too(triton):
    found = explained(square("fwd", 64, 520, False, hidden=520))
    assert found.backend == "" and not found.launches
    assert all(answer.reason for answer in found.answers)


def test_a_forced_backend_that_refuses_serves_nothing(triton):
    shape = square("fwd", 512, 64, False, dtype="float32")
    assert explained(shape, backend="hopper").backend == ""
    assert explained(square("fwd", 512, 32, False), backend="hopper").backend == "hopper"


def test_the_roof_says_which_side(monkeypatch):
    roof = Roof(100.0, 2.0, "made up")
    assert roof.ridge == 50.0 and roof.milliseconds(1e12, 1e9) == 10.0
    assert roof.milliseconds(1e9, 2e12) == 1000.0
    monkeypatch.setattr(explain_module, "cpu_roof", lambda dtype: roof)
    decode = explained(square("fwd", 1, 128, False, tokens=1), "cpu")
    assert decode.work.intensity < 2 and decode.work.side == "memory"
    long = explained(square("fwd", 4096, 128, False, tokens=4096, hidden=128), "cpu")
    assert long.work.intensity > 500 and long.work.side == "compute"


def test_the_roof_of_a_cpu_is_measured():
    roof = cpu_roof(torch.float32, size=128, nbytes=2**20)
    assert roof.tflops > 0 and roof.bandwidth > 0
    assert roof.source == "measured now: matmul of 128^3 in float32, a copy"


def test_the_ways_of_the_cpu():
    plain = square("fwd", 64, 32, True, tokens=64, hidden=64)
    assert way_of_cpu(plain) == "torch's fused kernel, in one piece"
    assert "in pieces" in way_of_cpu(plain._replace(seqlen_k=96))
    assert way_of_cpu(plain._replace(softcap=2.0)).startswith("blockwise in plain torch")
    assert way_of_cpu(packed("fwd", "64,32", (2, 2, 32), True)).startswith("sequence by sequence")


def test_cards_have_sms_of_their_kind():
    assert H200.roof(16).source.startswith("measured") and H200.roof(32).source == "datasheet"
    assert card_for("sm90") is H200
    assert occupancy("gfx942", 128, 0, 4) is None
    assert occupancy("sm90", 32, 0, 4).programs == 16  # 64 warps of 4
    assert occupancy("sm90", 255, 0, 8).limit == "registers"
