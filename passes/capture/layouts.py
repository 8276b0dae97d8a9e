"""Rejects code that asks how a tensor lies in memory, where a stand-in for it has another answer.

Given: `p.stride()` or `p.grad.is_contiguous()`, and a parameter or a gradient in `torch.channels_last`
Result: UnsupportedUpdate: the step runs as written, on fp32 values that lie in memory as the tensors do

Stand-ins are contiguous. What is computed from contiguous tensors has the same layout with data and without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.torch_privates import version

LAYOUT = "is_contiguous"
"""The name of the question among those that a step asks of a parameter (`Recording.asked`)."""

_VIEWS = frozenset({torch.as_strided, Tensor.as_strided, Tensor.as_strided_})
_STORAGE = frozenset({Tensor.storage_offset, Tensor.untyped_storage, Tensor.storage, version, *_VIEWS})
OF_LAYOUT = frozenset({Tensor.stride, Tensor.is_contiguous, Tensor.dim_order, *_STORAGE})
"""Functions whose results depend on how a tensor lies in memory."""
QUERIES = OF_LAYOUT - _VIEWS
"""Those that tell it."""


class NoAnswer(Exception):
    """The cause of an error about a question that fp32 values would answer wrongly too."""


def check_layout(query: Callable[..., Any], params: Iterable[Tensor]) -> None:
    """Raises UnsupportedUpdate if a stand-in for one of `params`, or for its gradient, answers wrongly.

    Its cause is `NoAnswer` if the step cannot run as written either.
    """
    if query == version:  # each look at it makes another object
        raise UnsupportedUpdate(
            "the update reads p._version, which counts what was written to a tensor: a compiled step writes it another "
            "number of times than the optimizer's own code does; leave the optimizer uncompiled"
        ) from NoAnswer
    for p in params:
        for x in (p, p.grad):
            if x is None:
                continue
            is_part = query in _STORAGE and not _is_alone(x)
            if is_part or not has_usual_layout(x):
                raise _other_layout(query.__name__, x, is_lost=is_part or not _is_kept(x))


def has_usual_layout(x: Tensor) -> bool:
    """Returns True if the strides of `x` are those of a new tensor of its shape."""
    step = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def _is_kept(x: Tensor) -> bool:
    """Returns True if copies of `x` have its strides: they have neither gaps nor overlaps."""
    step = 1
    for stride, size in sorted((n, size) for n, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride != step:
            return False
        step *= size
    return True


def _is_alone(x: Tensor) -> bool:
    """Returns True if nothing else is in the storage of `x`."""
    return x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.nbytes


def _other_layout(name: str, x: Tensor, is_lost: bool) -> UnsupportedUpdate:
    error = UnsupportedUpdate(
        f"the update asks how tensors lie in memory ({name}), and a parameter or gradient of shape {list(x.shape)} has "
        f"strides {list(x.stride())} and starts at element {x.storage_offset()} of its storage: only tensors that are "
        "contiguous, and alone in their storage, can be represented while a step is recorded; make it contiguous, or "
        "do without the question"
    )
    error.__cause__ = NoAnswer() if is_lost else None
    return error
