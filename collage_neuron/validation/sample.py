"""Takes samples: a few hundred elements of a parameter and its states, as a separate optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.states import word_encoding
from collage_neuron.states.format_record import record_of
from collage_neuron.states.sharding import local, set_gradient
from collage_neuron.states.state_keys import is_shared_word, names_in
from collage_neuron.states.store import kept_format
from collage_neuron.states.visible_states import ParamShaped, Shaped
from collage_neuron.validation.sampled import Plan, Sample, sample_of, shown

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
    places = []
    for d in reversed(t.shape):
        places.append((index % d).to(t.device))
        index = index // d
    return t[tuple(reversed(places))] if places else t.clone()
