"""Joules a call, from a fake of NVML: its counter, or power where a card has none."""

import random
import types

import pytest
from helpers.waits import until

from benchmarks.bench import run_suite
from benchmarks.bench.energy import BLOCK_MS, COUNTER, POWER, Meter, NoEnergy, Nvml, block
from benchmarks.bench.shapes import square
from benchmarks.bench.sustained import Plan, joules_of, measure, plan_for
from benchmarks.bench.timer import CallFailed


class Card:
    """Time passes with calls, each with its milliseconds and watts."""

    def __init__(self, has_counter=True, **kinds):
        self.has_counter, self.kinds = has_counter, kinds
        self.joules, self.watts, self.spans = 7e6, 100.0, []
        self.calls = {name: (lambda name=name: name) for name in kinds}

    def energy(self):
        if not self.has_counter:
            raise NoEnergy("nvmlDeviceGetTotalEnergyConsumption answers with error 3")
        return self.joules

    def power(self):
        return self.watts

    def span(self, call, count):
        name = call()
        each, self.watts = self.kinds[name]
        self.joules += (count + 1) * each / 1e3 * self.watts
        self.spans.append((name, count * each))
        return each


class Library:
    """NVML's functions: each answers with its code, a reading goes where the caller points."""

    def __init__(self, codes=()):
        self.codes, self.asked = dict(codes), []

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments):
            self.asked.append((name, *arguments[:-1]))
            readings = {
                "nvmlDeviceGetTotalEnergyConsumption": 8500,
                "nvmlDeviceGetPowerUsage": 700_000,
            }
            if name in readings:
                arguments[-1]._obj.value = readings[name]
            return self.codes.get(name, 0)

        return call


@pytest.fixture
def nvml(monkeypatch):
    def made(codes=()):
        library = Library(codes)
        monkeypatch.setattr("ctypes.CDLL", lambda name: library)
        known = types.SimpleNamespace(uuid="12-34")
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: known)
        return library

    return made


def test_nvml_is_asked_for_the_card_that_torch_uses(nvml):
    library = nvml()
    card = Nvml("cuda:1")
    assert ("nvmlDeviceGetHandleByUUID", b"GPU-12-34") in library.asked
    assert card.energy() == 8.5 and card.power() == 700.0  # of millijoules and milliwatts
    assert Meter(card).kind == COUNTER


def test_what_nvml_refuses_is_said(nvml, monkeypatch):
    nvml({"nvmlDeviceGetTotalEnergyConsumption": 3})
    assert Meter(Nvml("cuda")).kind == POWER
    nvml({"nvmlDeviceGetHandleByUUID": 6})
    with pytest.raises(NoEnergy, match="nvmlDeviceGetHandleByUUID answers with error 6"):
        Nvml("cuda")
    monkeypatch.undo()
    with pytest.raises(NoEnergy, match="does not load"):
        monkeypatch.setattr("benchmarks.bench.energy.LIBRARY", "libnone.so.0")
        Nvml("cuda")


def test_joules_of_a_call_by_the_counter():
    card = Card(a=(0.5, 700.0))
    meter = Meter(card)
    assert meter.kind == COUNTER
    assert block(card.calls["a"], card.span, meter) == pytest.approx(0.5e-3 * 700)
    assert card.spans[-1][1] >= BLOCK_MS  # what was measured
    assert card.spans[-2][1] >= 200  # its lead


def test_a_block_is_as_long_as_asked_where_calls_become_faster():
    card = Card(a=(4.0, 700.0))
    spans = []

    def span(call, count):
        spans.append(count * 1.0)
        return card.span(call, count) if count == 2 else 1.0

    block(card.calls["a"], span, Meter(card))
    assert sum(spans[2:]) >= BLOCK_MS


def test_power_is_sampled_where_there_is_no_counter(monkeypatch):
    card = Card(has_counter=False, a=(1.0, 500.0))
    meter = Meter(card)
    assert meter.kind == POWER
    seconds = iter([10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))
    card.watts = 500.0
    assert meter.joules(lambda: None) == pytest.approx(1000.0)


def test_power_that_cannot_be_asked_for_any_more_is_an_error():
    card = Card(has_counter=False)
    meter = Meter(card)

    def power():
        raise NoEnergy("nvmlDeviceGetPowerUsage answers with error 15")

    card.power = power
    with pytest.raises(NoEnergy, match="error 15"):
        meter.joules(lambda: None)


def test_power_is_asked_for_while_calls_run():
    card, asked = Card(has_counter=False, a=(1.0, 500.0)), []
    card.power = lambda: asked.append(1) or 500.0
    meter = Meter(card)
    before = len(asked)

    def work():
        until(lambda: len(asked) >= before + 3, "power is asked for")

    assert meter.joules(work) > 0
    assert len(asked) >= before + 3


def plan_of(card):
    return Plan(card.span, random.Random(0), meter=Meter(card))


def test_the_order_of_blocks_is_drawn_for_each_shape():
    card = Card(a=(1.0, 700.0), b=(2.0, 600.0))
    plan, orders = plan_of(card), set()
    for _ in range(8):
        card.spans.clear()
        joules = joules_of(card.calls, plan)
        assert joules == {"a": pytest.approx(0.7), "b": pytest.approx(1.2)} and list(joules) == [
            "a",
            "b",
        ]
        orders.add("".join(name for name, spent in card.spans if spent >= BLOCK_MS))
    assert orders == {"ab", "ba"}


def test_blocks_of_energy_are_most_of_the_load_before_sustained_rounds():
    card = Card(a=(1.0, 700.0), b=(2.0, 600.0))
    measured = measure(card.calls, lambda call, count: [1.0] * count, 1, 1.0, plan_of(card))
    assert measured["a"].joules == pytest.approx(0.7) and len(measured["a"].sustained) == 8
    assert sum(spent for _, spent in card.spans) < 2 * (BLOCK_MS + 200) + 1000


def test_a_row_says_its_joules_and_what_they_are_measured_by(monkeypatch):
    card = Card(standard=(1.0, 700.0), flash=(2.0, 700.0))
    names = iter(card.kinds)

    def span(call, count):  # the first two spans of all are of the two calls, in order
        if call not in known:
            known[call] = next(names)
        return card.span(lambda: known[call], count)

    known = {}
    in_order = types.SimpleNamespace(sample=lambda names, count: list(names))
    plan = Plan(span, in_order, meter=Meter(card))
    monkeypatch.setattr("benchmarks.bench.run.plan_for", lambda *asked: plan)
    lines = []
    shape = square("fwd", 32, 16, True, dtype="float32", tokens=64, hidden=32)
    quick = dict(rounds=1, round_ms=1, energy=True, show=lines.append)
    ours, other = run_suite([shape], ["standard", "flash"], **quick)
    assert ours.row.joules == pytest.approx(0.7) and other.row.joules == pytest.approx(1.4)
    assert ours.row.extra == {"joules_by": COUNTER, "span_ms": plan.span_ms}
    assert other.energy == pytest.approx(2.0)
    assert [line.split() for line in lines if "joules" in line][-1] == ["joules", "1.4", "2.000"]


def test_without_a_gpu_there_is_no_energy():
    with pytest.raises(NoEnergy, match="cpu"):
        plan_for("cpu", 8, with_energy=True)


def test_a_call_that_raises_in_its_block_is_named():
    def fails():
        raise RuntimeError("no memory")

    card = Card(a=(1.0, 700.0))
    with pytest.raises(CallFailed, match="b: no memory"):
        joules_of({**card.calls, "b": fails}, plan_of(card))


def test_a_card_that_says_nothing_is_an_error():
    card = Card(has_counter=False)

    def power():
        raise NoEnergy("nvmlDeviceGetPowerUsage answers with error 3")

    card.power = power
    with pytest.raises(NoEnergy, match="PowerUsage"):
        Meter(card)
