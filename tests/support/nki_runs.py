"""Runs generated kernels as the tests need them: on flat tensors, beside the reference backend."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import nki_backend
import nki_standin
import pytest
import torch
import torch.fx as fx
from planned import plan
from torch import Tensor
from torch_cases import Case, gradients, parameter, weights

import collage_neuron
from collage_neuron.numerics.eft import bf16
from collage_neuron.numerics.strategies import StrategyLike
from collage_neuron.passes.backends.nki import schedule
from collage_neuron.passes.backends.nki.bodies import count_as
from collage_neuron.passes.backends.nki.docstring import MEASURES, Argument
from collage_neuron.passes.backends.nki.lower import Kernel
from collage_neuron.passes.backends.nki.tiling import Cut
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.ir.update import Update
from collage_neuron.states.inner_optimizers import base_of
from collage_neuron.states.store import ensure_stored, record_of

INFINITY = nki_standin.Device(overflow="infinity")
"""A device on which what is beyond bf16 becomes infinite, as on the CPU."""


def search_less(monkeypatch: pytest.MonkeyPatch, steps: int = 300) -> None:
    """Kernels with a short search for the best engines: for tests that make dozens of them."""
    monkeypatch.setattr(schedule, "STARTS", 1)
    monkeypatch.setattr(schedule, "STEPS", steps)


class Step(NamedTuple):
    """An update, the components it is to work on, by key, and its scalar vector."""

    update: Update
    components: dict[str, Tensor]
    vector: Tensor

    def of_size(self, n: int) -> Step:
        """The step on so many elements, which repeat."""
        return self._replace(components={k: x.repeat(-(-n // x.numel()))[:n] for k, x in self.components.items()})

    def by_reciprocals(self) -> Step:
        """The step as Trainium computes it: each quotient a product with a reciprocal."""
        return self._replace(update=by_reciprocals(self.update))

    def expected(self) -> dict[str, Tensor]:
        """What the reference backend makes of the components, by key."""
        results = ReferenceUpdate(self.update)([self.components[key] for key in self.update.inputs], self.vector)
        return dict(zip(self.update.outputs, results, strict=not self.update.sums))


def step_of(
    case: Case, strategy: StrategyLike, arithmetic: str, n: int = 1300, steps: int = 3, measured: bool = False
) -> Step:
    """The step of an optimizer after so many, on n parameters; with `measured` it measures itself."""
    p = parameter(weights((n,)), torch.bfloat16)
    optimizer = collage_neuron.compile(case.of(p), strategy=strategy, arithmetic=arithmetic)
    for gradient in gradients(steps, (n,)):
        p.grad = gradient
        optimizer.step()
    if not steps:
        p.grad = next(iter(gradients(1, (n,))))
    (job,) = plan(base_of(type(optimizer)), optimizer, optimizer.param_groups[0], 0, measured)
    state, fresh = optimizer.state[p], job.recording.captured.fresh
    for name, fmt in job.update.formats.items():
        ensure_stored(p, state, name, fmt, record_of(optimizer, p), fresh.get(name, 0.0))
    tensors = {**state, "param": p.detach(), "grad": p.grad}
    keys = dict.fromkeys([*job.update.inputs, *job.update.outputs])
    drawing = (1, steps, 0, 0) if job.update.draws else ()
    vector = torch.tensor(job.update.scalars.run(job.recording.slots, drawing), dtype=torch.float32)
    return Step(job.update, {key: tensors[key] for key in keys}, vector)


def wild(step: Step, n: int = 6000) -> Step:
    """The step on components of all magnitudes and signs (squares positive), and with scalars that are not special.

    No precondition of an error-free transform holds everywhere, so that next to no rounding changes nothing.
    """
    g = torch.Generator().manual_seed(0)
    components = {}
    for key, like in step.components.items():
        x = torch.randn(n, generator=g) * torch.randint(-6, 7, (n,), generator=g).float().exp2()
        components[key] = (x.abs() if "_sq" in key else x).to(like.dtype)
    entries = []
    for form, _ in step.update.scalars.entries:
        x = torch.rand((), generator=g) * 0.75 + 0.25
        entries.append({"fp32": x, "hi": bf16(x), "lo": bf16(x * 2**-4)}[form])
    return step._replace(components=components, vector=torch.stack(entries))


def by_reciprocals(update: Update) -> Update:
    """The update with each quotient a product with a reciprocal."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(update.graph.graph, {}))
    for node in list(graph.nodes):
        if node.target is operator.truediv and node.args[0] != 1.0:
            x, y = node.args
            with graph.inserting_before(node):
                inverse = graph.call_function(operator.truediv, (1.0, y))
                node.replace_all_uses_with(graph.call_function(operator.mul, (x, inverse)))
            graph.erase_node(node)
    return update.with_body(graph)


class Run(NamedTuple):
    """What a kernel made of its components, by key, and the machine that ran it: the stand-in's."""

    results: dict[str, Tensor]
    machine: nki_standin.Machine


def run(
    kernel: Kernel,
    components: Mapping[str, Tensor],
    vector: Tensor,
    device: nki_standin.Device = INFINITY,
    source: str | None = None,
    cut: Cut | None = None,
    seed: int = 1,
    cores: int = 1,
) -> Run:
    """Runs a kernel (or `source` in its place) on copies of the components, on the stand-in, cut as given.

    On trn1 copies do not add their bias: so no test shows the bits of a kernel that depends on one.
    """
    if kernel.target == "trn1" and not device.drops_bias:
        device = replace(device, drops_bias=("copy",))
    with TemporaryDirectory() as folder, nki_standin.install(kernel.dialect, kernel.target, device) as machine:
        path = Path(folder) / f"{kernel.name}.py"
        path.write_text(source or kernel.source)
        function = getattr(nki_standin.load(path), kernel.name)
        function = function[cores] if cores > 1 else function
        found = Run(called(kernel, function, components, vector, cut, range(seed, seed + 2 * cores, 2)), machine)
        text = path.read_text()
    if nki_backend.backend() == "real" and replace(device, drops_bias=()) == INFINITY and not kernel.plan.draws:
        require_vendors_bits(kernel, text, found.results, components, vector, cut)
    return found


def require_vendors_bits(
    kernel: Kernel,
    text: str,
    found: Mapping[str, Tensor],
    components: Mapping[str, Tensor],
    vector: Tensor,
    cut: Cut | None,
) -> None:
    """Raises AssertionError where the vendor's simulator, if it has the dialect, makes something else of a kernel.

    Not compared: the order of a sum for a monitor, and the bits of a NaN, which are documented nowhere.
    """
    if kernel.dialect not in nki_backend.dialects():
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{kernel.name}.py"
        path.write_text(text)
        with nki_backend.simulated(getattr(nki_standin.load(path), kernel.name), kernel.target) as function:
            simulated = called(kernel, function, components, vector, cut)
    one_nan = [{k: x.nan_to_num(nan=7.0) if x.is_floating_point() else x for k, x in r.items() if k != MEASURES}
               for r in (found, simulated)]  # fmt: skip
    assert not (wrong := differing(*one_nan)), f"nki.simulate and the stand-in differ in {kernel.name}: {wrong}"


def called(
    kernel: Kernel,
    function: Callable[..., Any],
    components: Mapping[str, Tensor],
    vector: Tensor,
    cut: Cut | None = None,
    seeds: Sequence[int] = (1,),
) -> dict[str, Tensor]:
    """What `function`, which is the kernel, makes of copies of the components, by key; they lie flat in its memory."""
    shapes = [components[a.key].shape if a.key in components else None for a in kernel.arguments]
    rows = next(s for s, a in zip(shapes, kernel.arguments, strict=True) if s is not None and not a.block)
    given = [components[a.key].clone() if a.key in components else unread(components, a) for a in kernel.arguments]
    if kernel.arguments[-1].key == MEASURES:
        given[-1] = torch.full((kernel.totals(rows, cut or kernel.cut(rows)),), torch.nan)
        shapes[-1] = given[-1].shape
    numbers = [kernel.scalar_input(vector)] if kernel.plan.columns else []
    numbers += [torch.tensor([list(seeds)], dtype=torch.int32)] if kernel.plan.draws else []
    results = function(*given, *numbers, *kernel.cut_arguments(math.prod(rows), cut or kernel.cut(rows)))
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == len(kernel.outputs)
    written = [i for i, a in enumerate(kernel.arguments) if a.written]
    for result, i in zip(results, written, strict=True):
        assert torch.equal(bits(result), bits(given[i])), "a result is not what its argument became"
    of_results = [shapes[i] or rows for i in written]
    return {k: x.view(shape) for k, x, shape in zip(kernel.outputs, results, of_results, strict=True)}


def unread(components: Mapping[str, Tensor], argument: Argument) -> Tensor:
    """What a kernel may write to and does not read."""
    assert not argument.read
    return torch.full_like(next(iter(components.values())), 7.0, dtype=getattr(torch, argument.dtype))


def narrowed(kernel: Kernel, shape: Sequence[int], columns: int, chunk: int) -> Cut:
    """How a kernel with smaller tiles cuts tensors, so that small tensors take many."""
    small = replace(kernel, tiling=replace(kernel.tiling, columns=columns, chunk=chunk))
    return small.cut(shape)


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor as integers: -0 is not 0."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def differing(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, int]:
    """How many elements of each component differ in a bit, where any do."""
    return {k: n for k in found if (n := int((bits(found[k]) != bits(wanted[k])).sum()))}


def count_of(kernel: Kernel, shape: Sequence[int], cut: Cut | None = None, cores: int = 1) -> int:
    """The instructions that update a parameter of a shape, on the last core; without those that load its numbers."""
    return count_as(kernel, math.prod(shape), cut or kernel.cut(shape), cores)
