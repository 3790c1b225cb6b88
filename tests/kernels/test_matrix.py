"""The matrix of `tilewise.testing.cases`, by backend: the same calls for all of them."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tilewise.testing.cases import CASES, PACKED, Case, Features, Sizes
from tilewise.testing.run import run_case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = {
    "cpu": ("cpu", "cpu"),
    "interpreted": ("portable", "cpu"),
    "emulated": ("hopper", "cpu"),
    "gpu": ("portable", "cuda"),
    "gpu-hopper": ("hopper", "cuda"),
}

# Head dims that pad to each power of two, with everything that selects code.
_FEATURES = {
    "plain": Features(lse_grad=True),
    "window": Features(causal=True, window=(30, 0), layout="bhsd", memory="sliced"),
    "scores": Features(causal=True, softcap=3.0, alibi="heads", sinks=True, lse_grad=True),
    "padded": Features(causal="top_left", seqused_k=(41, 0), memory="transposed"),
}
HEADDIMS = tuple(
    Case(f"{name}-d{d}-v{e}", Sizes(2, 43, 50, 2, 1, d, e), features)
    for d, e in ((1, 1), (8, 8), (33, 33), (72, 72), (80, 40), (96, 96), (160, 160), (192, 128))
    + ((256, 256), (100, 100), (512, 512))
    for name, features in _FEATURES.items()
)
# `make test` interprets each head dim with one of these features, and emulates it with another
_RANKED = [(x, (i // len(_FEATURES) + i) % len(_FEATURES)) for i, x in enumerate(HEADDIMS)]
SAMPLED = {
    "interpreted": [x for x, rank in _RANKED if rank == 0],
    "emulated": [x for x, rank in _RANKED if rank == 1],
}
ALL = CASES + HEADDIMS + PACKED
MOST_TILES = 12  # of a sampled case in the interpreter, which pays 10 ms a tile and its gradients
# The compiler takes longest for fp32, and dtype changes little but that.
ON_GPU = {"bf16": ALL, "fp16": CASES[::6] + PACKED[:2], "fp32": CASES[3::12] + PACKED[-2:]}


def _is_sampled(backend, at, case, dtype):
    """Whether `make test` runs it. Each case runs in one dtype, in turn."""
    dtypes = ("bf16", "fp16") if backend == "emulated" else tuple(DTYPES)
    fits = case not in HEADDIMS if backend == "cpu" else case.tiles <= MOST_TILES
    is_left_out = case in HEADDIMS and case not in SAMPLED.get(backend, ())
    if case not in HEADDIMS and backend != "cpu":  # they alternate: interpreter, emulator, none
        is_left_out = at // 3 % 3 != ("interpreted", "emulated").index(backend)
    return fits and not is_left_out and dtype == dtypes[at % len(dtypes)]


def _params():
    for backend in BACKENDS:
        for at, case in enumerate(ALL):
            for dtype in DTYPES:
                if backend in ("emulated", "gpu-hopper") and dtype == "fp32":
                    continue
                if backend.startswith("gpu") and case not in ON_GPU[dtype]:
                    continue
                if backend.startswith("gpu"):
                    marks = [pytest.mark.gpu]
                elif _is_sampled(backend, at, case, dtype):
                    marks = []
                else:
                    marks = [pytest.mark.slow]
                name = f"{backend}-{case.name}-{dtype}"
                yield pytest.param(backend, case, dtype, id=name, marks=marks)


@pytest.fixture(scope="session")
def started(request):
    """A GPU's cases by test, begun by all cores at once: nearly all of their time is compiling."""
    workers = min(16, os.cpu_count() or 1)
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        cases = {}
        for item in request.session.items:
            if item.name.startswith("test_case[gpu"):
                names = ("backend", "case", "dtype")
                backend, case, dtype = (item.callspec.params[name] for name in names)
                call = run_case, case, *BACKENDS[backend], DTYPES[dtype]
                cases[item.nodeid] = pool.submit(*call)
        yield cases
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("backend", "case", "dtype"), list(_params()))
def test_case(backend, case, dtype, request):
    try:
        # Under xdist each worker would begin all cases
        if backend.startswith("gpu") and "PYTEST_XDIST_WORKER" not in os.environ:
            records = request.getfixturevalue("started")[request.node.nodeid].result()
        else:
            records = run_case(case, *BACKENDS[backend], DTYPES[dtype])
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    failures = [str(record) for record in records if not record.verdict.ok]
    assert not failures, "\n".join(failures)


def test_names_are_unique():
    names = [case.name for case in ALL]
    assert len(set(names)) == len(names)
