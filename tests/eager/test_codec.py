"""Conversions by backends: the words that each format's own functions make, and the values that they read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collage_neuron.eager import codec
from collage_neuron.numerics.formats import FORMATS, Format
from collage_neuron.passes.backends.protocol import Backend
from collage_neuron.passes.backends.registry import choose
from collage_neuron.states import word_encoding

CPU = torch.device("cpu")


def tensor() -> torch.Tensor:
    """Numbers of all sizes, ties of bf16 among them, in rows that no block divides."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 300, generator=g) * torch.exp2(torch.randint(-60, 60, (6, 300), generator=g).float())
    x[0, :100] = torch.arange(100) / 256 + 1 + 2**-9
    x[1, :4] = torch.tensor([0.0, -0.0, 2.0**-126, 3.0e38])
    return x


def encoded(backend: Backend, *given: Any) -> None:
    conversions = codec.Conversions()
    conversions.encode(backend, *given)
    conversions.run()


def decoded(backend: Backend, *given: Any) -> None:
    conversions = codec.Conversions()
    conversions.decode(backend, *given)
    conversions.run()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["param", "momentum"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_words_and_values_are_those_of_the_format(fmt: Format, name: str, backend: str) -> None:
    runner, x = choose(backend, CPU), tensor() if fmt.signed else tensor().abs()
    made, back = codec.empty_words(fmt, x), torch.empty_like(x)
    encoded(runner, fmt, name, x, made, [1, 2, 3, 0])
    decoded(runner, fmt, made, back)
    assert torch.equal(back.view(torch.int32), word_encoding.decode(fmt, made).view(torch.int32))
    if fmt.draw is None:
        assert all(map(same_bits, made, word_encoding.settled(fmt, name, x)))
        again = codec.empty_words(fmt, x)
        encoded(runner, fmt, name, back, again, [1, 2, 4, 0])
        assert all(map(same_bits, made, again))


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def test_nothing_is_converted_to_nothing() -> None:
    for fmt in FORMATS.values():
        x = torch.empty(0, 5)
        made = codec.empty_words(fmt, x)
        encoded(choose("auto", CPU), fmt, "param", x, made, [0, 0, 0, 0])
        assert [w.numel() for w in made] == [0] * len(fmt.components)
