"""Sizes of elementwise operations, of sums and matmuls, and of operations that only move elements."""

from __future__ import annotations

import math
from typing import Any

import torch

from collage_neuron.passes.fp8_scaling.registry import Operands, Sizes, Unknown, rule
from collage_neuron.passes.fp8_scaling.sizes import Size, added, mixed, multiplied, of_number, summed

aten: Any = torch.ops.aten


@rule(
    *(aten.view, aten._unsafe_view, aten.t, aten.transpose, aten.permute, aten.squeeze, aten.unsqueeze),
    *(aten.clone, aten.detach, aten.alias, aten._to_copy, aten.expand, aten.slice, aten.select, aten.index),
    *(aten.embedding, aten.clamp, aten.clamp_min, aten.lift_fresh_copy, aten.repeat, aten.flip, aten.gather),
)
def moved(x: Operands) -> Sizes:
    """The elements of the operand, or some of them."""
    if any(isinstance(a, torch.dtype) for a in x.args):  # a view of the bits
        raise Unknown
    return x[0]


@rule(aten.split, aten.split_with_sizes, aten.unbind, aten.chunk)
def parts(x: Operands) -> Sizes:
    """The elements of the operand, in several tensors."""
    return (x[0],) * len(x.node.meta["val"])


@rule(aten.cat, aten.stack)
def joined(x: Operands) -> Sizes:
    """About as large as the largest part."""
    return mixed(*map(x.size, x.args[0]))  # type: ignore[arg-type]  # a list of nodes


@rule(aten.slice_backward, aten.select_backward, aten.constant_pad_nd)
def padded(x: Operands) -> Sizes:
    """As many squares, beside zeros."""
    return x[0].times(math.sqrt(x.elements(x.args[0]) / x.elements()))


@rule(aten.neg)
def neg(x: Operands) -> Sizes:
    """-a."""
    return x[0].signed()


@rule(aten.add, aten.sub)
def add(x: Operands) -> Sizes:
    """a + alpha * b; a difference is as large as a sum."""
    other = multiplied(x[1], x.size(abs(x.node.kwargs.get("alpha", 1))))  # type: ignore[arg-type]  # a number
    subtracts = x.node.target.overloadpacket is aten.sub  # type: ignore[union-attr]  # an operation
    return added(x[0], other.signed() if subtracts else other)


@rule(aten.mul)
def mul(x: Operands) -> Sizes:
    """a * b; a square is not negative."""
    found = multiplied(x[0], x[1])
    return Size(found.log, True) if x.args[0] is x.args[1] else found


@rule(aten.div)
def div(x: Operands) -> Sizes:
    """a / b."""
    return Size(x[0].log - x[1].log, x[0].positive and x[1].positive)


@rule(aten.addcmul)
def addcmul(x: Operands) -> Sizes:
    """a + b * c."""
    return added(x[0], multiplied(x[1], x[2]))


@rule(aten.pow)
def power(x: Operands) -> Sizes:
    """a ** k, of a number k."""
    k = x.args[1]
    if not isinstance(k, (int, float)):
        raise Unknown
    return Size(x[0].log * k, x[0].positive or k % 2 == 0)


@rule(aten.rsqrt)
def rsqrt(x: Operands) -> Sizes:
    """a ** -0.5."""
    return Size(-x[0].log / 2, True)


@rule(aten.sqrt)
def sqrt(x: Operands) -> Sizes:
    """a ** 0.5."""
    return Size(x[0].log / 2, True)


@rule(aten.reciprocal)
def reciprocal(x: Operands) -> Sizes:
    """1 / a."""
    return Size(-x[0].log, x[0].positive)


@rule(aten.abs)
def absolute(x: Operands) -> Sizes:
    """|a|."""
    return Size(x[0].log, True)


@rule(aten.sum)
def total(x: Operands) -> Sizes:
    """The sum over some dimensions, or all."""
    return summed(x[0], x.elements(x.args[0]) / max(1, x.elements()))


@rule(aten.mean)
def mean(x: Operands) -> Sizes:
    """The sum divided by the number of its terms."""
    n = x.elements(x.args[0]) / max(1, x.elements())
    return summed(x[0], n).times(1 / n)


@rule(aten.mm, aten.bmm)
def matmul(x: Operands) -> Sizes:
    """A sum of products over the inner dimension."""
    return summed(multiplied(x[0], x[1]), x.shape(x.args[0])[-1])


@rule(aten.addmm, aten.baddbmm)
def addmm(x: Operands) -> Sizes:
    """a + b @ c, without factors."""
    if x.node.kwargs:
        raise Unknown
    return added(x[0], summed(multiplied(x[1], x[2]), x.shape(x.args[1])[-1]))


@rule(aten.where)
def where(x: Operands) -> Sizes:
    """One of two."""
    return mixed(x[1], x[2])


@rule(aten.masked_fill)
def masked_fill(x: Operands) -> Sizes:
    """Filled with zeros or with minus infinity for a softmax: what is left is as large as before."""
    return x[0]


@rule(aten.full, aten.full_like, aten.fill)
def full(x: Operands) -> Sizes:
    """A constant."""
    return x[1]


@rule(aten.scalar_tensor)
def scalar_tensor(x: Operands) -> Sizes:
    """A constant."""
    return x[0]


@rule(aten.ones, aten.ones_like, aten.new_ones)
def ones(x: Operands) -> Sizes:
    """1."""
    return of_number(1)


@rule(aten.zeros, aten.zeros_like, aten.new_zeros)
def zeros(x: Operands) -> Sizes:
    """0."""
    return of_number(0)


@rule(aten.sin, aten.cos)
def sine(x: Operands) -> Sizes:
    """Of angles from a full circle: rms sqrt(1/2), whatever the operand."""
    return Size(-0.5)
