"""Words in memory and the values of a tensor: a word of a block layout is shared by K consecutive elements of a row.

Formats and graphs have one word per element everywhere (`numerics.formats`). In memory a block has one word: its tensor
has the shape of the parameter, or of its local shard, but for the last dimension. Blocks never cross a row, and the
last one of a row may be shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from collage_neuron.numerics.block_formats import first_of_each, spread
from collage_neuron.numerics.formats import Component, Format


def shape_of(component: Component, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the words of a component for values of `shape`."""
    if component.block is None:
        return tuple(shape)
    *rows, n = shape or (1,)
    return (*rows, -(-n // component.block))


def bytes_of(formats: Mapping[str, Format]) -> int:
    """Bytes per element of a parameter and its states in `formats`, without the words that blocks share."""
    return sum(c.bytes for fmt in formats.values() for c in fmt.components if c.block is None)


def encode(fmt: Format, name: str, x: torch.Tensor) -> list[torch.Tensor]:
    """The words of the fp32 tensor `x`, the value called `name`, as they are in memory."""
    if fmt.is_coded and x.numel() == 0:  # there is no maximum of nothing
        return [torch.empty(shape_of(c, x.shape), dtype=c.type.dtype, device=x.device) for c in fmt.components]
    if _needs_host(fmt, x.device):
        return [word.to(x.device) for word in encode(fmt, name, x.cpu())]
    words = zip(fmt.encoder(name)(x), fmt.components, strict=True)
    return [word if c.block is None else first_of_each(word, c.block).contiguous() for word, c in words]


def of_each(fmt: Format, words: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The words of each element, from those in memory."""
    each = zip(words, fmt.components, strict=True)
    return [word if c.block is None else spread(word, c.block, words[0].shape[-1]) for word, c in each]


def decode(fmt: Format, words: Sequence[torch.Tensor], name: str = "state") -> torch.Tensor:
    """The fp32 tensor, the value called `name`, that words in memory stand for."""
    device = words[0].device
    if _needs_host(fmt, device):
        return decode(fmt, [word.cpu() for word in words], name).to(device)
    decoder = fmt.decoder(name if limits(device) else "state")
    value: torch.Tensor = decoder(of_each(fmt, words) if fmt.is_coded else words)
    return value


def limits(device: torch.device) -> bool:
    """Returns True where `decode` limits low words of parameters that a write made stale; steps do on each device."""
    # torch_xla runs views of bits on the host, by which the limit is computed: there words are read as they are.
    return device.type != "xla"


def _needs_host(fmt: Format, device: torch.device) -> bool:
    """Returns True where operations of torch_xla may give another value than those of the CPU.

    A device may add 32-bit integers in fp32 (trn1), and a compiler leave out a rounding that only a comparison reads.
    Views of bits run on the host anyway.
    """
    return device.type == "xla" and len(fmt.components) > 1 and any(c.storage != "bf16" for c in fmt.components)


def of_elements(index: torch.Tensor, block: int, shape: Sequence[int]) -> torch.Tensor:
    """The row-major indices of the shared words of the elements with the indices `index` of a tensor of `shape`."""
    n = shape[-1]
    return index // n * -(-n // block) + index % n // block


def settled(fmt: Format, name: str, x: torch.Tensor) -> list[torch.Tensor]:
    """The words of `x`, encoded twice: those of the value that they stand for.

    Splitting an fp32 value may leave a low word at exactly half an ulp of the high word. A later step that changes
    nothing would then split it differently; what was encoded once more stays.
    """
    if fmt.is_coded or x.numel() <= _AT_ONCE or not x.is_contiguous():
        return _settled(fmt, name, x)
    parts = [_settled(fmt, name, part) for part in x.view(-1).split(_AT_ONCE)]
    return [torch.cat(of_parts).view(x.shape) for of_parts in zip(*parts, strict=True)]


def settled_constant(fmt: Format, name: str, value: float, shape: Sequence[int]) -> list[torch.Tensor]:
    """`settled` for a tensor of `shape` whose elements are all `value`: what one element has, all blocks have."""
    filled = torch.full((1,), value, dtype=torch.float32, device="cpu")
    words = zip(_settled(fmt, name, filled), fmt.components, strict=True)
    whole = torch.contiguous_format
    return [word.reshape(()).expand(shape_of(c, shape)).clone(memory_format=whole) for word, c in words]


_AT_ONCE = 1 << 18
"""Elements for which the numbers in between fit into a cache."""


def _settled(fmt: Format, name: str, x: torch.Tensor) -> list[torch.Tensor]:
    return encode(fmt, name, decode(fmt, encode(fmt, name, x), name))
