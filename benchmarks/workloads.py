"""What is stepped: one tensor, or the 148 tensors of GPT-2 small."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """Parameter shapes under a name."""

    name: str
    shapes: tuple[Shape, ...]

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes))

    def __str__(self) -> str:
        return f"{self.name}: {self.parameters:,} parameters in {len(self.shapes)} tensor(s)"


def one_tensor(size: int) -> Workload:
    return Workload("one tensor", ((size,),))


def gpt2_small(scale: float) -> Workload:
    """GPT-2 small's parameters, embeddings tied: 124 M at scale 1; scaled are the width and the rows."""
    d, vocabulary, positions = (max(1, round(scale * n)) for n in (768, 50257, 1024))
    block: tuple[Shape, ...] = (
        *((d,), (d,)),  # layer norm
        *((3 * d, d), (3 * d,), (d, d), (d,)),  # attention
        *((d,), (d,)),  # layer norm
        *((4 * d, d), (4 * d,), (d, 4 * d), (d,)),  # the two linear maps
    )
    return Workload(f"GPT-2 small x {scale:g}", ((vocabulary, d), (positions, d), *block * 12, (d,), (d,)))
