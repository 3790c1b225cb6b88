"""A diffusion transformer in plain torch whose attention is tilewise's: it learns to draw shapes.

    python examples/diffusion_transformer.py             # a CPU is enough: half a minute
    python examples/diffusion_transformer.py --steps 2000 --device cuda

Images are of 16 x 16 pixels, and of 8 x 16 and 16 x 8 beside them: their patches are packed end to
end, without padding, and `cu_seqlens` says where each image begins. A model predicts the velocity
from noise to an image (rectified flow, arXiv 2209.03003); time and class steer each block by
adaptive layer norms that begin as zeros (DiT, arXiv 2212.09748).
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import tilewise

SIZES = [(16, 16), (8, 16), (16, 8)]
PATCH, WIDTH, HEADS, BLOCKS = 2, 64, 4, 3
SHAPES = ("disc", "frame", "cross")
SHADES = " .:-=+*#%@"


def draw(shape: int, size: tuple[int, int]) -> Tensor:
    """An image (height, width) of one of the shapes, from -1 to 1, somewhere near its middle."""
    height, width = size
    y = torch.arange(height)[:, None] - height / 2 + 0.5 + torch.randn(()) * 0.7
    x = torch.arange(width)[None] - width / 2 + 0.5 + torch.randn(()) * 0.7
    y, x = y * 16 / height, x * 16 / width
    far = torch.maximum(x.abs(), y.abs())
    inside = (x**2 + y**2 < 30, (far < 6) & (far > 3.5), torch.minimum(x.abs(), y.abs()) < 1.6)
    return inside[shape].float() * 2 - 1


def patches(image: Tensor) -> Tensor:
    """(patches, pixels of a patch) of an image (height, width)."""
    height, width = image.shape
    cut = image.view(height // PATCH, PATCH, width // PATCH, PATCH).transpose(1, 2)
    return cut.reshape(-1, PATCH * PATCH)


def image_of(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """The image whose patches these are."""
    rows, columns = (side // PATCH for side in size)
    return tokens.view(rows, columns, PATCH, PATCH).transpose(1, 2).reshape(size)


def waves(x: Tensor, count: int) -> Tensor:
    """Sines and cosines of numbers: (..., 2 * count)."""
    angles = x[..., None] * torch.exp(-torch.arange(count, device=x.device) * 6.0 / count) * 50
    return torch.cat([angles.sin(), angles.cos()], -1)


class Packing:
    """Images of several sizes side by side: where they begin, and where each patch lies."""

    def __init__(self, sizes: list[tuple[int, int]], device: str):
        grids = [(height // PATCH, width // PATCH) for height, width in sizes]
        counts = torch.tensor([rows * columns for rows, columns in grids])
        self.sizes, self.counts = sizes, counts.to(device)
        self.cu_seqlens = nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
        places = [
            torch.cartesian_prod(torch.arange(rows) / rows, torch.arange(columns) / columns)
            for rows, columns in grids
        ]
        self.places = torch.cat(places).to(device)  # (patches, 2)

    def of_patches(self, x: Tensor) -> Tensor:
        """What is one an image, for each of its patches."""
        return x.repeat_interleave(self.counts, 0)


class Block(nn.Module):
    """Attention within each image, then a feed-forward, both steered by time and class."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in "ab"])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.steer = nn.Linear(WIDTH, 6 * WIDTH)
        nn.init.zeros_(self.steer.weight)
        nn.init.zeros_(self.steer.bias)

    def forward(self, x: Tensor, steer: Tensor, packing: Packing) -> Tensor:
        scale_a, shift_a, gate_a, scale_b, shift_b, gate_b = self.steer(steer).chunk(6, -1)
        y = self.norms[0](x) * (1 + scale_a) + shift_a
        q, k, v = self.qkv(y).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
        cu_seqlens = packing.cu_seqlens
        y = tilewise.attention(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        x = x + gate_a * self.out(y.flatten(1))
        y = self.norms[1](x) * (1 + scale_b) + shift_b
        return x + gate_b * self.feed(y)


class DiffusionTransformer(nn.Module):
    """Patches, the time of each image and its class in; velocities of the patches out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.place = nn.Linear(2 * 16, WIDTH)
        self.time = nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.shape = nn.Embedding(len(SHAPES), WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, PATCH * PATCH)

    def forward(self, x: Tensor, time: Tensor, shape: Tensor, packing: Packing) -> Tensor:
        steer = self.time(waves(time, 16)) + self.shape(shape)
        steer = packing.of_patches(nn.functional.silu(steer))
        x = self.embed(x) + self.place(waves(packing.places, 8).flatten(-2))
        for block in self.blocks:
            x = block(x, steer, packing)
        return self.head(self.norm(x))


def train(model: DiffusionTransformer, steps: int, device: str) -> list[float]:
    """The losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    packing = Packing(SIZES * 8, device)
    losses = []
    for step in range(steps):
        shape = torch.randint(len(SHAPES), (len(packing.sizes),))
        clean = [patches(draw(s, size)) for s, size in zip(shape.tolist(), packing.sizes)]
        clean, shape = torch.cat(clean).to(device), shape.to(device)
        noise, time = torch.randn_like(clean), torch.rand(len(packing.sizes), device=device)
        t = packing.of_patches(time)[:, None]
        velocity = model((1 - t) * noise + t * clean, time, shape, packing)
        loss = nn.functional.mse_loss(velocity, clean - noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f}", flush=True)
    return losses


@torch.no_grad()
def sample(model: DiffusionTransformer, shape: Tensor, packing: Packing, steps: int) -> list:
    """Images of these classes, by Euler's method from noise."""
    x = torch.randn(len(packing.places), PATCH * PATCH, device=packing.places.device)
    for step in range(steps):
        time = torch.full((len(packing.sizes),), step / steps, device=x.device)
        x = x + model(x, time, shape, packing) / steps
    parts = x.split(packing.counts.tolist())
    return [image_of(part, size) for part, size in zip(parts, packing.sizes)]


def picture(images: list[Tensor]) -> str:
    """Images side by side, in letters."""
    lines = []
    for y in range(max(len(image) for image in images)):
        rows = [
            image[y] if y < len(image) else image.new_full(image.shape[1:], -1) for image in images
        ]
        levels = [((row.clamp(-1, 1) + 1) / 2 * (len(SHADES) - 1)).round().int() for row in rows]
        lines.append("   ".join("".join(SHADES[i] for i in row.tolist()) for row in levels))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains and draws; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = DiffusionTransformer().to(asked.device)
    losses = train(model, asked.steps, asked.device)
    shapes = torch.arange(len(SHAPES), device=asked.device)
    for size in SIZES:
        packing = Packing([size] * len(SHAPES), asked.device)
        print("\n" + picture(sample(model, shapes, packing, steps=20)))
    return losses


if __name__ == "__main__":
    main()
