"""Synthetic samples, for lazy devices, on which the values of a training step do not exist yet.

torch_xla runs a whole step as one graph, when a result is needed. Reading an element of a gradient before that would
cut the graph in two, and compile both parts. So values are drawn on the host, and states are computed from them by the
user's own step; the numbers of the step (rates, counts, hidden objects) are the real ones. On the device the sample
runs separately, as one small graph of a fixed size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.states import word_encoding
from collage_neuron.states.visible_states import ParamShaped
from collage_neuron.validation.sample import Plan, Sample, sample_of, shown

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job

DEVICES = ("xla", "neuron")
"""Device types with synthetic samples."""
WARM = 3
"""Number of steps of the user's code that produce the states."""


States = Callable[[Tensor, list[str], torch.Generator], Mapping[str, Any]]
"""States with some names of a parameter with drawn values, as a few steps leave them, so far as it can say."""


def draw(optimizer: Optimizer, job: Job, p: torch.nn.Parameter, planned: Plan, seed: int, of_steps: States) -> Sample:
    """A sample with drawn values and the numbers of `p`, on the device of `p`."""
    g = torch.Generator().manual_seed(seed)
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
