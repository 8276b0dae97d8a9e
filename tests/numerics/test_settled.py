"""The words of states that begin as constants, and of large tensors, are those of the values, encoded as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from collage_neuron.numerics.formats import FORMATS
from collage_neuron.states import word_encoding


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def assert_same_words(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype, one.is_contiguous()) == (other.shape, other.dtype, True)
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(5,), (3, 70), (2, 3, 40), (0, 4), (4, 0), (2, 257)])
@pytest.mark.parametrize("fill", [0.0, -0.0, 1.0, 0.1, 1e-30, 3e4, -0.1])
def test_a_constant_has_the_words_of_a_full_tensor(name: str, shape: tuple[int, ...], fill: float) -> None:
    fmt = FORMATS[name]
    if fill < 0 and not fmt.signed:
        pytest.skip("it has no sign")
    wanted = word_encoding.settled(fmt, "s", torch.full(shape, fill))
    assert_same_words(word_encoding.settled_constant(fmt, "s", fill, shape), wanted)


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if not fmt.is_coded])
def test_a_large_tensor_is_encoded_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_encoding, "_AT_ONCE", 100)
    x = torch.randn(7, 43, generator=torch.Generator().manual_seed(0)) * 3
    for values in (x, x.T, x[:, ::2], x[:1, :1]):
        wanted = word_encoding.encode(
            FORMATS[name], "s", word_encoding.decode(FORMATS[name], word_encoding.encode(FORMATS[name], "s", values))
        )
        found = word_encoding.settled(FORMATS[name], "s", values)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, wanted, strict=True))
