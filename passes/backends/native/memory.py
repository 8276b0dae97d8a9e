"""What the memory of tensors allows: which can be taken as one run of elements, and which share some of it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt

import torch
from torch import Tensor


def is_dense(t: Tensor) -> bool:
    """Returns True if the elements of `t` fill a run of memory, in any order, each once."""
    return each_lies_alone(t) and extent(t) == t.numel()


def each_lies_alone(t: Tensor) -> bool:
    """Returns True if no two elements of `t` have the same memory, as they do after `expand`. False in rare doubt."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1):
        # In the order of strides, each dimension has to step over all that those before it reach.
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def in_one_order(tensors: Sequence[Tensor]) -> bool:
    """Returns True if the same element lies at the same place of each, as in weights that are all `channels_last`."""
    first = tensors[0]
    return is_dense(first) and all(t.shape == first.shape and t.stride() == first.stride() for t in tensors)


def extent(t: Tensor) -> int:
    """Elements from the first of `t` in memory to the last, with those between them that are not its own."""
    return 1 + sum((size - 1) * stride for stride, size in zip(t.stride(), t.shape, strict=True)) if t.numel() else 0


def in_memory(tensors: Sequence[Tensor]) -> bool:
    """Returns True if the numbers of all are those in the memory of the CPU at their addresses."""
    kinds: set[type[Tensor]] = {*map(type, tensors)}
    plain = torch.Tensor.__torch_dispatch__  # a subclass with another one may compute something else
    return (
        all(kind.__torch_dispatch__ is plain for kind in kinds)
        and all(t.is_cpu for t in tensors)
        # A negation that torch has put off is not in memory yet.
        and not any(map(Tensor.is_neg, tensors))
    )


def share_memory(begins: Sequence[int], ends: Sequence[int], written: Sequence[bool]) -> bool:
    """Returns True if memory that is written, of those from `begins` to `ends`, also belongs to another one."""
    # Intervals that are not empty are disjoint just if the ends, in order, lie between the beginnings, in order.
    if not any(map(gt, sorted(ends), sorted(begins)[1:])):
        return False
    last = last_written = 0
    for begin, end, is_written in sorted(zip(begins, ends, written, strict=True)):
        if begin == end:
            continue
        if begin < last_written or (is_written and begin < last):
            return True
        last = max(last, end)
        last_written = max(last_written, end) if is_written else last_written
    return False
