"""The kernel of a step for the parameters of a model: its instructions, its lines of source, and its estimated time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from textwrap import fill
from typing import NamedTuple

from collage_neuron.passes.backends.nki.bodies import Count, Work, calibrated, count_as, time_of, with_bodies
from collage_neuron.passes.backends.nki.cost import ADAMW_BF16, CALIBRATED
from collage_neuron.passes.backends.nki.emit import Call, step_text
from collage_neuron.passes.backends.nki.hardware import PARTITIONS, TARGETS
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


class Size(NamedTuple):
    """The kernel of a step on parameters of some shapes."""

    instructions: Count
    lines: int
    tiles: int
    """The most tiles that are updated in a turn of a loop."""
    time: float
    """Nanoseconds, by the calibrated figures."""
    bound: float
    """Those of its DMAs alone, at the bandwidth that is reached."""


def size_of(kernel: Kernel, shapes: Shapes, cores: int = 1) -> Size:
    """The instructions of one step's kernel for parameters of these shapes, its lines of source, and its time.

    With two physical cores in a logical one instructions are those of the core with more of them.
    """
    numbers = Count(1, 1) if kernel.columns else Count(0, 0)
    works = with_bodies(_works(kernel, shapes))
    count = reduce(Count.plus, (count_as(kernel, work.total, work.cut, cores) for work in works), numbers)
    calls = [Call(0, 0, work.total, work.cut) for work in works]
    lines = len(step_text("collage_step", [kernel.design], calls, kernel.dialect).splitlines())
    bound = calibrated(kernel).transfer * sum(work.total for work in works) / PARTITIONS / cores
    time = sum(time_of(work, cores=cores) for work in works)
    return Size(count, lines, max(w.cut.tiles * w.beside for w in works), time, bound)


def _works(kernel: Kernel, shapes: Shapes) -> list[Work]:
    return [Work(kernel, math.prod(shape), kernel.cut(shape)) for shape in shapes]


TITLES = (
    "kernel", "target", "dialect", "cores", "parameters", "tensors", "traced", "unrolled", "lines", "tiles", "ms",
    "ratio",
)  # fmt: skip


def rows(kernels: Sequence[Kernel], shapes: Shapes, shares: Sequence[int] = SHARES) -> list[tuple[str, ...]]:
    """A row for each kernel and number of cores."""
    found = []
    for kernel in kernels:
        for cores in shares:
            mine = divided(shapes, cores)
            size = size_of(kernel, mine)
            elements = sum(map(math.prod, mine))
            numbers = (cores, elements, len(mine), *size.instructions, size.lines, size.tiles)
            times = (f"{size.time / 1e6:.2f}", f"{size.time / size.bound:.2f}")
            found.append((kernel.name, kernel.target, kernel.dialect, *(f"{n:,}" for n in numbers), *times))
    return found


HEAD = f"""\
Each row is what one core does in a step, where so many cores share every tensor.
parameters, tensors: what that core has. lines: those of the kernel's source.
traced: the instructions of the kernel that a compiler reads; unrolled: those that the core executes. In the dialect nki
the device runs loops, so that no more than {TARGETS["trn1"].instructions:,} are traced; in beta1 compilers unroll them.
tiles: a tile is up to 128 lines of a tensor; so many at most are updated in one turn of a loop.
ms: the estimated time, with {CALIBRATED.barrier / 1e3:.0f} us for each turn, no overlap between turns, and \
{CALIBRATED.start:.0f} ns to begin each transfer (DMA).
ratio: that time over the time of the transfers alone; at 1.00 memory would be the limit.
"""

TITLED = {"gpt2": "GPT-2", "llama-7b": "Llama-7B"}
"""Names of the presets in a sentence."""


def answer(model: str, strategy: str, times: Mapping[str, float], masters: Mapping[str, float]) -> str:
    """The times of a step on one core of each target, in ms: one sentence, beside those of fp32 master weights."""
    elements = sum(map(math.prod, shapes_of(model)))
    size = f"{elements / 1e6:,.0f} M" if elements >= 1e6 else f"{elements:,} parameters"
    beside = f"; fp32 master weights: {_by_target(masters)}" * (strategy != "fp32")
    own = _by_target(times, " on 1 core of ")
    said = f"{TITLED.get(model, 'these shapes')} ({size}), one step of AdamW under {strategy}: {own}{beside}."
    return fill(f"{said[0].upper()}{said[1:]} Estimates by a cost model; nothing has run on a device.", 118)


def _by_target(times: Mapping[str, float], on: str = " on ") -> str:
    (target, first), *others = times.items()
    return ", ".join([f"{first:.3g} ms{on}{target}", *(f"{x:.3g} on {other}" for other, x in others)])


MODEL, CORES = "llama-7b", 8
"""The model whose step `step_row` estimates, and the cores that share each of its tensors."""

STEP_TITLES = (
    f"AdamW, {MODEL}, a core of {CORES}", "target", "instructions traced", "ms", "ratio", "a tile a turn", "engines",
    "bound by", "LNC 2: traced", "ms",
)  # fmt: skip


def step_row(name: str, kernel: Kernel) -> list[str]:
    """A row of Markdown cells: the step of a strategy, by its kernel in the newer dialect.

    `ratio` is its time over that of its DMAs alone, at the bandwidth reached; so are that of loops with a tile of
    one parameter in a turn and that of the busiest engine. At the end what a logical core of two cores has, which takes
    twice the share of each tensor.
    """
    whole = MODELS[MODEL]()
    shapes = divided(whole, CORES)
    size, column = size_of(kernel, shapes), calibrated(kernel)
    single = sum(map(time_of, _works(kernel, shapes)))
    engines = max(column.times.values()) / column.transfer
    ratios = (f"{x:.2f}" for x in (size.time / size.bound, single / size.bound, engines))
    traced, time = f"{size.instructions.traced:,}", f"{size.time / 1e6:.2f}"
    bound, logical = column.bound if engines > 1 else "memory", ["", ""]
    if (cores := kernel.design.generation.cores) > 1:
        two = size_of(kernel, divided(whole, CORES // cores), cores)
        logical = [f"{two.instructions.traced:,}", f"{two.time / 1e6:.2f}"]
    return [f"`{name}`", kernel.target, traced, time, *ratios, bound, *logical]


def measured_row() -> list[str]:
    """The same of the kernel that AWS measured, which has plain bf16 states: scaled to as many parameters."""
    elements = sum(map(math.prod, divided(MODELS[MODEL](), CORES)))
    time = ADAMW_BF16.milliseconds * ADAMW_BF16.cores * elements / ADAMW_BF16.elements
    return ["AWS's fused AdamW, bf16 (measured)", "trn2", "", f"{time:.2f}", "1.00", "", "", "memory", "", ""]
