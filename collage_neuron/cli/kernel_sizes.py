"""The sizes of the kernel of a step: instructions and lines of source, for the parameters of a model on one core."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

from collage_neuron.passes.backends.nki.counts import Count, count_of
from collage_neuron.passes.backends.nki.emit import Call, step_text
from collage_neuron.passes.backends.nki.hardware import TARGETS
from collage_neuron.passes.backends.nki.lower import Kernel

Shapes = list[tuple[int, ...]]


def llama_7b() -> Shapes:
    """The parameters of Llama-7B (Touvron et al., 2023): 32 layers of width 4096, MLPs of 11008, 32000 words."""
    width, hidden, words = 4096, 11008, 32000
    layer = [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden), (width,), (width,)]
    return [(words, width), *layer * 32, (width,), (words, width)]


def gpt2() -> Shapes:
    """The parameters of GPT-2 (Radford et al., 2019), 124 M: 12 layers of width 768, 50257 words, 1024 positions."""
    width = 768
    norms = [(width,)] * 4
    layer = [*norms, (width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *layer * 12, (width,), (width,)]


MODELS: Mapping[str, Callable[[], Shapes]] = {"llama-7b": llama_7b, "gpt2": gpt2}
"""Presets by name."""

SHARES = (1, 8, 32)
"""Cores among which each parameter is divided, along its first dimension."""


def shapes_of(model: str) -> Shapes:
    """The shapes of a preset, or of a list such as `4096x4096,4096`.

    Raises:
        ValueError: `model` is neither.
    """
    if model in MODELS:
        return MODELS[model]()
    try:
        shapes = [tuple(int(n) for n in shape.split("x")) for shape in model.split(",")]
    except ValueError:
        shapes = []
    if not shapes or any(n < 1 for shape in shapes for n in shape):
        raise ValueError(f"--model {model}: choose {', '.join(MODELS)}, or give shapes such as 4096x4096,4096")
    return shapes


def divided(shapes: Shapes, cores: int) -> Shapes:
    """What one core has of parameters that are divided along their first dimension, as ZeRO does."""
    return [(-(-shape[0] // cores), *shape[1:]) for shape in shapes]


def size_of(kernel: Kernel, shapes: Shapes) -> tuple[Count, int]:
    """The instructions of one step's kernel for parameters of these shapes, and its lines of source."""
    numbers = Count(1, 1) if kernel.columns else Count(0, 0)
    count = reduce(Count.plus, (count_of(kernel, shape) for shape in shapes), numbers)
    text = step_text(
        "collage_step", [kernel.design], [Call(0, 0, math.prod(s), kernel.cut(s)) for s in shapes], kernel.dialect
    )
    return count, len(text.splitlines())


TITLES = ("kernel", "target", "dialect", "cores", "parameters", "tensors", "traced", "unrolled", "lines")


def rows(kernels: Sequence[Kernel], shapes: Shapes, shares: Sequence[int] = SHARES) -> list[tuple[str, ...]]:
    """A row for each kernel and number of cores."""
    found = []
    for kernel in kernels:
        for cores in shares:
            mine = divided(shapes, cores)
            count, lines = size_of(kernel, mine)
            elements = sum(reduce(int.__mul__, shape, 1) for shape in mine)
            numbers = (cores, elements, len(mine), count.traced, count.unrolled, lines)
            found.append((kernel.name, kernel.target, kernel.dialect, *(f"{n:,}" for n in numbers)))
    return found


HEAD = f"""\
The kernel of one step, on one of so many cores: instructions that a compiler reads (traced) and that run (unrolled),
and lines of source. If a tensor has more than {TARGETS["trn1"].unrolled} whole tiles, they are a loop in the dialect \
nki; in beta1 all are.
"""
