"""A byte-level GPT in plain PyTorch: nothing in this file knows about ``collage_neuron``."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The sizes of a batch and of the model; ``block`` is the context in bytes, ``vocab`` a byte's values."""

    batch: int = 16
    block: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2
    vocab: int = 256


class Attention(nn.Module):
    """Causal self-attention over ``[batch, time, width]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]  # a Module returns Any


class Layer(nn.Module):
    """One pre-norm transformer layer: attention, then a perceptron four times as wide."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(shape.width, bias=False), Attention(shape))
        self.think = nn.Sequential(
            nn.LayerNorm(shape.width, bias=False),
            nn.Linear(shape.width, 4 * shape.width, bias=False),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * shape.width, shape.width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.think(x)  # type: ignore[no-any-return]  # a Module returns Any


class GPT(nn.Module):
    """Maps bytes ``[batch, time]`` to fp32 logits ``[batch, time, vocab]`` of the byte that follows each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Parameter(torch.empty(shape.block, shape.width))
        self.layers = nn.Sequential(*(Layer(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions[: tokens.shape[1]]
        # Compiled weights are bf16, and so are the logits; the softmax over them is not.
        return self.head(self.norm(self.layers(x))).float()  # type: ignore[no-any-return]  # a Module returns Any
