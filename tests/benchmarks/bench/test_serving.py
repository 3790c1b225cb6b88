"""A server's steps: what a load plans, that wrong results are found, and what a run saves."""

import pytest
import torch

from benchmarks.bench import load, serving
from benchmarks.bench.servers import SERVERS, Server, ServerKind, server
from benchmarks.bench.serving_steps import NOWHERE, Plan, Serving, padded, plan_of
from benchmarks.bench.timer import one_thread

testing = pytest.importorskip("click.testing")

from benchmarks.bench import commands as command  # noqa: E402

SMALL = Serving(
    part="attention",
    requests=3,
    prompts=(8, 40),
    answers=(2, 4),
    every=2,
    chunk=16,
    page_size=4,
    layers=2,
    nheads=4,
    nheads_k=2,
    headdim=16,
    intermediate=32,
    dtype="float32",
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(SMALL)


@pytest.fixture(autouse=True)
def without_threads():
    with one_thread():
        yield


def run(kinds, part="attention", **options):
    lines = []
    of = SMALL._replace(part=part, requests=2, prompts=(9, 20), answers=(2, 3), layers=1)
    done = serving.run_serving([of], kinds, rounds=2, show=lines.append, **options)
    return done, "\n".join(lines)


def changed(**calls) -> ServerKind:
    """Ours with another append or attend, made from ours."""

    def prepare(of, device):
        ours = SERVERS["tilewise"](of, device)
        return ours._replace(**{name: make(ours) for name, make in calls.items()})

    return ServerKind("tilewise", prepare)


def test_a_load_mixes_decodes_with_chunks_and_never_shares_a_slot(plan):
    assert all(step.tokens <= SMALL.chunk for step in plan.steps)
    assert any(step.is_decode for step in plan.steps)
    mixed = [step for step in plan.steps if not step.is_decode]
    assert any(1 in step.starts.diff().tolist() for step in mixed)
    for step in plan.steps:
        assert len(step.slots.unique()) == step.tokens
        assert step.table.min() >= 0 and step.table.max() < plan.pages
        assert step.table.shape[1] == plan.width
        assert (step.starts.dtype, step.slots.dtype) == (torch.int32, torch.int64)
    assert plan.answered < plan.tokens == sum(len(step.slots) for step in plan.steps)


def test_the_same_load_is_the_same_steps(plan):
    for step, other in zip(plan.steps, plan_of(SMALL).steps, strict=True):
        assert all(map(torch.equal, step[:4], other[:4]))


def test_what_fills_a_graph_has_no_query_no_key_and_no_slot(plan):
    step = next(step for step in plan.steps if step.is_decode)
    full = padded(step, 8)
    more = 8 - step.rows
    assert full.starts.diff().tolist() == [1] * step.rows + [0] * more
    assert full.used.tolist() == step.used.tolist() + [0] * more
    assert full.slots.tolist() == step.slots.tolist() + [NOWHERE] * more
    assert full.table.shape == (8, plan.width) and full.is_decode


def test_graphs_have_few_sizes(plan):
    assert serving.sizes_of(plan.steps) == [1, 2, 4, 8]
    step = next(step for step in plan.steps if step.is_decode)
    assert serving.sizes_of([padded(step, 17)]) == [1, 2, 4, 8, 16, 24]


@pytest.mark.parametrize("part", ["attention", "model"])
def test_a_run_saves_what_is_timed(part, tmp_path):
    kinds = [server("tilewise"), changed()._replace(name="other"), server("fa3")]
    done, text = run(kinds, part, save=tmp_path / "rows.jsonl")
    assert [one.provider for one in done] == ["fa3", "tilewise", "other"]
    assert done[0].refused == "it is for CUDA GPUs" and "not here: it is for CUDA GPUs" in text
    rows = load(tmp_path / "rows.jsonl")
    assert [row.rounds_ms for row in rows] == [one.row.rounds_ms for one in done[1:]]
    row = rows[0]
    assert row.suite == "serving" and row.shape["part"] == part and len(row.rounds_ms) == 2
    found = row.extra
    assert found["decode_steps"] + found["mixed_steps"] == found["steps"]
    assert found["decode_p50_ms"] <= found["decode_p99_ms"]
    assert found["tokens_per_s"] > found["answered_per_s"] > 0 and row.max_error <= row.bound
    assert "1 layers H4:2 D16 float32, 2 requests" in text and "time / tilewise" in text
    order = [f" steps, {plan_of(done[1].shape).tokens} tokens", "tilewise: compiled and checked in"]
    order += ["other: compiled and checked in", "round 2 of 2", "tokens/s"]
    places = [text.index(one) for one in order]
    assert places == sorted(places), "what is done is said when it is done"


def test_a_wrong_result_is_not_timed():
    def off(ours: Server):
        return lambda q, cache, call, out: ours.attend(q, cache, call, out) + out.add_(0.01)

    def skips(ours: Server):
        return lambda cache, k, v, slots: ours.append(cache, k[1:], v[1:], slots[1:])

    done, text = run([changed(attend=off)])
    assert done[0].row is None and done[0].wrong.startswith("out: max")
    done, text = run([changed(append=skips)])
    assert done[0].wrong == "append: a row is not what was given" and "WRONG" in text


def test_an_error_is_the_reason():
    def raises(ours: Server):
        def append(*tensors):
            raise RuntimeError("no kernel")

        return append

    done, _ = run([changed(append=raises)])
    assert done[0].refused == "RuntimeError: no kernel"


def test_orders_are_balanced(plan):
    ran = []

    class Loop:
        def __init__(self, name):
            self.name = name

        def time(self, step):
            ran.append(self.name)
            return 1.0

    loops = {name: Loop(name) for name in "ab"}
    shown = []
    times = serving.time_steps(loops, plan.steps[:4], rounds=2, show=shown.append)
    assert "".join(ran) == "abba" * 4
    assert times == {"a": [[1.0] * 4] * 2, "b": [[1.0] * 4] * 2}
    assert shown == ["  round 1 of 2", "  round 2 of 2"]


def test_figures_are_of_all_rounds(plan):
    count = len(plan.steps)
    found = serving.figures_of([[2.0] * count, [2.0] * count], plan)
    assert found["tokens_per_s"] == pytest.approx(plan.tokens / count * 500)
    assert found["decode_p99_ms"] == found["mixed_p50_ms"] == 2.0


def invoke(*arguments):
    return testing.CliRunner(env={"COLUMNS": "200"}).invoke(command.bench, ["serving", *arguments])


@pytest.fixture
def asked(monkeypatch):
    """The cases of a run that is not made, and its options."""
    seen = {}

    def run_serving(cases, kinds, **options):
        seen.update(cases=cases, kinds=kinds, **options)
        return []

    monkeypatch.setattr("benchmarks.bench.serving.run_serving", run_serving)
    return seen


def test_a_gpu_serves_layers_of_a_7b_model(asked, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    done = invoke("--device", "cuda")
    assert done.exit_code == 0, done.output
    assert [(of.part, of.page_size) for of in asked["cases"]] == [
        *(("attention", 16), ("attention", 64), ("model", 16), ("model", 64)),
    ]
    of = asked["cases"][0]
    assert (of.layers, of.hidden, of.intermediate, of.dtype) == (32, 4096, 14336, "bfloat16")
    assert [kind.name for kind in asked["kinds"]] == ["tilewise", "fa3", "vllm-triton"]
    assert asked["rounds"] == 3
    steps = plan_of(of).steps
    decodes = sum(step.is_decode for step in steps)
    assert len(steps) / 4 < decodes < 3 * len(steps) / 4, "a mix"
    assert serving.sizes_of(steps) == [1, 2, 4, 8, 16], "each is captured for each provider"


def test_options_reach_the_load(asked):
    options = "--part model --pages 32 --requests 2 --prompts 4,9 --answers 1,2 --every 5 --chunk 7"
    more = "--layers 3 --heads 8:1x64 --intermediate 96 --dtype fp16 --against fa3 --rounds 9"
    done = invoke("--device", "cpu", *options.split(), *more.split())
    assert done.exit_code == 0, done.output
    assert asked["cases"] == [
        Serving("model", 2, (4, 9), (1, 2), 5, 7, 32, 3, 8, 1, 64, 96, "float16")
    ]
    assert [kind.name for kind in asked["kinds"]] == ["tilewise", "fa3"] and asked["rounds"] == 9


@pytest.mark.parametrize(
    "options, message",
    [
        ("--prompts 9,4", "--prompts takes two numbers"),
        ("--answers 4", "--answers takes two numbers"),
        ("--heads 8x64,4x64", "--heads takes one shape"),
        ("--against vllm", "use one of tilewise, fa3, vllm-triton"),
        ("--part layer", "attention, model"),
    ],
)
def test_what_is_no_load_is_refused(asked, options, message):
    done = invoke("--device", "cpu", *options.split())
    assert done.exit_code == 2 and message in done.output
