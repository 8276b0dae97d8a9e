"""The backend protocol: what a backend provides, and the launches that a step passes to it.

A backend is one object. It says on which devices it runs and which updates it supports, and it runs all launches of a
step at once, writing the results in place. `registry` finds backends by name; no other code depends on the name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import BY_ELEMENT
from collage_neuron.passes.backends.registry import preferred
from collage_neuron.passes.ir.update import Update

AUTO = "; use backend='auto'"
"""The end of a reason why a backend cannot run an update: it is replaced by what can (`check_supported`)."""


Across = Callable[[Tensor, str, str], Tensor]
"""Makes numbers of this process, a 1-D fp32 tensor, those of all processes of a group, given how (`reductions.ACROSS`)
and the group's name. All of these processes have to call it, in the same order."""


class Launch(NamedTuple):
    """One update of one or several parameters, which share the numbers of this step."""

    update: Update
    vector: Tensor
    """The update's scalar vector, 1-D fp32 on the CPU. For a backend that `takes_rows`, it may be 2-D: a row for each
    parameter, where these have numbers of their own."""
    reads: Sequence[Sequence[Tensor]]
    """For each parameter its components in the order of `update.inputs`, all on one device."""
    writes: Sequence[Sequence[Tensor]]
    """For each parameter the tensors for the results, in the order of `update.outputs`: mostly those that it reads.

    All results of a parameter must be computed before the first is written, since states may swap places. A backend
    that writes without torch must tell autograd, with `torch.autograd.graph.increment_version`."""
    finite: Tensor | None = None
    """A 0-d mask on some device. If it is given and false, the launch changes nothing, and its measurements are not
    used. The host must not read it if that would wait for the device. Gradients must then be treated as zeros, since
    the effect of a NaN on a device may be undocumented."""
    kept: dict[Any, Any] | None = None
    """If it is given, a place for what a backend finds out about the tensors but for their values, addresses and
    identities. A later launch has the same dictionary only if it has the same update and as many tensors of the same
    classes, dtypes, devices, shapes, strides and flags, in the same order. Keep no tensors there."""
    in_place: bool = False
    """True if what has the same key among `update.inputs` and `update.outputs` is known to be the same tensor."""
    small: Sequence[Mapping[str, Tensor]] = ()
    """For each parameter its states of one number (`update.small`), by name: 0-d fp32 tensors, read and written."""
    across: Across | None = None
    """What makes numbers of parts those of whole parameters (`update.between`); None if nobody else has parts."""

    @property
    def is_taken(self) -> bool:
        """Returns False if it is skipped; the host waits for the device to know."""
        return self.finite is None or bool(self.finite)

    def part(self, numbers: Sequence[int]) -> Launch:
        """The launch of some of its parameters, by their numbers."""
        reads, writes = ([given[i] for i in numbers] for given in (self.reads, self.writes))
        small = [self.small[i] for i in numbers] if self.small else ()
        # The row of a single parameter becomes 1-D, which every backend takes (`takes_rows`).
        vector = self.vector if self.vector.dim() == 1 else self.vector[numbers[0] if len(numbers) == 1 else [*numbers]]
        return self._replace(vector=vector, reads=reads, writes=writes, small=small, kept=None)

    def kept_of(self, part: Update) -> dict[Any, Any] | None:
        """`kept` of a launch of a part of its update, with tensors of this one in the same order."""
        return None if self.kept is None else self.kept.setdefault(id(part), {})  # the update holds its parts

    def masked(self, reads: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors that an update reads for a parameter; the gradient is zero if the launch is skipped."""
        if self.finite is None:
            return reads
        named = zip(self.update.inputs, reads, strict=True)
        return [torch.where(self.finite.to(x.device), x, 0.0) if key == "grad" else x for key, x in named]

    def write(self, writes: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Writes the new components of a parameter, unless the launch is skipped or they are there already."""
        for old, new in zip(writes, results, strict=True):
            if new is old:  # a kernel has stored it
                continue
            # Never by replacing the data: on XLA only `copy_` lets the result reuse the old tensor's buffer.
            # `_foreach_copy_` saves nothing there, since it calls `copy_` for each tensor too (740 tensors: 3.5 ms
            # either way).
            old.copy_(new if self.finite is None else torch.where(self.finite.to(old.device), new, old))


class Found(NamedTuple):
    """What the stages before the last one have found, for the parameters of a launch (`staged`)."""

    rows: Tensor
    """The scalar vectors of the last stage, one row for each parameter, on the parameters' device."""
    small: Mapping[str, Tensor]
    """New values of the states without a value for each element, by name: one for each parameter."""

    def of(self, i: int) -> Found:
        """What was found for one parameter."""
        return Found(self.rows[i : i + 1], {name: values[i : i + 1] for name, values in self.small.items()})


class Measure(NamedTuple):
    """The measurements of one parameter's update: vectors in the order of `update.sums` and of `update.counts`."""

    sums: Tensor
    counts: Tensor


class EveryDevice:
    """The types of all devices."""

    def __contains__(self, device_type: object) -> bool:
        return True


class Backend(ABC):
    """Runs updates in explicit-rounding form. A subclass needs `name`, `devices` and `run`; it inherits the rest."""

    name: str
    """Its name in `backend=`, and in `collage_backend` of a group."""
    devices: Container[str]
    """Types of the devices on which it runs, such as `("cpu", "cuda")`."""
    takes_rows: bool = False
    """True if a launch may have a scalar vector for each parameter; else these have launches of their own."""
    measures: bool = False
    """True if it can run updates that measure themselves (`update.sums`), for a monitor."""
    layouts: frozenset[str] = frozenset({BY_ELEMENT})
    """How words of components may lie in memory (`Component.layout`)."""
    joins: bool = False
    """True if it can run updates that need numbers of other processes (`update.between`)."""
    reduces: bool = False
    """True if it can run updates with reductions over a parameter and states of one number (with `staged`)."""
    sees_as: bool = False
    """True if it can run updates that see their components in another shape (`update.seen_as`), as launches have them:
    views of the parameters, their gradients and their states."""
    reshapes: bool = False
    """True if launches shall have these components in the shapes of their own, because its computations reshape."""
    draws: bool = False
    """True if it can run updates that draw random bits (`update.draws`), for stochastic rounding."""
    counts_first: bool = False
    """True if, should `run` raise after it has written anything, the version of all that it was to write has moved."""

    largest: float = 2e19
    """The largest gradient for which its results are compared with the optimizer's own `step()`: the square of this one
    is beyond fp32's range. Above, a device may be outside the documented domain of its functions."""

    domains: str = ""
    """If its results differ where numbers are very small or large: where, and what to do, as a sentence."""

    @abstractmethod
    def run(self, launches: Sequence[Launch]) -> Sequence[Measure] | None:
        """Runs a step, all launches on one kind of device, and writes the new components in place.

        Returns the measurements of those updates that measure themselves, in the order of the launches; None counts
        as none. If it raises after it has written, the optimizer takes no step before a checkpoint is loaded.
        """

    def apart(self) -> AbstractContextManager[None]:
        """A context in which the results of all that runs are fetched: nothing of it stays in a lazy graph."""
        return nullcontext()

    def supports(self, update: Update) -> str | None:
        """The reason why it cannot run `update`, as a sentence with a remedy; None if it can.

        Where one ends with `AUTO`, the remedy becomes a backend that can, or another strategy (`check_supported`).
        The answer must depend on `update` alone: it is asked once for each update, and remembered.
        """
        is_seen = update.seen_as is not None
        missing = {
            "run other updates than of one elementwise stage": not update.is_cut,
            "add up the elements of a parameter (norms, means)": len(update.stages) > 1 and not self.reduces,
            "keep states of one number": bool(update.small or update.reads_small) and not self.reduces,
            f"lay words out as {', '.join(sorted(update.layouts - self.layouts))}": bool(update.layouts - self.layouts),
            "add up what other processes have of a parameter": bool(update.between) and not self.joins,
            "add up rows or columns beside what other processes have": bool(update.between) and update.by_rows,
            "keep words of blocks beside sums of rows or columns": update.by_rows and bool(update.blocks),
            "update parameters seen in another shape than their own (view, reshape)": is_seen and not self.sees_as,
            "keep words of blocks of parameters seen in another shape": is_seen and bool(update.blocks),
            "store stochastically": update.draws and not self.draws,
            "measure updates": bool(update.sums) and not self.measures,
        }
        what = [name for name, needed in missing.items() if needed]
        return f"backend {self.name!r} does not {' or '.join(what)} yet{AUTO}" if what else None

    def suits(self, device: torch.device) -> bool:
        """Returns True if `backend="auto"` should take it for parameters on `device`."""
        return device.type in self.devices

    def missing(self) -> str | None:
        """What this process lacks to run it, as a sentence, if that is an extra or a library; None if nothing."""
        return None

    def prepare(self, device: torch.device) -> None:
        """Raises ValueError if it cannot run on `device`."""
        if device.type not in self.devices:
            raise ValueError(
                f"backend={self.name!r} does not run on {device.type} devices, but the parameters are on {device}; "
                "use backend='auto'"
            )

    def advised(self, text: str, device: torch.device) -> str:
        """A reason, or `domains`, with remedies that there are on `device`."""
        return text

    def converter(self, device: torch.device) -> Backend:
        """The backend that converts whole tensors on `device` to and from words, where a step runs as written."""
        return self

    def is_exact_on(self, device: torch.device) -> bool:
        """Returns True if its results on `device` are the reference, so that the probe need not compare them."""
        return False

    def found(self) -> Iterator[Callable[[], torch.device]]:
        """Functions that open the devices of this machine on which to probe it (`doctor`); opening may fail."""
        yield from ()


class Lowered(Protocol):
    """An update that is ready to run on one parameter."""

    def __call__(self, components: Sequence[Tensor], scalars: Tensor) -> Sequence[Tensor]:
        """Returns new components from the old ones and the scalar vector, then sums and counts if it measures."""


class ByParameter(Backend):
    """Runs a step one parameter after the other, so that the new components of only one need memory at a time."""

    @cached_property
    def _lowered(self) -> dict[Update, Lowered]:
        return {}  # not in a constructor, which a subclass may forget to call

    @abstractmethod
    def lower(self, update: Update) -> Lowered:
        """Returns the callable form of `update`."""

    def lowered(self, update: Update) -> Lowered:
        """The same, cached."""
        if update not in self._lowered:
            self._lowered[update] = self.lower(update)
        return self._lowered[update]

    def run(self, launches: Sequence[Launch]) -> Sequence[Measure]:
        """Runs each launch, parameter by parameter."""
        return [measure for launch in launches for measure in self.run_one(launch)]

    def run_one(self, launch: Launch) -> list[Measure]:
        """Runs one launch; its measurements, of each parameter, if the update has any."""
        call, size = self.lowered(launch.update), len(launch.update.outputs)
        rows = launch.vector.to(launch.reads[0][0].device).expand(len(launch.reads), -1)
        measured = []
        for reads, writes, scalars in zip(launch.reads, launch.writes, rows, strict=True):
            results = call(launch.masked(reads), scalars)
            launch.write(writes, results[:size])
            measured += [Measure(*results[size:])] if launch.update.sums else []
        return measured


@cache
def _reason(backend: Backend, update: Update) -> str | None:
    return backend.supports(update)


def check_supported(backend: Backend, update: Update, device: torch.device) -> None:
    """Raises UnsupportedUpdate with the reason if `backend` cannot run `update`, for parameters on `device`."""
    reason = _reason(backend, update)
    if reason is None:
        return
    if reason.endswith(AUTO):  # which a backend says without knowing which ones there are, nor what was chosen
        other = _able(backend, update, device)
        advice = ": choose another strategy, or leave the optimizer uncompiled"
        reason = reason.removesuffix(AUTO) + (advice if other is None else f"; use backend={other!r}")
    raise UnsupportedUpdate(backend.advised(reason, device))


def _able(backend: Backend, update: Update, device: torch.device) -> str | None:
    """Another backend on `device` that can run `update`; the reference only where it needs no probe."""
    for other in preferred(device):
        is_there = not isinstance(other.devices, EveryDevice) or other.is_exact_on(device)
        if other is not backend and is_there and other.suits(device) and _reason(other, update) is None:
            return other.name
    return None
