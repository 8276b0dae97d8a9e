"""Words of blocks, and roundings to narrow types, as HLO: the numbers of PyTorch, for any shape and any tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from exact import graph_of, on_reference, on_xla
from torch import Tensor

from collage_neuron.numerics.eft import narrow, widen
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.passes.backends.xla.hlo import Computation, Instruction, Shape
from collage_neuron.passes.backends.xla.lower import user_computation
from collage_neuron.passes.backends.xla.nodes import gather, reduced, spread, words_of
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.ir.verify import verify

torch_xla = pytest.importorskip("torch_xla")

SPECIAL = [0.0, -0.0, 1e-40, -3e-39, 2.0**-126, float("inf"), -float("inf"), float("nan"), 3.4e38]
SHAPES = [(1,), (127,), (128,), (129,), (5,), (3, 256), (3, 300), (2, 3, 130), (4, 1), (0,), (2, 0), (0, 130), (257, 3)]


def run(
    x: Tensor, device: torch.device, body: Callable[[Computation, Instruction], Sequence[Instruction]]
) -> list[Tensor]:
    """What `body` makes of an fp32 tensor, on XLA."""
    hlo = Computation("case")
    module = hlo.module(body(hlo, hlo.parameter(Shape("f32", tuple(x.shape)))))
    results = user_computation(module)([x.to(device)], 0)
    torch_xla.sync()
    return [r.cpu() for r in results]


def numbers(shape: tuple[int, ...]) -> Tensor:
    """Random numbers of 40 binades, a special one in every eighth place."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-20, 20, shape, generator=g).float())
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=g)]
    return torch.where(torch.rand(shape, generator=g) < 1 / 128, special, x)


def by_hand(x: Tensor, k: int) -> Tensor:
    """The maximum of each block, given to its elements: block by block."""
    out = torch.empty_like(x)
    for start in range(0, x.shape[-1], k):
        block = x[..., start : start + k].abs()
        out[..., start : start + k] = block.amax(-1, keepdim=True)
    return out


def bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


@pytest.mark.parametrize("k", [128, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_words_are_stored_and_read(xla: torch.device, shape: tuple[int, ...], k: int) -> None:
    x = numbers(shape)
    words, read = run(x, xla, lambda hlo, v: [gather(hlo, v, k), spread(hlo, gather(hlo, v, k), shape, k)])
    assert tuple(words.shape) == words_of(shape, k)
    assert torch.equal(bits(words), bits(x[..., ::k]))
    assert torch.equal(bits(read), bits(x[..., ::k].repeat_interleave(k, -1)[..., : shape[-1]]))


def store_and_read(name: str) -> Update:
    """x as a format stores it, and what it had stored as fp32."""
    fmt = FORMATS[name]

    def body(*given: Any) -> list[Any]:
        *words, x = given
        return [*fmt.encode(widen(x)), narrow(fmt.decode(words), "fp32")]

    inputs = [*fmt.keys("state"), "x"]
    graph = graph_of(inputs, body)
    outputs = (*fmt.keys("state"), "read")
    update = Update.elementwise(graph, tuple(inputs), outputs, ScalarProgram(), {"state": fmt})
    verify(update)
    return update


CODED = [name for name, fmt in FORMATS.items() if any(c.block for c in fmt.components)]


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("shape", [(129,), (3, 300), (2, 3, 130), (0, 130), (257, 3)])
def test_a_format_of_blocks_has_the_references_words(xla: torch.device, name: str, shape: tuple[int, ...]) -> None:
    """Twice: then it reads what it has stored. Of a block with NaN or Inf only the scale is defined."""
    update = store_and_read(name)
    x = numbers(shape)
    x = torch.where(x.abs() < 2.0**-126, 0.0, x)  # XLA's CPU device makes such numbers 0
    finite = by_hand(x, 128).isfinite()
    stored = on_reference(update, [*empty_words(name, shape), x])[:-1]
    for words in (empty_words(name, shape), stored):
        expected, found = on_reference(update, [*words, x]), on_xla(update, [*words, x])
        assert [(w.shape, w.dtype) for w in found] == [(w.shape, w.dtype) for w in expected]
        for e, f in zip(expected, found, strict=True):
            same = (e == f) | (e != e) & (f != f)
            assert (same | ~finite if e.shape == finite.shape else same).all()


def empty_words(name: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Words of zeros."""
    components = FORMATS[name].components
    return [torch.zeros(words_of(shape, c.block) if c.block else shape, dtype=c.type.dtype) for c in components]


# The types, and (exponent bits, mantissa bits) of each.
NARROW = {torch.float16: (5, 10), torch.float8_e5m2: (5, 2), torch.bfloat16: (8, 7)}


@pytest.mark.parametrize("dtype", NARROW)
def test_all_words_of_a_narrow_type_and_what_lies_between_them(xla: torch.device, dtype: torch.dtype) -> None:
    """Subnormal words too, which reduce-precision alone makes 0."""
    words = torch.arange(1 << 8 * dtype.itemsize).to(torch.int16 if dtype.itemsize == 2 else torch.uint8)
    values = words.view(dtype).float()
    values = values[values.isfinite() & ((values == 0) | (values.abs() >= 2.0**-126))].sort().values.unique()
    between = (values[1:].double() + values[:-1].double()).div(2).float()
    near = [torch.nextafter(between, torch.full_like(between, to)) for to in (torch.inf, -torch.inf)]
    x = torch.cat([values, between, *near, torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30, -0.0])])
    x = x[(x == 0) | ~(x.abs() < 2.0**-126)]  # what XLA flushes
    (found,) = run(x, xla, lambda hlo, v: [reduced(hlo, v, *NARROW[dtype])])
    assert torch.equal(bits(found), bits(x.to(dtype).float()))
