"""torch's own nn.TransformerEncoder, its attention tilewise's: `with tilewise.enable_sdpa():`.

    python examples/transformer_encoder.py               # a CPU is enough: half a minute

Not a line of the model knows tilewise. It learns to sort digits: a sequence of any length goes in,
padded on the right, and comes out in order.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import tilewise

DIGITS, PADDING, LONGEST = 10, 10, 12
WIDTH, HEADS, LAYERS = 64, 4, 2


class Sorter(nn.Module):
    """A digit for each place."""

    def __init__(self):
        super().__init__()
        self.digit = nn.Embedding(DIGITS + 1, WIDTH)
        self.place = nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, digits: Tensor) -> Tensor:
        x = self.digit(digits) + self.place(torch.arange(LONGEST, device=digits.device))
        return self.head(self.encoder(x, src_key_padding_mask=digits == PADDING))


def batch(rows: int, device: str) -> tuple[Tensor, Tensor]:
    """Digits, and the same in order; padding stays at the end of both."""
    digits = torch.randint(DIGITS, (rows, LONGEST))
    length = torch.randint(LONGEST // 2, LONGEST + 1, (rows, 1))
    digits = digits.masked_fill(torch.arange(LONGEST) >= length, PADDING).to(device)
    return digits, digits.sort(1).values


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains; returns how far the first output is from torch's, and the share of places right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Sorter().to(asked.device)
    digits, _ = batch(64, asked.device)
    by_torch = model(digits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with tilewise.enable_sdpa():
        real = digits != PADDING
        difference = (model(digits) - by_torch)[real].abs().max().item()
        print(f"largest difference from torch's own attention: {difference:.1e}")
        for step in range(asked.steps):
            digits, ordered = batch(64, asked.device)
            loss = nn.functional.cross_entropy(
                model(digits).transpose(1, 2), ordered, ignore_index=PADDING
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 0 or step == asked.steps - 1:
                print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
        digits, ordered = batch(256, asked.device)
        real = digits != PADDING
        right = (model(digits).argmax(-1) == ordered)[real].float().mean().item()
    print(f"places right: {right:.3f}")
    return dict(difference=difference, right=right)


if __name__ == "__main__":
    main()
