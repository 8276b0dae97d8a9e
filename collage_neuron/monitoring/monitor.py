"""`monitor`: measures how much of each update arrives, in the update's own graph, while training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from types import NoneType
from typing import Any
from weakref import finalize, ref

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from collage_neuron.explanation import about
from collage_neuron.matmuls.scale_metrics import NewMeasurements
from collage_neuron.monitoring.metrics import Record
from collage_neuron.monitoring.readback import Number, Place, Readings, Unread
from collage_neuron.monitoring.writers import JsonLog, Writer
from collage_neuron.optimizer.compiled import Compiled
from collage_neuron.optimizer.pending_models import models_of
from collage_neuron.passes.backends.registry import choose, preferred
from collage_neuron.runtime.step_call import Measured
from collage_neuron.settings import Settings
from collage_neuron.states.bookkeeping import bookkeeping


class Monitor:
    """Measures an optimizer; created by `monitor`. Closing it, or leaving its `with` block, ends the measurement.

    Pickles, copies and checkpoints of the optimizer do not contain it: a copy is not measured, and may get a monitor of
    its own. A monitor is freed with its optimizer.
    """

    def __init__(
        self, optimizer: Optimizer, model: torch.nn.Module | None, every: int, taken: int, readings: Readings
    ) -> None:
        self.every = every
        self._readings = readings
        self._optimizer = ref(optimizer)
        self._model = ref(model) if model is not None else None
        # By identity: tensors are compared by element. Weakly: parameters may be exchanged.
        self._places = WeakIdKeyDictionary()
        self._taken = taken
        self._began = False
        self._watch = NewMeasurements()
        bookkeeping(optimizer).watcher = self
        finalize(self, readings.finish)  # when it goes, or when Python ends: what waits is written

    def due(self) -> bool:
        """Returns True if the next step is to be measured."""
        return self._next_step() % self.every == 0

    def stepped(self, measured: list[Measured]) -> None:
        """Receives the measurements of a step; fetches none, unless the limit of unread steps is reached."""
        self._taken += 1
        if not measured:
            self._readings.stepped(None)
            return
        if not self._began:
            self._began = True
            self._readings.begin(self._about)
        number = next((int(m.number) for m in measured if m.number is not None), self._taken)
        number = max([number, *self._counts()])  # those without a gradient may have counted further
        self._readings.stepped(Unread.of(number, [(self._place(m.param), m) for m in measured]))
        operands = self._watch.new(self._models())
        if operands:
            self._readings.log({"fp8": operands})

    def log(self, **values: Number) -> None:
        """Adds your own values to the record of the last step: `monitor.log(loss=loss)` after `step()`.

        Nothing is fetched: a tensor stays on its device until its step is read. (On XLA it is not copied either, so do
        not log tensors that you write to in place.) If the step was not measured, the values are ignored.

        Args:
            values: numbers, tensors with one element, or dicts of these (`memory={"peak": bytes}` has a chart).

        Raises:
            TypeError: a value is none of these.
            ValueError: a name is reserved for the fields of a record.
        """
        self._readings.log(values)

    def latest(self) -> Record | None:
        """The last measured step, or None. Waits for the device: on XLA call it after `torch_xla.sync()`."""
        self._readings.read()
        return self._readings.records[-1] if self._readings.records else None

    @property
    def history(self) -> list[Record]:
        """The last measured steps, oldest first, at most `keep`. Waits for the device."""
        self._readings.read()
        return list(self._readings.records)

    def close(self) -> None:
        """Stops measuring and passes the remaining records to the writers; all records stay readable."""
        self._readings.read()
        self._readings.finish()
        optimizer = self._optimizer()
        if optimizer is not None and bookkeeping(optimizer).watcher is self:
            bookkeeping(optimizer).watcher = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _about(self) -> dict[str, Any]:
        models = dict.fromkeys(type(model).__name__ for model in self._models())
        of_models = {"model": ", ".join(models)} if models else {}
        return {**about(self._alive), "date": f"{datetime.now():%Y-%m-%d}", **of_models}

    @property
    def _alive(self) -> Optimizer:
        """The optimizer, in a step of it."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _next_step(self) -> int:
        """The number of the next step: from the counts of states, if there are some: they survive a resume."""
        return max(self._counts(), default=self._taken) + 1  # the largest: that of a frozen parameter stands still

    def _counts(self) -> list[int]:
        """The steps that states count on the host: to read those on a device would wait for it in each step."""
        counts = [state["step"] for state in self._alive.state.values() if "step" in state]
        found: list[int] = []
        for x in counts:
            if isinstance(x, (int, float)) or (isinstance(x, torch.Tensor) and x.is_cpu and x.numel() == 1):
                with suppress(ValueError, OverflowError):  # code of a user may have anything there: NaN
                    found.append(int(x))
        return found

    def _place(self, p: torch.nn.Parameter) -> Place:
        if p not in self._places:
            names, taken = self._names(), {place.name for place in self._places.values()}
            for i, group in enumerate(self._alive.param_groups):
                for j, each in enumerate(group["params"]):
                    if each not in self._places:
                        name = names.get(id(each), f"{i}.{j}")
                        module = name.rpartition(".")[0] if id(each) in names else ""
                        if name in taken:  # parameters of two models, for example
                            name = f"{name} ({i}.{j})"
                        taken.add(name)
                        self._places[each] = Place(i, name, module or name)
        place: Place = self._places[p]
        return place

    def _names(self) -> Mapping[int, str]:
        """Parameter names by id: from the model, else from the optimizer, else from a model given to `compile`."""
        given = {
            id(p): name
            for group in self._alive.param_groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        known = [] if given and self._model is None else self._models()
        return given | {id(p): name for m in known for name, p in m.named_parameters()}

    def _models(self) -> list[torch.nn.Module]:
        """The model that was given, else those that were compiled with the optimizer."""
        model = self._model() if self._model is not None else None
        return [model] if model is not None else models_of(self._alive)


def monitor(
    optimizer: Optimizer,
    model: torch.nn.Module | None = None,
    *,
    every: int = 1,
    keep: int | None = 1000,
    to: Writer | Sequence[Writer] = (),
    unread: int | None = None,
    taken: int = 0,
) -> Monitor:
    """Measures, in every `every`-th step of a compiled optimizer, how much of the update arrives.

    ::

        monitor = collage_neuron.monitor(optimizer, model, every=10)
        ...                                  # train
        record = monitor.latest()
        record.total.pair.ratio              # EDQ / ||raw update||: 1 where nothing is lost
        record.modules["blocks.0.attention"].pair.lost
        record.total.stalled                 # {"exp_avg_sq": 0.0}

    The numbers, defined in `collage_neuron.monitoring.metrics`, are additional results of the update's own graph; steps
    that are not measured run the graph that they run without a monitor. A step is measured if its number is a multiple
    of `every`: the optimizer's own count (state `step`), or one from `taken` if it has none.

    Args:
        optimizer: a compiled optimizer, or the ordinary one of a model given to `compile` alone.
        model: the source of parameter names; the default is the names given to the optimizer (`param_names`), else
            `GROUP.INDEX`.
        every: the number of steps from one measured step to the next.
        keep: the number of records kept in `history`; None keeps all.
        to: writers that receive each measured step after it was read and the next one has begun, and the last from
            `close()` or when Python exits (docs/monitor.md). One that fails is switched off with a RuntimeWarning.
        unread: the number of measured steps that may stay on the device; None means 64, or the limit of a writer.
        taken: the number of steps taken before, for an optimizer that does not count them (SGD, Lion).

    Raises:
        TypeError: `optimizer` is not a compiled optimizer, or `model` is not a model.
        ValueError: a number is out of range; the optimizer or a log has a monitor already; a group runs on a backend
            that cannot measure (one of your own, if it does not say that it can).
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is not an optimizer; write monitor(optimizer, model)")
    if not isinstance(model, (torch.nn.Module, NoneType)):
        raise TypeError(f"the model is a {type(model).__name__}; give the torch.nn.Module, or leave it out")
    if not isinstance(optimizer, Compiled) and not models_of(optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is not compiled, so its updates cannot measure themselves; call "
            "collage_neuron.compile(optimizer) first (strategy='bf16' or 'fp32' for the baselines)"
        )
    _check_number("every", every, 1, "a number of steps, 1 or more")
    _check_number("unread", 1 if unread is None else unread, 1, "a number of steps, 1 or more")
    _check_number("keep", 0 if keep is None else keep, 0, "a number of records, 0 or more, or None")
    _check_number("taken", taken, 0, "a number of steps, 0 or more")
    if bookkeeping(optimizer).watcher is not None:
        raise ValueError(f"this {type(optimizer).__name__} is monitored already; close() that monitor first")
    for i, group in enumerate(optimizer.param_groups):
        if group["params"]:
            _check_measures(i, Settings.of(group), group["params"][0].device)
    writers: list[Any] = list(to) if isinstance(to, (list, tuple)) else [to]
    if wrong := [w for w in writers if not isinstance(w, Writer)]:
        raise TypeError(
            f"to has {wrong[0]!r}, which is not a Writer; wrap it: to=[collage_neuron.TensorBoard(summary_writer), "
            'collage_neuron.JsonLog("runs/a.jsonl"), collage_neuron.Live(bar.set_postfix_str)]'
        )
    logs = [writer for writer in writers if isinstance(writer, JsonLog)]
    if mixed := [log for log in logs if log.monitored or logs.count(log) > 1]:
        raise ValueError(f"{mixed[0]!r} is given twice; each monitor needs its own log: name another file")
    for log in logs:
        log.monitored = True
    return Monitor(optimizer, model, every, taken, Readings(keep, writers, unread))


def _check_measures(index: int, settings: Settings, device: torch.device) -> None:
    backend = choose(settings.backend, device)
    if not backend.measures:
        other = next(b.name for b in preferred(device) if b.measures and b.suits(device))
        raise ValueError(
            f"param_groups[{index}] runs on backend {backend.name!r}, which cannot measure updates yet; set "
            f"group['collage_backend'] = {other!r} while you monitor it"
        )


def _check_number(name: str, number: object, least: int, what: str) -> None:
    if not isinstance(number, int) or number < least:
        raise ValueError(f"{name} is {number!r}; give {what}")
