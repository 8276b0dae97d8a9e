"""A step: the kernels of all parameters as one, called once through a functional operator.

Trn1 takes one kernel in a graph (aws-neuron-sdk issue 1311), so a step is one kernel, whatever it has of parameters,
groups and optimizers' states, unless `one_call` of the target says otherwise. The tensors stay where they are: to
collect them in one flat buffer would double the memory, since torch-xla gives a buffer and each of its views a place of
their own.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_neuron.errors import ClampedDivisor, UnsupportedUpdate
from collage_neuron.numerics.storage import storage_of
from collage_neuron.passes.backends.by_parameter import masked
from collage_neuron.passes.backends.nki.custom_op import KEPT, Program, register, update_tensors
from collage_neuron.passes.backends.nki.cut import Cut
from collage_neuron.passes.backends.nki.docstring import MEASURES
from collage_neuron.passes.backends.nki.draws import seed_of
from collage_neuron.passes.backends.nki.emit import Call, step_text
from collage_neuron.passes.backends.nki.hardware import TARGETS
from collage_neuron.passes.backends.nki.lint import lint
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.backends.nki.measured import measure_of, nothing
from collage_neuron.passes.backends.nki.target import Machine, machine_of
from collage_neuron.passes.backends.protocol import Launch, Measure
from collage_neuron.passes.ir.update import Update


@dataclass
class _Part:
    """One parameter's part of a step."""

    launch: int
    kernel: Kernel
    tensors: list[Tensor]
    """In the order of `kernel.arguments`."""
    shape: Sequence[int]
    """That of the parameter."""


class Result(NamedTuple):
    """What a step makes of one parameter."""

    components: Sequence[Tensor]
    """The new ones, in the order of `update.outputs`."""
    measure: Measure | None
    """Its measurements, if its update measures itself."""


def run_step(launches: Sequence[Launch]) -> Iterator[Result]:
    """What a step makes of every parameter, in order; writes none.

    Raises:
        UnsupportedUpdate: an update has an operation for which there is no instruction.
        UnsafeEnvironment: no NKI is installed that can run kernels on the device of the parameters.
    """
    machine = machine_of(launches[0].reads[0][0].device)
    parts = [part for i, launch in enumerate(launches) for part in _parts(i, launch, machine)]
    present = [part for part in parts if part.tensors[0].numel()]  # an empty tensor has nothing to update
    results = _call(launches, present, machine) if present else iter(())
    for part, old in zip(parts, (reads for launch in launches for reads in launch.reads), strict=True):
        update = launches[part.launch].update
        known = dict(zip(update.inputs, old, strict=True))  # what a kernel leaves alone stays what it is
        known |= zip((a.key for a in part.kernel.arguments), part.tensors, strict=True)
        measure = nothing(update, part.tensors[0].device) if update.sums else None
        if part.tensors[0].numel():
            known |= zip(part.kernel.outputs, next(results), strict=True)
            measure = measure_of(update, known[MEASURES]) if update.sums else None
        yield Result([known[key].view(_shape(update, key, old[0])) for key in update.outputs], measure)


def _parts(index: int, launch: Launch, machine: Machine) -> Iterator[_Part]:
    for reads in launch.reads:
        named = zip(launch.update.inputs, masked(launch, reads), strict=True)
        given = {k: _in_hbm(x) for k, x in named}
        kernel = _kernel(launch.update, machine, _storage(given.get("grad")))
        like = given[launch.update.inputs[0]]
        shapes = {a.key: _shape(launch.update, a.key, reads[0]) for a in kernel.arguments}
        if MEASURES in shapes and like.numel():
            shapes[MEASURES] = (kernel.totals(reads[0].shape, kernel.cut(reads[0].shape)),)
        tensors = [given[k] if (k := a.key) in given else _room(a.dtype, like, shapes[k]) for a in kernel.arguments]
        yield _Part(index, kernel, tensors, reads[0].shape)


def _in_hbm(x: Tensor) -> Tensor:
    """A tensor as kernels take it: its elements side by side, and with a dimension at least; no copy is made for it."""
    x = x.detach()
    return x.contiguous() if x.ndim else x.reshape(1)


def _shape(update: Update, key: str, like: Tensor) -> Sequence[int]:
    """The shape of a component of a parameter with a component `like`, which has a word for each element."""
    block = update.blocks.get(key)
    return like.shape if block is None else (*like.shape[:-1], -(-like.shape[-1] // block))


def _storage(grad: Tensor | None) -> str:
    return "bf16" if grad is None else storage_of(grad.dtype).name


def _room(dtype: str, like: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor for a component that the update writes without having read it."""
    return like.new_empty(tuple(shape) or (1,), dtype=getattr(torch, dtype))


@cache
def _kernel(update: Update, machine: Machine, grad: str) -> Kernel:
    return lower_to_nki(update, machine.target, machine.dialect, grad=grad)


def _call(launches: Sequence[Launch], parts: Sequence[_Part], machine: Machine) -> Iterator[list[Tensor]]:
    """The results of each part's kernel, from one call, or one for each group of parts: as the target has it."""
    one = TARGETS[machine.target].one_call
    groups: dict[Any, list[_Part]] = {}
    for part in parts:
        groups.setdefault(() if one else (part.launch, part.kernel, tuple(part.shape)), []).append(part)
    made = {
        id(part): r
        for group in groups.values()
        for part, r in zip(group, _called(launches, group, machine), strict=True)
    }
    yield from (made[id(part)] for part in parts)


def _called(launches: Sequence[Launch], parts: Sequence[_Part], machine: Machine) -> Iterator[list[Tensor]]:
    device = parts[0].tensors[0].device
    inputs = list(dict.fromkeys((part.launch, part.kernel) for part in parts))
    pieces = (
        (part.kernel, inputs.index((part.launch, part.kernel)), math.prod(part.shape), part.kernel.cut(part.shape))
        for part in parts
    )
    key = program_of(machine, tuple(pieces))
    for i, kernel in inputs:
        if kernel.may_clamp(launches[i].vector):
            _warn_of_clamped(kernel)
    scalars = [kernel.scalar_input(launches[i].vector).to(device) for i, kernel in inputs if kernel.columns]
    drawing = [(launches[part.launch].update, launches[part.launch].vector) for part in parts if part.kernel.plan.draws]
    scalars += [seed_of(drawing).to(device)] if drawing else []
    results = iter(update_tensors([t for part in parts for t in part.tensors], scalars, key))
    for part in parts:
        yield [next(results) for _ in part.kernel.outputs]


@cache
def _warn_of_clamped(kernel: Kernel) -> None:
    """Warns once of a kernel that may clamp a divisor: whether it does depends on the gradients."""
    warnings.warn(
        "the update divides by what may be smaller than 2**-42 (2.3e-13), such as a root without an eps of that size, "
        "and kernels for Trainium clamp a divisor to that: steps of elements with such small gradients are too short. "
        "Use a larger eps, or backend='xla'; if no gradient is that small, filter this warning "
        "(collage_neuron.ClampedDivisor)",
        ClampedDivisor,
        stacklevel=2,
    )


def _check(text: str, name: str, dialect: str) -> None:
    """Refuses, before a compiler does, what was generated and is outside the Python that it takes."""
    findings = lint(text, f"{name}.py", dialect)
    if findings:
        raise UnsupportedUpdate(f"the generated kernel is not one that NKI takes: {findings[0]}; use backend='xla'")


def program_of(machine: Machine, pieces: tuple[tuple[Kernel, int, int, Cut], ...]) -> str:
    """The key of the registered program that runs these kernels: each with its scalar input, by number, and its cut."""
    key, program = _program(machine, pieces)
    register(key, program)
    return key


@lru_cache(KEPT)
def _program(machine: Machine, pieces: tuple[tuple[Kernel, int, int, Cut], ...]) -> tuple[str, Program]:
    kernels = list(dict.fromkeys(kernel for kernel, *_ in pieces))
    calls = [Call(kernels.index(kernel), number, total, cut) for kernel, number, total, cut in pieces]
    name = "collage_step"
    text = step_text(name, [kernel.design for kernel in kernels], calls, machine.dialect)
    _check(text, name, machine.dialect)
    arguments = [a for kernel, *_ in pieces for a in kernel.arguments]
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return key, Program(name, text, [i for i, a in enumerate(arguments) if a.written])
