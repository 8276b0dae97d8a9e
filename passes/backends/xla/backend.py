"""The XLA backend: every parameter's update is one user computation on its torch_xla device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import cast

import torch

from collage_neuron import torch_privates
from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.numerics.formats import BY_ELEMENT
from collage_neuron.numerics.reductions import ENDINGS
from collage_neuron.passes.backends.protocol import AUTO, ByParameter, Launch, Measure
from collage_neuron.passes.backends.xla.compilers import BY_KIND
from collage_neuron.passes.backends.xla.hlo import Computation
from collage_neuron.passes.backends.xla.lower import Own, XlaUpdate, stored
from collage_neuron.passes.ir.stage import REDUCTION
from collage_neuron.passes.ir.update import Update

DOUBLES = frozenset({"CPU"})
"""The kinds of torch_xla's devices that add fp64 numbers as `numerics.reductions` does. Neuron's have no fp64, and
TPUs make it of two fp32 numbers."""


class Xla(ByParameter):
    """Runs updates on torch_xla devices of any kind, in what the kind's compiler supports (`compilers`)."""

    devices = ("xla",)
    layouts = frozenset({BY_ELEMENT, f"block:{BLOCK}"})
    measures = True
    draws = True
    reduces = True
    sees_as = True
    reshapes = True

    def __init__(self, form: type[Computation] | None = None, name: str = "xla") -> None:
        """`form` is that for the compiler of this process's devices unless it is given."""
        self._given, self.name = form, name
        self._graphs: dict[torch.device, tuple[torch.Tensor, int]] = {}
        """A tensor of ours in the lazy graph of a device, and how many nodes this has."""

    @cached_property
    def form(self) -> type[Computation]:
        """How computations are written."""
        return self._given or BY_KIND.get(kind_of_devices() or "", Computation)

    def supports(self, update: Update) -> str | None:
        """As of each backend; sums need a device with fp64."""
        return super().supports(update) or _without_doubles(update)

    def lower(self, update: Update) -> XlaUpdate:
        """A function that compiles the update once per shape of a parameter."""
        return XlaUpdate(update, self.form)

    def run_one(self, launch: Launch) -> list[Measure]:
        """The same for components in shapes of their own, and for an update in stages."""
        names, call = stored(launch.update), cast(XlaUpdate, self.lowered(launch.update))
        scalars = launch.vector.to(launch.reads[0][0].device)
        states = launch.small or [{}] * len(launch.reads)
        measured = []
        nodes = self._numbers(scalars.device, len(launch.reads))
        for node, reads, writes, small in zip(nodes, launch.reads, launch.writes, states, strict=True):
            results = call(launch.masked(reads), scalars, small, Own.of(launch.update, reads, writes), node)
            own, last = len(writes), len(results) - len(names)
            launch.write([*writes, *(small[name] for name in names)], [*results[:own], *results[last:]])
            measured += [Measure(*results[own:last])] if launch.update.sums else []
        return measured

    def _numbers(self, device: torch.device, count: int) -> range:
        """So many numbers that no other of our nodes in the lazy graph of a device has."""
        mark, first = self._graphs.get(device, (None, 0))
        if mark is None or not torch_privates.is_lazy(mark):  # it has run, as all does in `torch_xla.sync`
            with torch_privates.unseen():
                mark, first = torch.zeros((), dtype=torch.float32, device=device), 0
        self._graphs[device] = mark, first + count
        return range(first, first + count)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Numbers are given again afterwards, so that a graph has the same ones in steps that are validated."""
        before = dict(self._graphs)
        try:
            yield
        finally:
            self._graphs = before

    def prepare(self, device: torch.device) -> None:
        """Raises ValueError for a device that is not torch_xla's."""
        if device.type not in self.devices:
            raise ValueError(
                f"backend='xla' needs parameters on an XLA device, they are on {device}; use backend='auto'"
            )

    def found(self) -> Iterator[Callable[[], torch.device]]:
        """Torch_xla's device, where that is installed."""
        if importlib.util.find_spec("torch_xla") is not None:
            yield open_device


def _without_doubles(update: Update) -> str | None:
    """Why there are no sums in fp64 on this process's devices; None if there are, or none are needed or known."""
    sums = (s for s in update.stages if s.kind == REDUCTION or any(node.target in ENDINGS for node in s.body.nodes))
    if not any(sums) or (kind := kind_of_devices()) is None or kind in DOUBLES:
        return None
    what = "adds up the elements of a parameter (norms, means) in fp64"
    return f"backend 'xla' {what}, which {kind} devices do not have{AUTO}"


def kind_of_devices() -> str | None:
    """The kind of torch_xla's devices, such as CPU or NEURON; None without torch_xla."""
    if importlib.util.find_spec("torch_xla") is None:
        return None
    import torch_xla.runtime as xr  # an extra: imported only to ask for the kind of its devices

    kind: str | None = xr.device_type()
    return kind


def open_device() -> torch.device:
    """The device of torch_xla; RuntimeError if it cannot be opened."""
    if importlib.util.find_spec("libneuronxla") is None:
        os.environ.setdefault("PJRT_DEVICE", "CPU")  # as torch_xla itself would choose NEURON otherwise
    import torch_xla  # an extra: imported only to probe it

    return torch_xla.device()


BACKEND = Xla()
