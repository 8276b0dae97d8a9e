"""What a step of AdamW is estimated to take on Trainium: by strategy, for a billion parameters, and for a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from textwrap import fill

from collage_neuron.numerics.strategies import DEFAULT, STRATEGIES, bytes_with_adam
from collage_neuron.passes.backends.nki.bodies import calibrated, time_of, with_bodies
from collage_neuron.passes.backends.nki.cost import ADAMW_BF16, Estimate
from collage_neuron.passes.backends.nki.emit import Work
from collage_neuron.passes.backends.nki.hardware import PARTITIONS, TARGETS
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.ir.update import Update

PARAMETERS = 1e9
"""The parameters on a core for which `summary` has times."""

ERRORS = {
    "bf16": ("1.0", "1.0"), "light": ("1.8e-1", "9.9e-1"), "plus": ("3.2e-3", "9.9e-1"), "full": ("3.1e-3", "9.9e-1"),
    "fp32": ("3.4e-5", "6.0e-2"), "fp32_states": ("1.0", "1.0"),
    "stochastic": ("4.9e-1", "2.6e1"), "stochastic_states": ("5.0e-1", "2.6e1"),
    "split444": ("3.4e-5", "6.0e-2"), "split433": ("4.1e-5", "6.0e-2"), "split423": ("1.1e-4", "6.0e-2"),
    "split422": ("1.1e-3", "6.0e-2"), "split323": ("9.3e-3", "1.0"), "split322": ("9.3e-3", "1.0"),
    "split412": ("3.5e-2", "7.1e-2"), "split312": ("3.5e-2", "1.0"), "split311": ("8.9e-2", "1.0"),
}  # fmt: skip
"""What docs/strategies.md has in the columns `error at 1e-4` and `fine-tuning`."""

HEAD = """\
AdamW on Trainium: milliseconds of optimizer.step() for a billion parameters on one core. Estimates by a cost model:
no kernel of ours has run on a device. In brackets what limits the step: memory, or a part of the core, and the time of
that part as a multiple of the memory's.
"""

FOOT = """
bytes: of a parameter, its bf16 gradient and its two states.
error, fine-tuning: how far AdamW's weights end from those of float64, as a fraction of the way that they moved: the
largest found at learning rate 1e-4, and at those of fine-tuning (6e-7 to 1e-5). 1.0: no update arrived; more: roundings
moved the weights further than that. Measured on CPUs: docs/accuracy.md.
strategy: the digits of split433 and its like are the bytes of weight, first and second moment. plus, light and full
keep pairs of bf16 (the paper's); the two stochastic ones round stochastically; bf16 keeps no more; fp32 has master
weights and fp32 states, fp32_states only these.
limits: vector, scalar and gpsimd are the engines of a core. psum port: PSUM is a small memory on the chip, at which
vector and scalar take turns on trn1; the time of both there.

From AWS's documentation: clocks, and cycles of each instruction. Inferred: cycles of GpSimd (trn2, trn3).
Measured by others: bandwidth, on trn1 by a user, on trn2 by AWS with its own AdamW; for trn3 the same share is assumed.
Assumed: computing and moving overlap fully. The loops of a whole model's step (Llama-7B) add 3 to 10 %, and 40 to 90 %
where words are shared by blocks (split423 and smaller).
docs/kernels.md has tables of engines, a model's step, formats and monitored steps, with the meaning of each column, and
what the least certain figures change."""


def summary(update_of: Callable[[str], Update], names: Iterable[str] = STRATEGIES) -> Iterator[str]:
    """Lines for a terminal: the time of a step by strategy and target, where the figures are from, a conclusion."""
    yield HEAD
    yield _line("strategy", "bytes", ("error at 1e-4", "fine-tuning"), TARGETS)
    times: dict[str, list[float]] = {}
    for name in sorted(names, key=bytes_with_adam, reverse=True):
        found = [calibrated(lower_to_nki(update_of(name), target)) for target in TARGETS]
        times[name] = [_milliseconds(cost) for cost in found]
        yield _line(name, bytes_with_adam(name), ERRORS[name], map(_cell, found))
    measured = ADAMW_BF16.milliseconds * ADAMW_BF16.cores * PARAMETERS / ADAMW_BF16.elements
    yield (
        f"\nCalibration: AWS measured {measured:.0f} ms on trn2 with its own fused AdamW, of bf16 states. The "
        "bandwidth\nof the estimates is taken from that time, so bf16 on trn2 has it again: it does not confirm them."
    )
    yield _conclusion(times)
    yield FOOT


def _line(strategy: str, size: object, errors: Iterable[str], cells: Iterable[str]) -> str:
    columns = [f"{strategy:<17}{size:>6}", *(f"{e:>13}" for e in errors), "", *(f"{c:<21}" for c in cells)]
    return " ".join(columns).rstrip()


def _milliseconds(cost: Estimate) -> float:
    return cost.whole * cost.memory * PARAMETERS / PARTITIONS / 1e6


def _cell(cost: Estimate) -> str:
    slower = max(cost.times.values()) / cost.transfer
    return f"{_milliseconds(cost):5.0f} ({'memory' if slower <= 1 else f'{cost.bound}, {slower:.1f}'})"


def _conclusion(times: Mapping[str, Sequence[float]]) -> str:
    """How long steps take, compared with those of fp32 masters on the same target."""
    small = [name for name in times if bytes_with_adam(name) < bytes_with_adam(DEFAULT) and name.startswith("split")]

    def over(names: Iterable[str]) -> str:
        ratios = [a / b for name in names for a, b in zip(times[name], times["fp32"], strict=True)]
        return f"{min(ratios):.1f} to {max(ratios):.1f}"

    return (
        f"Conclusion: a step of {DEFAULT}, the default, should take {over([DEFAULT])} times as long as one of fp32, of "
        f"plus\n{over(['plus'])} times, and of the split strategies with fewer bytes {over(small)} times."
    )


Shapes = list[tuple[int, ...]]
KernelOf = Callable[[str, str], Kernel]
"""The kernel of AdamW under a strategy, for a target."""


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


def works_of(kernel: Kernel, shapes: Shapes) -> list[Work]:
    """What the kernel of a step does for parameters of these shapes."""
    return [Work(kernel, math.prod(shape), kernel.cut(shape)) for shape in shapes]


TITLED = {"gpt2": "GPT-2", "llama-7b": "Llama-7B"}
"""Names of the presets in a sentence."""


def answer(model: str, strategy: str, kernel_of: KernelOf) -> str:
    """The times of a step on one core of each target, in ms: one sentence, beside those of fp32 master weights."""
    times, masters = (milliseconds(name, shapes_of(model), kernel_of) for name in (strategy, "fp32"))
    elements = sum(map(math.prod, shapes_of(model)))
    size = f"{elements / 1e6:,.0f} M" if elements >= 1e6 else f"{elements:,} parameters"
    beside = f"; fp32 master weights: {_by_target(masters)}" * (strategy != "fp32")
    own = _by_target(times, " on 1 core of ")
    said = f"{TITLED.get(model, 'these shapes')} ({size}), one step of AdamW under {strategy}: {own}{beside}."
    return fill(f"{said[0].upper()}{said[1:]} Estimates by a cost model; nothing has run on a device.", 118)


def _by_target(times: Mapping[str, float], on: str = " on ") -> str:
    (target, first), *others = times.items()
    return ", ".join([f"{first:.3g} ms{on}{target}", *(f"{x:.3g} on {other}" for other, x in others)])


def milliseconds(strategy: str, shapes: Shapes, kernel_of: KernelOf) -> dict[str, float]:
    """The estimated time of AdamW's step on one core of each target, in the newer dialect."""
    kernels = {target: kernel_of(strategy, target).in_dialect("nki") for target in TARGETS}
    return {target: sum(map(time_of, with_bodies(works_of(k, shapes)))) / 1e6 for target, k in kernels.items()}
