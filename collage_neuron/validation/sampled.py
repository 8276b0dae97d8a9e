"""The data types of validation: a sample of a parameter, and the plan of its elements."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.passes.ir.recording import Recording
from collage_neuron.settings import FORMATS_KEPT, SKIPPED
from collage_neuron.states import reduced_states, word_encoding
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.format_record import record_of
from collage_neuron.states.inner import own_class
from collage_neuron.states.sharding import ORDINARY, is_sharded
from collage_neuron.states.state_keys import is_component
from collage_neuron.states.store import ensure_stored
from collage_neuron.states.visible_states import ParamShaped, visible

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job

STACKED = 25
"""Number of copies of a sample that are stepped as one tensor if the shape does not matter; the first is exact."""


@dataclass(frozen=True)
class Plan:
    """The elements of a parameter to sample, and their shape."""

    index: Tensor
    """Their row-major indices in the local part of the parameter; has the sample's shape."""
    flat: bool
    """True if the update does not depend on the shape, so that many copies can be stepped at once."""
    recording: Recording
    """The update of a parameter of that shape."""


@dataclass(frozen=True)
class Sample:
    """A compiled optimizer whose one parameter is a sample, and the job that is its step."""

    optimizer: Optimizer
    job: Job
    grad: Tensor
    """The gradient before the step, on the CPU."""
    plan: Plan
    is_drawn: bool
    """True if its values were drawn (`synthetic`)."""

    @property
    def param(self) -> torch.nn.Parameter:
        """The parameter."""
        return self.job.params[0]

    @property
    def formats(self) -> dict[str, Format]:
        """The formats of the values that the update writes: the parameter, its states, and possibly the gradient.

        States of one number are fp32.
        """
        written = "grad" in self.job.update.outputs
        grad = {"grad": format_named("fp32" if self.grad.dtype == torch.float32 else "bf16")} if written else {}
        return {**self.job.update.formats, **dict.fromkeys(self.small, format_named("fp32")), **grad}

    @property
    def small(self) -> tuple[str, ...]:
        """The names of the states of one number."""
        return self.job.recording.captured.small

    def components(self, name: str) -> list[Tensor]:
        """Copies, on the CPU, of the components of a value."""
        state = {**self.optimizer.state[self.param], "param": self.param.detach(), "grad": self.param.grad}
        return [state[key].to("cpu", copy=True) for key in self.formats[name].keys(name)]

    def values(self) -> dict[str, Tensor]:
        """The fp32 value of the parameter and of each state, by name, on the CPU."""
        return {
            name: word_encoding.decode(fmt, self.components(name), name).float() for name, fmt in self.formats.items()
        }


@dataclass(frozen=True)
class Expected:
    """The results of the user's step, by name: `param` and the states."""

    values: Mapping[str, Tensor]
    bounds: Mapping[str, Tensor]
    """How much the arithmetic, without the formats, may change each result."""
    unsure: Mapping[str, Tensor]
    """Masks of elements whose result depends on rounding: a sign, a comparison, a cancellation."""
    overflowed: Tensor
    """The mask of elements for which torch's own arithmetic left the range of fp32."""


def sample_of(
    optimizer: Optimizer,
    job: Job,
    q: torch.nn.Parameter,
    numbers: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    planned: Plan,
    is_drawn: bool = False,
) -> Sample:
    """A separate compiled optimizer over `q`, with the settings of the job's group."""
    group = {k: _own(v) for k, v in job.group.items() if k not in (SKIPPED, FORMATS_KEPT)} | {"params": [q]}
    other: Any = object.__new__(own_class(type(optimizer)))
    other.param_groups, other.state, other.defaults = [group], defaultdict(dict), {}
    other.state[q] = {k: _own(v) for k, v in numbers.items() if not _is_shaped(v)} | dict(tensors)
    record, captured = record_of(other, q), planned.recording.captured
    record.update(record_of(optimizer, job.params[0]))
    for name, fmt in job.update.formats.items():
        fill, shape = captured.fresh.get(name, 0.0), captured.shapes.get(name)
        ensure_stored(q, other.state[q], name, fmt, fill, record, shape)
    reduced_states.ensure(other, [q], captured)
    assert q.grad is not None
    own = replace(job, group=group, params=[q], recording=planned.recording)
    return Sample(other, own, q.grad.to("cpu", copy=True), planned, is_drawn)


def _is_shaped(x: object) -> bool:
    return isinstance(x, ParamShaped)


def _own(x: Any) -> Any:
    """A copy of what a step writes to in place (`optimizer/launches.py`): the optimizer's own stays as it is.

    Not of a number that a traced step has left in a group: it has no value yet, and nobody reads it there.
    """
    if isinstance(x, Tensor):
        return x.detach().clone() if type(x) in ORDINARY or is_sharded(x) else x
    return copy.copy(x) if type(x) in (list, dict) else x


def shown(optimizer: Optimizer, job: Job, p: torch.nn.Parameter) -> dict[str, Any]:
    """The state of `p` as a recording needs it: tensors of its shape as `ParamShaped`, numbers as they are."""
    state = optimizer.state.get(p, {})
    if p.dim():
        return visible(state, p, bookkeeping(optimizer).small)
    own = {k: v for k, v in state.items() if not is_component(k, state)}
    return {k: ParamShaped(p) if k in job.recording.captured.states else v for k, v in own.items()}
