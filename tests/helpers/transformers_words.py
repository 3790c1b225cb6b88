"""Words of transformers that its versions spell in two ways."""

import inspect

import pytest

masking_utils = pytest.importorskip("transformers.masking_utils")

# From 5.24 on "cache": the other word is a warning
CACHE = "past_key_values"
if CACHE not in inspect.signature(masking_utils.create_causal_mask).parameters:
    CACHE = "cache"
