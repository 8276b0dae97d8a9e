"""Reads measured steps back from the device and passes them to writers."""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, NamedTuple, SupportsFloat

import torch

from collage_neuron.monitoring.metrics import Measures, Part, Record
from collage_neuron.monitoring.writers import UNREAD, Writer, check_names
from collage_neuron.runtime.step_call import Measured
from collage_neuron.states.sharding import local

Number = SupportsFloat | Mapping[str, Any]
"""A value that may be logged with a step: a number, a tensor with one element, or a mapping of these."""


class Place(NamedTuple):
    """The group, module and name of a parameter."""

    group: int
    name: str
    module: str


@dataclass(frozen=True)
class Unread:
    """A measured step whose numbers are still on the device."""

    step: int
    parts: list[tuple[Place, int, tuple[tuple[str, ...], tuple[str, ...]]]]
    """For each parameter: its place, its number of elements, and the names of its sums and counts."""
    sums: list[torch.Tensor]
    counts: list[torch.Tensor]
    """The vectors of all parameters, concatenated; one tensor per device."""
    logged: dict[str, Any] = field(default_factory=dict)
    """The values logged with the step; tensors among them are still on the device."""

    @classmethod
    def of(cls, step: int, measured: list[tuple[Place, Measured]]) -> Unread:
        by_device: dict[torch.device, list[tuple[Place, Measured]]] = defaultdict(list)
        for place, m in measured:
            by_device[m.sums.device].append((place, m))
        return cls(
            step,
            [(place, local(m.param).numel(), m.names)
             for on_device in by_device.values() for place, m in on_device],
            # One tensor a device: each fetch waits for the device, whatever its size.
            [torch.cat([m.sums for _, m in on_device]) for on_device in by_device.values()],
            [torch.cat([m.counts for _, m in on_device]) for on_device in by_device.values()],
        )  # fmt: skip

    def read(self) -> Record:
        """Fetches the numbers: waits for the device."""
        # One fetch for each device, whatever the number of parameters.
        sums = iter([x for t in self.sums for x in t.tolist()])
        counts = iter([n for t in self.counts for n in t.tolist()])
        parts = {}
        for place, size, names in self.parts:
            own = [next(sums) for _ in names[0]], [next(counts) for _ in names[1]]
            parts[place.name] = Part(place.group, place.module, Measures.of(size, names, *own))
        return Record(self.step, parts)


class Readings:
    """The queue of measured steps: unread steps become records, and go to the writers with their logged values.

    A writer receives a record when nothing more can be logged with it, that is when the next step has begun.
    """

    def __init__(self, keep: int | None, writers: Sequence[Writer], unread: int | None) -> None:
        self.records: deque[Record] = deque(maxlen=keep)
        self._most = unread if unread is not None else min([UNREAD, *(w.unread for w in writers)])
        self._unread: deque[Unread] = deque()
        self._unwritten: deque[tuple[Record, Unread]] = deque()
        self._writers = list(writers)
        self._last: Unread | None = None

    def begin(self, about: Callable[[], Mapping[str, Any]]) -> None:
        self._each(lambda writer: writer.begin(about()))

    def stepped(self, measured: Unread | None) -> None:
        """Appends a step; reads none, unless the limit of unread steps is reached."""
        self._last = measured
        if measured is not None:
            self._unread.append(measured)
        self.read(self._most)

    def log(self, values: Mapping[str, Number]) -> None:
        """Stores values with the last step if that was measured; ValueError or TypeError if they are not numbers."""
        check_names(values)
        present = {name: _as_it_is_now(name, value) for name, value in values.items()}
        if self._last is not None:
            self._last.logged.update(present)

    def read(self, leave: int = 0) -> None:
        """Fetches all unread steps except the last `leave`, and passes complete records to the writers."""
        while len(self._unread) > leave:
            unread = self._unread.popleft()
            self.records.append(unread.read())
            if self._writers:
                self._unwritten.append((self.records[-1], unread))
        # The last step may still get values of `log`, so it waits for the next one.
        while self._unwritten and self._unwritten[0][1] is not self._last:
            record, unread = self._unwritten.popleft()
            logged = {name: _fetched(value) for name, value in unread.logged.items()}
            self._each(methodcaller("write", record, logged))

    def finish(self) -> None:
        """Passes all remaining records to the writers, and closes these."""
        self._last = None
        if self._writers:
            self.read()
            self._each(methodcaller("close"))
            self._writers = []

    def _each(self, do: Callable[[Writer], object]) -> None:
        """Calls the writers; one that fails is switched off, so that neither the step nor the training is affected."""
        for writer in list(self._writers):
            try:
                do(writer)
            except Exception as error:  # noqa: PERF203  # a call of each writer a step costs more than the try
                self._writers.remove(writer)
                with suppress(Exception):
                    writer.close()
                warnings.warn(
                    f"{writer!r} failed ({type(error).__name__}: {error}) and gets no more measurements; training "
                    "continues, and the last records are in monitor.history. To write measurements again, make room or "
                    "fix the writer, close() this monitor and make another",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _as_it_is_now(name: str, value: Any) -> Any:
    """The value as it is now, still on its device: a copy, except on XLA."""
    if isinstance(value, Mapping):
        return {key: _as_it_is_now(f"{name}.{key}", x) for key, x in value.items()}
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        # On XLA a copy would be another graph, so the tensor itself is kept; later writes in place would be visible.
        return value.detach() if value.device.type == "xla" else value.detach().clone()
    if isinstance(value, SupportsFloat) and not isinstance(value, torch.Tensor):
        with suppress(TypeError, ValueError):  # an array has __float__ too, whatever its shape
            return value if isinstance(value, int) else float(value)
    what = type(value).__name__
    if isinstance(value, torch.Tensor):
        what = f"a tensor of shape {list(value.shape)}" + (f" and {value.dtype}" if value.is_complex() else "")
    raise TypeError(f"{name} is {what}; log a number, a tensor with one element, or a dict of these")


def _fetched(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _fetched(x) for key, x in value.items()}
    return value if isinstance(value, int) else float(value)
