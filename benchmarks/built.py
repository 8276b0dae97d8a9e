"""Builds a contender: parameters, gradients and an optimizer, ready to step, with what a step must read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from contenders import DTYPES, TORCH, Contender, opened, optimizer_of, words
from torch.nn import Parameter
from workloads import Shape

from collage_neuron.passes.backends import registry

COPIED = 11
"""Bytes a parameter that the copy reads, and as many that it writes: what `plus` must move with a bf16 gradient."""


@dataclass
class Kernel:
    """Notes how long a backend runs: the part of a step that is not the host's."""

    seconds: float = 0.0
    """Since it was last set to 0."""
    first: float | None = None
    """Seconds of the first call, in which a backend compiles."""
    looks: bool = True
    """True if it computes `traffic`, until the optimizer has made its states."""
    traffic: int = 0
    """Bytes that the launches of a step must read and write: every used component and the gradient, once."""

    def watch(self, backend: Any) -> None:
        run = backend.run

        def noted(launches: Any) -> Any:
            start = perf_counter()
            result = run(launches)
            taken = perf_counter() - start
            self.seconds += taken
            self.first = taken if self.first is None else self.first
            if self.looks:
                self.traffic = sum(map(_moved, launches))
            return result

        backend.run = noted  # the process is this contender's own


def _moved(launch: Any) -> int:
    """Bytes of the words that a launch reads and writes. Words that blocks share are smaller than the parameter."""
    nodes = launch.update.graph.graph.nodes
    used = {str(n.target) for n in nodes if n.op == "placeholder" and n.users}
    places = [i for i, key in enumerate(launch.update.inputs) if key in used]
    read: int = sum(tensors[i].nbytes for tensors in launch.reads for i in places)
    written: int = sum(t.nbytes for tensors in launch.writes for t in tensors)
    return read + written


@dataclass
class Built:
    """A contender ready to step: `prepare` comes before it, `launch` starts the step and `finish` waits for it."""

    launch: Callable[[], object]
    finish: Callable[[], None]
    kept: int
    """Bytes of parameters, gradients and states."""
    traffic: int
    """Bytes a step must read and write at least: every stored component and the gradient, once."""
    prepare: Callable[[], None] = lambda: None
    kernel: Kernel = field(default_factory=Kernel)
    waits: bool = True
    """True if `launch` returns when the results are there."""


def build(contender: Contender, shapes: Sequence[Shape]) -> Built:
    torch.manual_seed(0)
    if contender.kind == "copy":
        return _build_copy(shapes)
    device, finish = opened(contender.device)
    params = parameters(shapes, device, DTYPES[contender.numbers] if contender.kind == TORCH else torch.bfloat16)
    grads = [p.grad for p in params if p.grad is not None]
    optimizer = optimizer_of(contender, params)
    kernel = Kernel()
    if contender.is_compiled:
        kernel.watch(registry.get(contender.backend))

    def prepare() -> None:  # some peers drop or exchange gradients
        for p, g in zip(params, grads, strict=True):
            p.grad = g

    for _ in range(2):  # the first step may leave out what states are made of
        prepare()
        optimizer.step()
        finish()
    kernel.looks = False
    grad = sum(g.nbytes for g in grads)
    rest = sum(p.nbytes + sum(w.nbytes for w in words(optimizer, p)) for p in params)
    moved = kernel.traffic or grad + 2 * rest  # reads the gradient, reads and writes the rest
    return Built(optimizer.step, finish, grad + rest, moved, prepare, kernel, contender.device == "cpu")


def parameters(
    shapes: Iterable[Shape], device: torch.device | None = None, dtype: torch.dtype = torch.bfloat16
) -> list[Parameter]:
    """Parameters of these shapes with gradients, normally distributed."""
    params = [Parameter(_numbers(s, 0.02, dtype).to(device)) for s in shapes]
    for p in params:
        p.grad = _numbers(p.shape, 1e-3, dtype).to(device)
    return params


def _numbers(shape: Shape, size: float, dtype: torch.dtype) -> torch.Tensor:
    """Normally distributed; a piece at a time, since an fp32 copy of the largest tensor would not fit beside it."""
    made = torch.empty(shape, dtype=dtype)
    for piece in made.view(-1).split(1 << 22):
        piece.copy_(torch.randn(piece.shape) * size)
    return made


def _build_copy(shapes: Sequence[Shape]) -> Built:
    sources = [torch.ones(s, dtype=torch.uint8).repeat(*[1] * (len(s) - 1), COPIED) for s in shapes]
    targets = [torch.zeros_like(s) for s in sources]

    def launch() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    size = 2 * sum(s.nbytes for s in sources)
    return Built(launch, lambda: None, size, size)
