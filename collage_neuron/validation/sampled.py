"""What the parts of validation hand to each other: a sample of a parameter, and which elements it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.capture.shadow import ParamShaped
from collage_neuron.recording.visible import visible
from collage_neuron.settings import FORMATS_KEPT, SKIPPED
from collage_neuron.states import kept_formats
from collage_neuron.states.names import is_component
from collage_neuron.states.store import ensure_stored

if TYPE_CHECKING:
    from collage_neuron.runtime.plan import Job


@dataclass(frozen=True)
class Plan:
    """Which elements of a parameter, in which shape."""

    index: Tensor
    """Their numbers in the part of the parameter that this process holds, row-major; of the sample's shape."""
    flat: bool
    """Whether the update treats them alike in any shape: then many copies can be stepped at once."""
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
    """Whether its values were drawn (`synthetic`)."""

    @property
    def param(self) -> torch.nn.Parameter:
        """The parameter."""
        return self.job.params[0]

    @property
    def formats(self) -> dict[str, Format]:
        """The formats of what the update writes: the parameter, its states, and the gradient if it writes to that."""
        written = "grad" in self.job.update.outputs
        grad = {"grad": format_named("fp32" if self.grad.dtype == torch.float32 else "bf16")} if written else {}
        return {**self.job.update.formats, **grad}

    def components(self, name: str) -> list[Tensor]:
        """Copies, on the CPU, of the components in which a value is kept."""
        state = {**self.optimizer.state[self.param], "param": self.param.detach(), "grad": self.param.grad}
        return [state[key].to("cpu", copy=True) for key in self.formats[name].keys(name)]

    def values(self) -> dict[str, Tensor]:
        """The fp32 value of the parameter and of each state, by name, on the CPU."""
        return {name: fmt.decode(self.components(name)).float() for name, fmt in self.formats.items()}


@dataclass(frozen=True)
class Expected:
    """The results of the user's step, by name: `param` and the states."""

    values: Mapping[str, Tensor]
    bounds: Mapping[str, Tensor]
    """How far the arithmetic, without the formats, may end from them."""
    unsure: Mapping[str, Tensor]
    """Where rounding decides what becomes of a value: a sign, a comparison, a difference that cancels."""
    overflowed: Tensor
    """Where torch's own arithmetic left fp32's range."""
    numbers: Mapping[str, Any]
    """Host scalars of the state, entries of the group and attributes of the optimizer that the step changed."""


def sample_of(
    optimizer: Optimizer,
    job: Job,
    q: torch.nn.Parameter,
    numbers: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    planned: Plan,
    is_drawn: bool = False,
) -> Sample:
    """A compiled optimizer of its own around `q`, with the settings of the job's group."""
    group = {k: _own(v) for k, v in job.group.items() if k not in (SKIPPED, FORMATS_KEPT)} | {"params": [q]}
    small: Any = object.__new__(type(optimizer))
    small.param_groups, small.state, small.defaults = [group], defaultdict(dict), {}
    small.state[q] = {k: _own(v) for k, v in numbers.items() if not _is_shaped(v)} | dict(tensors)
    record = kept_formats.of(small, q)
    record.update(kept_formats.of(optimizer, job.params[0]))
    for name, fmt in job.update.formats.items():
        ensure_stored(q, small.state[q], name, fmt, planned.recording.captured.fresh.get(name, 0.0), record)
    assert q.grad is not None
    own = replace(job, group=group, params=[q], recording=planned.recording)
    return Sample(small, own, q.grad.to("cpu", copy=True), planned, is_drawn)


def _is_shaped(x: object) -> bool:
    return isinstance(x, ParamShaped)


def _own(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def shown(optimizer: Optimizer, job: Job, p: torch.nn.Parameter) -> dict[str, Any]:
    """The state of `p` as a recording takes it: tensors of its shape as `ParamShaped`, numbers as they are."""
    state = optimizer.state.get(p, {})
    if p.dim():
        return visible(state, p)
    own = {k: v for k, v in state.items() if not is_component(k, state)}
    return {k: ParamShaped(p) if k in job.recording.captured.states else v for k, v in own.items()}


def same_number(x: Any, y: Any) -> bool:
    """Whether two host scalars are the same, as far as their types can tell."""

    def plain(v: Any) -> Any:
        return v.tolist() if isinstance(v, Tensor) else v

    floats = [v for v in (x, y) if isinstance(v, Tensor) and v.is_floating_point()]
    if len(floats) == 2 and x.dtype != y.dtype:  # torch loads a number of a bf16 parameter in bf16
        ulp = max(torch.finfo(v.dtype).eps for v in floats)
        return torch.allclose(x.double(), y.double(), rtol=2 * ulp, atol=0.0, equal_nan=True)
    return repr(plain(x)) == repr(plain(y))
