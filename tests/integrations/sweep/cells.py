"""The cells of a class: eager and tilewise with the same weights, and how far apart they are."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .shrink import SPECIAL
from .subjects import Subject

Tensor = torch.Tensor
BATCH, LENGTH, REAL = 3, 12, (12, 9, 7)  # tokens, and how many of a padded row's are real
NEW_TOKENS = 6
CLOSE = 5e-5  # of fp32, over the largest number that there is
CLOSE_GRADIENTS = 5e-4
MOST_ROUNDING = 5e-3  # of eager itself; beyond it nothing is judged
TASKS = {
    "causal": ["full", "left padding", "right padding", "static cache", "gradients"],
    "masked": ["full", "left padding", "right padding", "gradients"],
    "encoder-decoder": ["full", "left padding", "right padding", "static cache", "gradients"],
    "vision": ["full", "gradients"],
}


class Compared(NamedTuple):
    """A cell's outcome: how far apart, and how often tilewise's attention was called."""

    error: float  # over the largest number of eager's
    calls: int
    rounding: float | None = None  # eager's own distance from float64, where that is what counts

    def is_equal(self, cell: str) -> bool:
        close = CLOSE_GRADIENTS if cell == "gradients" else CLOSE
        return self.error <= (close if self.rounding is None else 2 * self.rounding)


class Pair(NamedTuple):
    """One model twice, with the same weights: as eager, and as tilewise."""

    subject: Subject
    eager: torch.nn.Module
    ours: torch.nn.Module


def pair_of(subject: Subject, config, eager_of: Callable, ours_of: Callable) -> Pair:
    """Weights of which none is 0, as some are born."""
    torch.manual_seed(0)
    eager = eager_of(copy.deepcopy(config)).eval()
    shake(eager)
    ours = ours_of(copy.deepcopy(config)).eval()
    ours.load_state_dict(eager.state_dict())
    return Pair(subject, eager, ours)


def shake(model: torch.nn.Module) -> None:
    """Adds noise to every weight, biases and sinks among them."""
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data.add_(torch.randn(weight.shape).to(weight) * 0.05)


def compare(pair: Pair, cell: str) -> Compared:
    """Runs both; a NotTheirsError where eager cannot."""
    batch, real = inputs(pair.subject, pair.eager, cell)
    if cell == "static cache":
        return over_static_cache(pair, batch)
    run = gradients if cell == "gradients" else outputs
    expected = of_eager(lambda: run(pair.eager, batch, real))
    with counted() as calls:
        got = run(pair.ours, batch, real)
    found = Compared(distance(got, expected), len(calls))
    return (
        found
        if found.is_equal(cell)
        else beside_float64(pair, batch, real, run, (got, expected), found)
    )


def beside_float64(pair: Pair, batch, real, run: Callable, both, found: Compared) -> Compared:
    """Both held to eager in float64: some models round more than others."""
    whole = copy.deepcopy(pair.eager).double()
    batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    try:
        truth = run(whole, batch, real)
    except Exception:  # it computes in float32 alone
        return found
    errors = [distance({name: x.double() for name, x in one.items()}, truth) for one in both]
    if not errors[1] <= MOST_ROUNDING:
        return found
    return Compared(errors[0], found.calls, rounding=errors[1])


def over_static_cache(pair: Pair, batch: dict) -> Compared:
    """Held to eager over a cache that grows: over a static one it may be wrong itself."""
    expected = of_eager(lambda: generated(pair.eager, batch))
    failed = found = None
    try:
        with counted() as calls:
            got = generated(pair.ours, batch, "static")
        found = Compared(distance(got, expected), len(calls))
    except Exception as error:
        failed = error
    if found and found.error <= CLOSE:
        return found
    over_static = of_eager(lambda: generated(pair.eager, batch, "static"))
    if failed:
        raise failed
    if not distance(over_static, expected) <= CLOSE:
        raise NotTheirsError("eager gives other tokens over a static cache than without one")
    return found


def of_eager(run: Callable[[], dict]) -> dict:
    """What it gives, or a NotTheirsError."""
    try:
        expected = run()
    except Exception as error:
        raise NotTheirsError(f"{type(error).__name__}: {error}") from error
    if not all(torch.isfinite(x).all() for x in expected.values()):
        raise NotTheirsError("eager gives numbers that are not finite")
    return expected


class NotTheirsError(Exception):
    """eager itself does not serve the cell."""


def inputs(subject: Subject, model, cell: str) -> tuple[dict, Tensor | None]:
    """Arguments of the model, and which rows of its result count: padded ones do not."""
    torch.manual_seed(2)
    if subject.task == "vision":
        return images(model), None
    ids = torch.randint(3, SPECIAL - 8, (BATCH, LENGTH))
    place = torch.arange(LENGTH).expand(BATCH, LENGTH)
    real = torch.tensor(REAL)[:, None]
    mask = torch.ones_like(ids)
    if cell == "left padding" or (cell, subject.task) == ("static cache", "causal"):
        mask = (place >= LENGTH - real).long()
    elif cell in ("right padding", "gradients"):
        mask = (place < real).long()
    batch = dict(input_ids=ids.masked_fill(mask == 0, 0), attention_mask=mask)
    if subject.task != "encoder-decoder":
        return batch, mask.bool()
    takes = inspect.signature(model.forward).parameters
    if cell != "static cache" and "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = torch.randint(3, SPECIAL - 8, (BATCH, LENGTH - 3))
        return batch, None
    return batch, mask.bool()


def images(model) -> dict:
    """A batch of images or films of the size that the config names."""
    config = model.config
    known = [config, *(c for c in vars(config).values() if hasattr(c, "to_dict"))]
    size = next((c.image_size for c in known if getattr(c, "image_size", None)), 64)
    shape = [size, size] if isinstance(size, int) else list(size)
    shape = [next((n for c in known if (n := getattr(c, "num_channels", None))), 3), *shape]
    if getattr(config, "num_frames", None):
        shape = [config.num_frames, *shape]
    names = inspect.signature(model.forward).parameters
    if "pixel_values" not in names and model.main_input_name == "input_ids":  # of pixels
        return dict(input_ids=torch.randint(3, SPECIAL - 8, (2, LENGTH)))
    name = "pixel_values" if "pixel_values" in names else model.main_input_name
    return {name: torch.randn(2, *shape)}


def outputs(model, batch: dict, real: Tensor | None) -> dict[str, Tensor]:
    """The first tensor of the result, where tokens are real."""
    with torch.no_grad():
        return {"first": first_of(model, batch, real)}


def first_of(model, batch: dict, real: Tensor | None) -> Tensor:
    torch.manual_seed(3)  # some models draw
    result = model(**batch)
    named = [result.get(name) for name in ("logits", "last_hidden_state")]
    first = next(x for x in (*named, *result.to_tuple()) if isinstance(x, Tensor))
    of_tokens = real is not None and first.shape[:2] == real.shape
    return first[real] if of_tokens else first


def gradients(model, batch: dict, real: Tensor | None) -> dict[str, Tensor]:
    """Of a weighted sum of the result, by all parameters."""
    model.zero_grad()
    first = first_of(model, batch, real)
    torch.manual_seed(4)
    (first * torch.randn(first.shape)).sum().backward()
    named = model.named_parameters()
    found = {name: p.grad for name, p in named if p.grad is not None and p.numel()}
    assert found, "no parameter has a gradient"
    return found


def generated(model, batch: dict, cache: str = "dynamic") -> dict[str, Tensor]:
    """Tokens and their logits, greedy."""
    torch.manual_seed(3)
    how = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1)
    how |= dict(cache_implementation=cache, disable_compile=True, output_logits=True)
    if model.config.is_encoder_decoder:
        how["decoder_start_token_id"] = 1
    result = model.generate(**batch, **how, return_dict_in_generate=True)
    return dict(logits=torch.stack(result.logits), tokens=result.sequences.float())


def distance(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference over the largest number, a tensor each; infinite if others are there.

    A gradient that is small beside the others is held to a thousandth of theirs.
    """
    if got.keys() != expected.keys() or any(got[x].shape != expected[x].shape for x in got):
        return float("inf")
    largest = max(x.abs().max().item() for x in expected.values())
    worst = 0.0
    for name, one in expected.items():
        size = max(one.abs().max().item(), 1e-3 * largest, 1e-9)
        difference = (got[name] - one).abs().max().item() / size
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


@contextmanager
def counted() -> Iterator[list]:
    """Counts calls of tilewise's attention."""
    from tilewise.integrations.transformers import attend

    calls: list = []
    kept = attend.attention, attend.call

    def counting(function):
        def called(*args, **kwargs):
            calls.append(function)
            return function(*args, **kwargs)

        return called

    attend.attention, attend.call = map(counting, kept)
    try:
        yield calls
    finally:
        attend.attention, attend.call = kept
