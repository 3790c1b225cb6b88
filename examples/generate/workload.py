"""What is served: a small Llama of random weights, and requests for it."""

from __future__ import annotations

from typing import Any

import torch

from .requests import Request

CONTEXT = 4096
SIZES = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    initializer_range=0.1,  # 0.02 leaves the next token to the last one: attention would not matter
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


def llama(seed: int, device: str, **sizes):
    """transformers' LlamaForCausalLM, eager, fp32, the same weights on every device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    asked: dict[str, Any] = {**SIZES, **sizes, "attn_implementation": "eager"}
    config = LlamaConfig(**asked)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)  # its own `to` has no type
    return model.float().eval().to(device)


def draw_requests(count: int, seed: int, split_size: int, vocabulary: int) -> list[Request]:
    """Requests of three pieces and more, to twice as many; some at once, the others as time goes
    by, each with an end of its own.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int = 1) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    requests = []
    for i in range(count):
        (length,), (new_tokens,) = draw(2 * split_size + 1, 4 * split_size), draw(32, 97)
        requests.append(Request(draw(1, vocabulary, length), new_tokens, 3 * max(0, i - 3)))
    return requests
