"""`monitor`: how much of each update arrives, measured by the update itself while training runs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple
from weakref import ref

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from collage_neuron import pending
from collage_neuron.engine import Measured, watchers
from collage_neuron.measures import Measures, Part, Record
from collage_neuron.optimizer import Compiled
from collage_neuron.passes.pipeline import STEPS, backend_for
from collage_neuron.settings import Settings
from collage_neuron.sharding import local

UNREAD = 64
"""Measured steps that stay on the device, at most, until somebody asks for them."""


class Place(NamedTuple):
    """Where a parameter is."""

    group: int
    name: str
    module: str


@dataclass(frozen=True)
class Unread:
    """A measured step whose numbers are still on the device."""

    step: int
    parts: list[tuple[Place, int, tuple[tuple[str, ...], tuple[str, ...]]]]
    """For each parameter its place, its size, and the names of its sums and counts."""
    sums: list[torch.Tensor]
    counts: list[torch.Tensor]
    """The vectors of all parameters, one after another; several where they lie on several devices."""

    @classmethod
    def of(cls, step: int, measured: list[tuple[Place, Measured]]) -> Unread:
        by_device: dict[torch.device, list[tuple[Place, Measured]]] = defaultdict(list)
        for place, m in measured:
            by_device[m.sums.device].append((place, m))
        return cls(
            step,
            [(place, local(m.param).numel(), (m.job.update.sums, m.job.update.counts))
             for found in by_device.values() for place, m in found],
            [torch.cat([m.sums for _, m in found]) for found in by_device.values()],
            [torch.cat([m.counts for _, m in found]) for found in by_device.values()],
        )  # fmt: skip

    def read(self) -> Record:
        """Fetches the numbers: waits for the device."""
        sums = iter([x for t in self.sums for x in t.tolist()])
        counts = iter([n for t in self.counts for n in t.tolist()])
        parts = {}
        for place, size, names in self.parts:
            found = [next(sums) for _ in names[0]], [next(counts) for _ in names[1]]
            parts[place.name] = Part(place.group, place.module, Measures.of(size, names, *found))
        return Record(self.step, parts)


class Monitor:
    """Watches an optimizer; made by `monitor`. Closing it, or leaving its `with` block, ends that.

    Nothing of it is in the optimizer: pickles, copies and checkpoints know nothing of it, and an optimizer that is no
    longer used takes its monitor along.
    """

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module | None, every: int, keep: int | None) -> None:
        self.every = every
        self._optimizer = ref(optimizer)
        self._model = ref(model) if model is not None else None
        self._places = WeakIdKeyDictionary()
        self._taken = 0
        self._unread: deque[Unread] = deque()
        self._records: deque[Record] = deque(maxlen=keep)
        watchers[optimizer] = self

    def due(self) -> bool:
        """Whether the next step is to be measured."""
        return self._next_step() % self.every == 0

    def stepped(self, measured: list[Measured]) -> None:
        """Takes what a step measured; reads nothing, unless `UNREAD` steps wait already."""
        self._taken += 1
        if not measured:
            return
        number = next((int(s) for m in measured if (s := m.job.recording.scalars.get("step")) is not None), self._taken)
        self._unread.append(Unread.of(number, [(self._place(m.param), m) for m in measured]))
        self._read(UNREAD)

    def latest(self) -> Record | None:
        """The last measured step; None if none was. Waits for the device: on XLA call it after `torch_xla.sync()`."""
        return self.history[-1] if self.history else None

    @property
    def history(self) -> list[Record]:
        """The last measured steps, oldest first, at most `keep`. Waits for the device."""
        self._read(0)
        return list(self._records)

    def close(self) -> None:
        """Stops measuring; what was measured stays readable."""
        self._read(0)
        optimizer = self._optimizer()
        if optimizer is not None and watchers.get(optimizer) is self:
            del watchers[optimizer]

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, leave: int) -> None:
        while len(self._unread) > leave:
            self._records.append(self._unread.popleft().read())

    def _next_step(self) -> int:
        """The number of the step to come: the optimizer's own count where it keeps one, which outlives a resume."""
        optimizer = self._optimizer()
        assert optimizer is not None
        counts = (state["step"] for state in optimizer.state.values() if "step" in state)
        count = next(counts, self._taken)
        on_host = not isinstance(count, torch.Tensor) or count.device.type == "cpu"
        return (int(count) if on_host else self._taken) + 1

    def _place(self, p: torch.nn.Parameter) -> Place:
        if p not in self._places:
            self._find_places()
        place: Place = self._places[p]
        return place

    def _find_places(self) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        names = self._names(optimizer)
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                name = names.get(id(p))
                own = f"{i}.{j}"
                self._places[p] = Place(i, own, own) if name is None else Place(i, name, module_of(name))

    def _names(self, optimizer: Optimizer) -> Mapping[int, str]:
        """Names by identity: the model's, else those given to the optimizer, else those of a model `compile` marked."""
        given = {
            id(p): name
            for group in optimizer.param_groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        model = self._model() if self._model is not None else None
        known = [model] if model is not None else [] if given else pending.models_of(optimizer)
        return given | {id(p): name for m in known for name, p in m.named_parameters()}


def module_of(name: str) -> str:
    """The module that a parameter called `name` belongs to; the parameter itself if that is the model."""
    return name.rpartition(".")[0] or name


def monitor(
    optimizer: Optimizer, model: torch.nn.Module | None = None, *, every: int = 1, keep: int | None = 1000
) -> Monitor:
    """Measures, in every `every`-th step of a compiled optimizer, how much of the update arrives.

    ::

        monitor = collage_neuron.monitor(optimizer, model, every=10)
        ...                                  # train
        record = monitor.latest()
        record.total.pair.ratio              # EDQ / ||raw update||: 1 where nothing is lost
        record.modules["blocks.0.attention"].pair.lost
        record.total.stalled                 # {"exp_avg_sq": 0.0}

    The numbers, defined in `collage_neuron.measures`, are further results of the update's own graph: other steps run
    the graph they run without a monitor, and nothing is fetched from the device until somebody reads. A step is
    measured if its number is a multiple of `every`; steps are counted as the optimizer counts them (state `step`) where
    it does, from the first monitored step on otherwise.

    Args:
        optimizer: a compiled optimizer, or the ordinary one of a model given to `compile` alone.
        model: gives the parameters their names; without one, names given to the optimizer count (`param_names`), then
            `GROUP.INDEX`.
        every: measure each so many steps.
        keep: records kept in `history`; None: all.

    Raises:
        TypeError: the optimizer is not compiled.
        ValueError: `every` is below 1; the optimizer has a monitor already; a group runs on backend `nki`, which cannot
            measure yet.
    """
    if not isinstance(optimizer, Compiled) and not pending.models_of(optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is not compiled, so its updates cannot measure themselves; call "
            "collage_neuron.compile(optimizer) first (strategy='bf16' or 'fp32' for the baselines)"
        )
    if every < 1:
        raise ValueError(f"every is {every}; give a number of steps, 1 or more")
    if optimizer in watchers:
        raise ValueError(f"this {type(optimizer).__name__} is monitored already; close() that monitor first")
    for i, group in enumerate(optimizer.param_groups):
        if group["params"] and backend_for(Settings.of(group).backend, group["params"][0].device) in STEPS:
            raise ValueError(
                f"param_groups[{i}] runs on backend 'nki', whose kernels measure nothing yet; set "
                "group['collage_backend'] = 'xla' while you monitor it"
            )
    return Monitor(optimizer, model, every, keep)
