"""A sample: a few hundred elements of a parameter and of all that is kept for it, as an optimizer of their own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.passes.capture.capture import capture
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.capture.shadow import ParamShaped, shown_as
from collage_neuron.recording.bucketing import visible
from collage_neuron.settings import SKIPPED
from collage_neuron.states.sharding import local
from collage_neuron.states.store import ensure_stored, is_component

if TYPE_CHECKING:
    from collage_neuron.runtime.plan import Job

SIZE = 256
"""Elements of a sample."""
WHOLE = 4096
"""Elements of a parameter whose shape matters to its update: so many are taken as they are."""
SEARCHED = 1 << 22
"""Elements of a gradient among which the largest and the smallest are looked for."""


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


def plan(base: type[Optimizer], optimizer: Optimizer, job: Job, p: torch.nn.Parameter, flat: Tensor) -> Plan | None:
    """Which elements to take of `p`: those of `flat`, unless its update is another one in another shape.

    None if it is another one in any shape that a sample can have.
    """
    shape = local(p).shape
    if "shape" not in job.recording.asked:
        return Plan(flat, True, job.recording)
    recording = _recorded(base, optimizer, job, p, (2, *flat.shape))
    if recording is not None and _same_numbers(recording, job.recording):
        return Plan(flat, True, recording)
    if shape and p.shape == shape and p.numel() <= WHOLE:
        return Plan(torch.arange(p.numel()).reshape(shape), False, job.recording)
    if not shape:  # nothing would tell it from its numbers
        return None
    index = _block(shape)
    recording = _recorded(base, optimizer, job, p, tuple(index.shape))
    return None if recording is None else Plan(index, False, recording)


def shown(optimizer: Optimizer, job: Job, p: torch.nn.Parameter) -> dict[str, Any]:
    """The state of `p` as a recording takes it: tensors of its shape as `ParamShaped`, numbers as they are."""
    state = optimizer.state.get(p, {})
    if p.dim():
        return visible(state, p)
    own = {k: v for k, v in state.items() if not is_component(k, state)}
    return {k: ParamShaped(p) if k in job.recording.captured.states else v for k, v in own.items()}


def _recorded(
    base: type[Optimizer], optimizer: Optimizer, job: Job, p: torch.nn.Parameter, shape: tuple[int, ...]
) -> Recording | None:
    """The recording of `p` if it had another shape; None if that is another update."""
    other = shown_as(p, torch.empty(shape, device="meta"))
    state = shown(optimizer, job, p)
    shaped = {k: ParamShaped(other) if isinstance(v, ParamShaped) else v for k, v in state.items()}
    try:
        recording = capture(base, optimizer, job.group, other, shaped)
    except UnsupportedUpdate:
        return None
    return recording if recording.captured.text == job.recording.captured.text else None


def spread(grad: Tensor, turn: int) -> Tensor:
    """Elements at equal distances, beginning elsewhere at each turn; and those where |grad| is largest and smallest."""
    n = grad.numel()
    if n <= SIZE:
        return torch.arange(n)
    index = (torch.arange(SIZE) * n // SIZE + turn * 0x9E3779B1 % n) % n
    every = -(-n // SEARCHED)
    size = grad.reshape(-1)[::every].abs()
    index[0], index[1] = int(size.argmax()) * every, int(size.argmin()) * every
    return index


def _same_numbers(one: Recording, other: Recording) -> bool:
    if one.slots != other.slots:
        return False
    kinds = (one.scalars, other.scalars), (one.group, other.group), (one.attributes, other.attributes)
    return all(x.keys() == y.keys() and all(same_number(x[k], y[k]) for k in x) for x, y in kinds)


def same_number(x: Any, y: Any) -> bool:
    """Whether two host scalars are the same, as far as their types can tell."""

    def plain(v: Any) -> Any:
        return v.tolist() if isinstance(v, Tensor) else v

    floats = [v for v in (x, y) if isinstance(v, Tensor) and v.is_floating_point()]
    if len(floats) == 2 and x.dtype != y.dtype:  # torch loads a number of a bf16 parameter in bf16
        ulp = max(torch.finfo(v.dtype).eps for v in floats)
        return torch.allclose(x.double(), y.double(), rtol=2 * ulp, atol=0.0, equal_nan=True)
    return repr(plain(x)) == repr(plain(y))


def _block(shape: Sequence[int]) -> Tensor:
    """The numbers of the elements of a corner of a tensor, with as many dimensions and at most `WHOLE` elements."""
    cut = [min(d, 64) for d in shape]
    while math.prod(cut) > WHOLE:
        cut[cut.index(max(cut))] //= 2
    index = torch.zeros((), dtype=torch.int64)
    for d, c in zip(shape, cut, strict=True):
        index = index[..., None] * d + torch.arange(c)
    return index


def take(optimizer: Optimizer, job: Job, p: torch.nn.Parameter, grad: Tensor, planned: Plan) -> Sample:
    """The sample of `p`: copies, in the formats of the update."""
    state = optimizer.state.get(p, {})
    numbers = shown(optimizer, job, p)
    q = torch.nn.Parameter(_elements(p.detach(), planned.index), requires_grad=p.requires_grad)
    q.grad = _elements(grad, planned.index)
    of_param = (k for k, v in state.items() if isinstance(v, Tensor) and (k not in numbers or _is_shaped(numbers[k])))
    tensors = {k: _elements(state[k], planned.index) for k in of_param}
    return sample_of(optimizer, job, q, numbers, tensors, planned)


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
    group = {k: _own(v) for k, v in job.group.items() if k != SKIPPED} | {"params": [q]}
    small: Any = object.__new__(type(optimizer))
    small.param_groups, small.state, small.defaults = [group], defaultdict(dict), {}
    small.state[q] = {k: _own(v) for k, v in numbers.items() if not _is_shaped(v)} | dict(tensors)
    for name, fmt in job.update.formats.items():
        ensure_stored(q, small.state[q], name, fmt, planned.recording.captured.fresh.get(name, 0.0))
    assert q.grad is not None
    own = replace(job, group=group, params=[q], recording=planned.recording)
    return Sample(small, own, q.grad.to("cpu", copy=True), planned, is_drawn)


def _is_shaped(x: object) -> bool:
    return isinstance(x, ParamShaped)


def _own(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _elements(t: Tensor, index: Tensor) -> Tensor:
    """A copy of some elements, without a copy of all."""
    t = local(t)
    if t.is_contiguous():
        return t.reshape(-1)[index.to(t.device)]
    places = []
    for d in reversed(t.shape):
        places.append((index % d).to(t.device))
        index = index // d
    return t[tuple(reversed(places))] if places else t.clone()
