"""What several files of tests of buffers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

import collage_neuron


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.last(self.second(F.relu(self.norm(self.first(x))))))


def resnet(seed: int = 0, blocks: int = 2) -> Any:
    torch.manual_seed(seed)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    body = [Block(8) for _ in range(blocks)]
    return nn.Sequential(stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def images(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) + 5


def loss_of(output: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(output, "logits", output)
    return found.float().square().mean()


VOCABULARY, LENGTH = 97, 2048


def compiled(model: Any, form: str = "pair", **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    """`compile(model, optimizer)`, or `compile(model)` and an optimizer that is built afterwards."""
    if form == "pair":
        return collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-2), **settings)
    model = collage_neuron.compile(model, **settings)
    return model, AdamW(model.parameters(), lr=1e-2)


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in model.named_buffers()}


class Rotary(nn.Module):
    """Of one head, applied as nanoGPT's descendants do it; the buffer's name is the library's choice."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer(name, 10000.0 ** (-torch.arange(0, width, 2) / width), persistent=False)
        self.register_buffer("scale", torch.linspace(0.3, 1, width // 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(x.shape[-2]).float(), getattr(self, self.name))
        turned = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turned).flatten(-2).to(x.dtype)


class Sinusoidal(nn.Module):
    """Positions that are added to activations: in fp32 they would widen them, and the next matmul would reject them."""

    def __init__(self, width: int = 16, length: int = 32) -> None:
        super().__init__()
        self.table: torch.Tensor
        angles = torch.outer(torch.arange(length).float(), 10000.0 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[1]]


def sinusoidal() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), Sinusoidal(), nn.Linear(16, 16), nn.Linear(16, VOCABULARY))


def tokens(length: int = 24) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))
