"""What tests of masks that are no band, and of biases, compare two models with."""

import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")


SLOW = pytest.mark.slow
CLOSE = dict(atol=1e-5, rtol=1e-5)
WAYS = {
    "greedy": {},
    "beams": dict(num_beams=3),
    "static": dict(cache="static"),
    "parts": dict(prefill_chunk_size=5),
}


def some(names, fast):
    return [pytest.param(name, marks=() if name in fast else SLOW) for name in names]


def holes():
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, 5] = 0
    mask[2, :3] = mask[2, 6:8] = 0
    return mask


def labels_of(ids, mask):
    """Of real tokens behind real ones: eager lets a padded query see the average of all keys."""
    behind = torch.nn.functional.pad(mask[:, :-1] * mask[:, 1:], (1, 0))
    return ids.masked_fill(behind == 0, -100)


def gradients_agree(eager, ours, **batch):
    for model in (eager, ours):
        model.train()
        model(**batch).loss.backward()
    for (name, one), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4, msg=name)


def shaken(eager, ours):
    """Weights of which none is 0: some are born so."""
    torch.manual_seed(1)
    for weight in eager.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.05)
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def checkpoint(reentrant, *models):
    if reentrant is not None:
        for model in models:
            with warnings.catch_warnings(action="ignore"):  # it has a new name in later versions
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def generated_agree(eager, ours, ids, cache="dynamic", **how):
    how |= dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    expected = eager.generate(ids, **how)
    if cache == "static":
        how["cache_implementation"] = "static"
    assert torch.equal(ours.generate(ids, **how), expected)


def sdpa(eager, kind=transformers.AutoModelForCausalLM):
    """The same weights: what eager is for all but rows that see no key, and masks of bools."""
    model = kind.from_config(copy.deepcopy(eager.config), attn_implementation="sdpa").eval()
    model.load_state_dict(eager.state_dict())
    return model


def given(shape=(3, 1, 12, 12)):
    seen = (torch.rand(shape) > 0.4) | torch.eye(shape[-1], dtype=torch.bool)
    return seen & torch.ones(shape[-2:], dtype=torch.bool).tril()
