"""The matrix of `tilewise.testing.cases`, by backend: the same calls for all of them."""

import pytest
import torch

from tilewise.testing.cases import CASES, run_case

BACKENDS = ["cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MOST_TILES = {"portable": 24}  # the interpreter pays 3 ms a tile


def _params():
    for backend in BACKENDS:
        for case in CASES:
            if case.tiles <= MOST_TILES.get(backend, case.tiles):
                yield pytest.param(backend, case, id=f"{backend}-{case.name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("backend", "case"), list(_params()))
def test_case(backend, case, dtype):
    try:
        records = run_case(case, backend=backend, dtype=dtype)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    failures = [str(record) for record in records if not record.verdict.ok]
    assert not failures, "\n".join(failures)


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
