"""Takes samples: a few hundred elements of a parameter and its states, as a separate optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.capture import capture
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.capture.shadow import OneNumber, ParamShaped, Shaped, shown_as
from collage_neuron.passes.ir.update import Captured
from collage_neuron.states import kept_formats, words
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.names import is_shared_word, names_in
from collage_neuron.states.sharding import local, set_gradient
from collage_neuron.states.store import kept_format
from collage_neuron.validation.sampled import STACKED, Plan, Sample, same_number, sample_of, shown

if TYPE_CHECKING:
    from collage_neuron.runtime.plan import Job

SIZE = 256
"""Number of elements of a sample."""
WHOLE = 4096
"""Number of elements up to which a parameter whose shape matters to its update is sampled whole."""
SEEN = 1 << 15
"""The same for a parameter that its update sees in another shape, of which there are no smaller samples."""
SEARCHED = 1 << 22
"""Number of elements of a gradient that are searched for the largest and the smallest."""


def plan(base: type[Optimizer], optimizer: Optimizer, job: Job, p: torch.nn.Parameter, flat: Tensor) -> Plan | None:
    """The elements of `p` to take: those in `flat`, unless the update is a different one in another shape.

    None if the update differs in every shape that a sample can have. Of an update with reductions, the sample is a
    parameter of its own, with sums of its own, on both sides; so copies of it are not stepped as one tensor.
    """
    shape, alone = local(p).shape, job.recording.captured.reduces
    if job.recording.captured.seen_as is not None:  # which depends on the numbers of dimensions and elements
        whole = indices(p.numel()).reshape(shape) if p.shape == shape and p.numel() <= SEEN else None
        return None if whole is None else Plan(whole, False, job.recording)
    if "shape" not in job.recording.asked:
        return Plan(flat, not alone, job.recording)
    # In exactly the shape of the twin: what is equal in another one may be so by chance (2 * 256 elements are 512).
    recording = None if alone else _recorded(base, optimizer, job, p, (STACKED, *flat.shape))
    if recording is not None and _same_numbers(recording, job.recording):
        return Plan(flat, True, recording)
    if shape and p.shape == shape and p.numel() <= WHOLE:
        return Plan(indices(p.numel()).reshape(shape), False, job.recording)
    if not shape:  # its states could not be distinguished from numbers
        return None
    index = block(shape)
    recording = _recorded(base, optimizer, job, p, tuple(index.shape))
    return None if recording is None else Plan(index, False, recording)


def _recorded(
    base: type[Optimizer], optimizer: Optimizer, job: Job, p: torch.nn.Parameter, shape: tuple[int, ...]
) -> Recording | None:
    """The recording of `p` with another shape; None if that is a different update."""
    other = shown_as(p, torch.empty(shape, device="meta", dtype=torch.float32))
    state = shown(optimizer, job, p)
    captured = job.recording.captured
    shaped = {k: _beside(v, other, captured, k) if isinstance(v, ParamShaped) else v for k, v in state.items()}
    try:
        recording = capture(base, optimizer, job.group, other, shaped, bookkeeping(optimizer).makes_small)
    except UnsupportedUpdate:
        return None
    return recording if recording.captured.text == captured.text else None


def _beside(value: ParamShaped, other: Tensor, captured: Captured, name: str) -> ParamShaped:
    """What represents a state of a parameter with another shape."""
    return Shaped(other, captured.shape_of(name, other.shape)) if isinstance(value, Shaped) else value.beside(other)


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
    """Those of the first elements."""
    return torch.arange(n, dtype=torch.int64, device="cpu")


def _same_numbers(one: Recording, other: Recording) -> bool:
    if one.slots != other.slots:
        return False
    kinds = (one.scalars, other.scalars), (one.group, other.group), (one.attributes, other.attributes)
    return all(x.keys() == y.keys() and all(same_number(x[k], y[k]) for k in x) for x, y in kinds)


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
    of_param = (
        k for k, v in state.items() if isinstance(v, Tensor) and (k not in numbers or type(numbers[k]) is ParamShaped)
    )
    tensors = {k: _sampled(state[k], p, planned.index) for k in of_param if not is_shared_word(k, state)}
    tensors |= {k: state[k].detach().clone() for k, v in numbers.items() if isinstance(v, OneNumber)}
    tensors |= {k: _corner(state[k], k, job, q) for k, v in numbers.items() if isinstance(v, Shaped)}
    # The sample has blocks of its own: it starts from the values, which `sample_of` encodes in these.
    tensors |= {k: _value(optimizer, p, state, k, planned.index) for k in names_in(state).coded & tensors.keys()}
    return sample_of(optimizer, job, q, numbers, tensors, planned)


def _corner(t: Tensor, name: str, job: Job, q: Tensor) -> Tensor:
    """The part of a state of rows or columns that belongs to a sample in the corner of its parameter."""
    shape = job.recording.captured.shape_of(name, q.shape)
    return t.detach()[tuple(slice(n) for n in shape)].clone()


def _value(optimizer: Optimizer, p: torch.Tensor, state: Mapping[str, Any], name: str, index: Tensor) -> Tensor:
    """The fp32 values of some elements of a state whose words are shared by blocks."""
    fmt = kept_format(p, state, name, kept_formats.of(optimizer, p))
    shape = local(p).shape
    taken = [
        _elements(state[key], index if c.block is None else words.of_elements(index, c.block, shape))
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
    places = []
    for d in reversed(t.shape):
        places.append((index % d).to(t.device))
        index = index // d
    return t[tuple(reversed(places))] if places else t.clone()
