"""Schemas of operators: saved programs have their arguments by name and order.

A schema that changes on purpose is written by

    PYTHONPATH=src python tests/api/test_operator_schemas.py
"""

from pathlib import Path

import torch

import tilewise  # noqa: F401

PAGE = Path(__file__).with_name("operator_schemas.txt")


def page():
    """The schemas of all operators of `import tilewise`, one a line."""
    schemas = [str(x) for x in torch._C._jit_get_all_schemas() if x.name.startswith("tilewise::")]
    return "\n".join(sorted(x for x in schemas if "context_parallel" not in x)) + "\n"


def test_schemas_are_those_of_saved_programs():
    assert page() == PAGE.read_text("utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
