"""Takes samples: a few hundred elements of a parameter and its states, as a separate optimizer.

On lazy devices the values of a training step do not exist yet: torch_xla runs a whole step as one graph, when a result
is needed. Reading an element of a gradient before that would cut the graph in two, and compile both parts. So values
are drawn on the host, and states are computed from them by the user's own step; the numbers of the step (rates, counts,
hidden objects) are the real ones. On the device the sample runs separately, as one small graph of a fixed size.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.numerics.formats import FORMATS_KEPT, Format, format_named, is_component
from collage_neuron.passes.ir.update import Recording
from collage_neuron.settings import SKIPPED
from collage_neuron.states import visible_states, word_encoding
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.inner_optimizers import own_class
from collage_neuron.states.sharding import ORDINARY, is_sharded, local, set_gradient
from collage_neuron.states.state_keys import is_shared_word, names_in
from collage_neuron.states.store import ensure_stored, kept_format, record_of
from collage_neuron.states.visible_states import ParamShaped, Shaped, visible

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job

SIZE = 256
"""Number of elements of a sample."""
WHOLE = 4096
"""Number of elements up to which a parameter whose shape matters to its update is sampled whole."""
SEEN = 1 << 15
"""The same for a parameter that its update sees in another shape, of which there are no smaller samples."""
SEARCHED = 1 << 22
"""Number of elements of a gradient that are searched for the largest and the smallest."""


@dataclass(frozen=True)
class Plan:
    """The elements of a parameter to sample, and their shape."""

    index: Tensor
    """Their row-major indices in the local part of the parameter; has the sample's shape."""
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
    """True if its values were drawn (`sample`)."""

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
    other.state[q] = {k: _own(v) for k, v in numbers.items() if not isinstance(v, ParamShaped)} | dict(tensors)
    record, captured = record_of(other, q), planned.recording.captured
    record.update(record_of(optimizer, job.params[0]))
    for name, fmt in job.update.formats.items():
        ensure_stored(q, other.state[q], name, fmt, record, captured.fresh.get(name, 0.0), captured.shapes.get(name))
    visible_states.ensure(other, [q], captured)
    assert q.grad is not None
    own = replace(job, group=group, params=[q], recording=planned.recording)
    return Sample(other, own, q.grad.to("cpu", copy=True), planned, is_drawn)


def _own(x: Any) -> Any:
    """A copy of what a step writes to in place (`optimizer/launches.py`): the optimizer's own stays as it is."""
    if isinstance(x, Tensor):
        # Else a number that a traced step has left in a group: it has no value yet, and nobody reads it there.
        return x.detach().clone() if type(x) in ORDINARY or is_sharded(x) else x
    return copy.copy(x) if type(x) in (list, dict) else x


def shown(optimizer: Optimizer, job: Job, p: torch.nn.Parameter) -> dict[str, Any]:
    """The state of `p` as a recording needs it: tensors of its shape as `ParamShaped`, numbers as they are."""
    state = optimizer.state.get(p, {})
    if p.dim():
        return visible(state, p, bookkeeping(optimizer).small)
    own = {k: v for k, v in state.items() if not is_component(k, state)}
    return {k: ParamShaped(p) if k in job.recording.captured.states else v for k, v in own.items()}


def spread(grad: Tensor, turn: int) -> Tensor:
    """Elements at equal distances, with another start at each turn, and those where |grad| is largest and smallest."""
    n = grad.numel()
    if n <= SIZE:
        return indices(n)
    # Knuth's multiplicative hash: the starts of consecutive turns are far apart.
    index = (indices(SIZE) * n // SIZE + turn * 0x9E3779B1 % n) % n
    every = -(-n // SEARCHED)
    size = grad.reshape(-1)[::every].abs()
    index[0], index[1] = int(size.argmax()) * every, int(size.argmin()) * every
    return index


def indices(n: int) -> Tensor:
    """The indices of the first `n` elements."""
    return torch.arange(n, dtype=torch.int64, device="cpu")


def block(shape: Sequence[int]) -> Tensor:
    """The indices of the elements in a corner of a tensor, with the same dimensions and at most `WHOLE` elements."""
    cut = [min(d, 64) for d in shape]
    while math.prod(cut) > WHOLE:
        cut[cut.index(max(cut))] //= 2
    index = torch.zeros((), dtype=torch.int64, device="cpu")
    for d, c in zip(shape, cut, strict=True):
        index = index[..., None] * d + indices(c)
    return index


def take(optimizer: Optimizer, job: Job, p: torch.nn.Parameter, grad: Tensor, planned: Plan) -> Sample:
    """The sample of `p`: copies, in the formats of the update."""
    state = optimizer.state.get(p, {})
    numbers = shown(optimizer, job, p)
    q = torch.nn.Parameter(_elements(p.detach(), planned.index), requires_grad=p.requires_grad)
    set_gradient(q, _elements(grad, planned.index))
    sized = [k for k, v in state.items() if isinstance(v, Tensor) and v.numel() == p.numel()]  # others are no words
    of_param = (k for k in sized if k not in numbers or type(numbers[k]) is ParamShaped)
    tensors = {k: _sampled(state[k], p, planned.index) for k in of_param if not is_shared_word(k, state)}
    other = {k: v for k, v in numbers.items() if isinstance(v, Shaped)}  # of rows or columns, and one number
    tensors |= {k: _corner(state[k], k, job, q) if v.shape else state[k].detach().clone() for k, v in other.items()}
    # The sample has blocks of its own: it starts from the values, which `sample_of` encodes in these.
    tensors |= {k: _value(optimizer, p, state, k, planned.index) for k in names_in(state).coded & tensors.keys()}
    return sample_of(optimizer, job, q, numbers, tensors, planned)


def _corner(t: Tensor, name: str, job: Job, q: Tensor) -> Tensor:
    """The part of a state of rows or columns that belongs to a sample in the corner of its parameter."""
    shape = job.recording.captured.shape_of(name, q.shape)
    return t.detach()[tuple(slice(n) for n in shape)].clone()


def _value(optimizer: Optimizer, p: torch.Tensor, state: Mapping[str, Any], name: str, index: Tensor) -> Tensor:
    """The fp32 values of some elements of a state whose words are shared by blocks."""
    fmt = kept_format(p, state, name, record_of(optimizer, p))
    shape = local(p).shape
    taken = [
        _elements(state[key], index if c.block is None else word_encoding.of_elements(index, c.block, shape))
        for key, c in zip(fmt.keys(name), fmt.components, strict=True)
    ]
    value: Tensor = fmt.decode(taken)
    return value


def _sampled(t: Tensor, p: Tensor, index: Tensor) -> Tensor:
    """A copy of some elements of a word; of one whose shape is not that of `p` it has all."""
    found = _elements(t, index)
    return found if t.shape == p.shape else found.reshape(t.shape)


def _elements(t: Tensor, index: Tensor) -> Tensor:
    """A copy of some elements, without copying the whole tensor."""
    t = local(t)
    if t.dtype.itemsize == 1:  # PyTorch does not index fp8 numbers
        return _taken(t.view(torch.uint8), index).view(t.dtype)
    return _taken(t, index)


def _taken(t: Tensor, index: Tensor) -> Tensor:
    if t.is_contiguous():  # an index without dimensions would select, and give a view of the parameter itself
        return t.reshape(-1)[index.reshape(-1).to(t.device)].reshape(index.shape)
    return t[tuple(x.to(t.device) for x in torch.unravel_index(index, t.shape))]


# --- drawn values -----------------------------------------------------------------------------------------------------


DEVICES = ("xla", "neuron")
"""Device types with synthetic samples."""
WARM = 3
"""Number of steps of the user's code that produce the states."""


States = Callable[[Tensor, list[str], torch.Generator], Mapping[str, Any]]
"""States with some names of a parameter with drawn values, as a few steps leave them, so far as it can say."""


def draw(optimizer: Optimizer, job: Job, p: torch.nn.Parameter, planned: Plan, seed: int, of_steps: States) -> Sample:
    """A sample with drawn values and the numbers of `p`, on the device of `p`."""
    g = torch.Generator().manual_seed(seed)  # of its own: the program's random numbers stay as they are
    shape = planned.index.shape
    numbers = shown(optimizer, job, p)
    names = [k for k, v in numbers.items() if isinstance(v, ParamShaped) and k in job.update.formats]
    values = {"param": 0.02 * torch.randn(shape, generator=g, dtype=torch.float32, device="cpu")}
    values |= _states(job, values["param"], names, g, of_steps) if names else {}
    components: dict[str, Tensor] = {}
    for name, value in values.items():
        fmt = job.update.formats[name]
        stored = word_encoding.settled(fmt, "param", value)
        components |= {k: c.contiguous().to(p.device) for k, c in zip(fmt.keys(name), stored, strict=True)}
    q = torch.nn.Parameter(components.pop("param"), requires_grad=p.requires_grad)
    grad = gradient(shape, g)
    if not job.recording.captured.reduces:  # else all elements would depend on sums in which these hide the others
        grad = _with_extremes(grad, job.backend.largest)
    q.grad = grad.to(q.dtype).to(p.device)
    return sample_of(optimizer, job, q, numbers, components, planned, is_drawn=True)


def gradient(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """A gradient with elements of many sizes."""
    size = torch.exp(2 * torch.randn(shape, generator=g, dtype=torch.float32, device="cpu")) * 0.01
    return torch.where(torch.rand(shape, generator=g, dtype=torch.float32, device="cpu") < 0.5, size, -size)


def _with_extremes(grad: Tensor, largest: float) -> Tensor:
    """Replaces some elements by zeros, tiny and huge numbers, up to the backend's `largest`."""
    flat = grad.reshape(-1)
    for i, value in enumerate((0.0, 1e-12, -1e-6, 1e4, -largest)):
        flat[7 + i :: 61] = value
    return grad


def _states(job: Job, param: Tensor, names: list[str], g: torch.Generator, of_steps: States) -> dict[str, Tensor]:
    """Each state after a few steps; positive numbers if there is none of its shape."""
    found = of_steps(param, names, g)
    shapes = {k: job.recording.captured.shape_of(k, param.shape) for k in names}
    made = {k: v for k, v in found.items() if isinstance(v, Tensor) and v.shape == shapes.get(k)}
    return {k: (made[k] if k in made else gradient(shapes[k], g).abs()).detach().clone() for k in names}


def fetch(taken: Sample) -> None:
    """Computes the results of a sample, and nothing else, in one program instead of one per result."""
    if taken.param.device.type == "xla":
        import torch_xla.core.xla_model as xm  # an extra: imported only where parameters are on an XLA device

        state = taken.optimizer.state[taken.param].values()
        found = [taken.param.detach(), taken.param.grad, *state]
        xm.unlazy([x for x in found if isinstance(x, Tensor) and x.device.type == "xla"])
