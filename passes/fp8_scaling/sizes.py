"""The sizes of a graph's values, inferred from those of its inputs by one rule for each operation.

A size is the binary logarithm of a value's expected root mean square. Elements are taken to be independent and centred,
which is what makes a sum of n of them sqrt(n) times as large. Values that cannot be negative add up to n times as much,
so a size remembers if it is one of those.

`RULES` has one rule for each operation, by which the size of a result follows from those of the operands. An operation
without a rule makes its result unknown, and so everything that is computed from it. Numbers like 0.75 are those of a
normal distribution: the rms of gelu(x) is 0.57 of that of x, near x = 1.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from collage_neuron.passes.ir.stage import ancestors
from collage_neuron.passes.rewrite.rules.table import registering

aten: Any = torch.ops.aten


class Size(NamedTuple):
    """Values of root mean square 2**log; -inf for zeros."""

    log: float
    positive: bool = False
    """No value is negative."""
    peak: float = 0.0
    """The logarithm of largest magnitude over root mean square, where a scale should leave room for that."""

    def times(self, factor: float) -> Size:
        """The size after a multiplication by a positive number."""
        return Size(self.log + math.log2(factor), self.positive)

    def signed(self) -> Size:
        """The same magnitude, of values of either sign."""
        return Size(self.log)


def of_number(x: float) -> Size:
    """The size of a constant."""
    return Size(math.log2(abs(x)) if x else -math.inf, x >= 0)


def added(*sizes: Size) -> Size:
    """Of a sum of independent values: their squares add up, or they themselves if none is negative."""
    positive = all(s.positive for s in sizes)
    power = 1 if positive else 2
    largest = max(s.log for s in sizes)
    if math.isinf(largest):
        return Size(largest, positive)
    return Size(largest + math.log2(sum(2.0 ** (power * (s.log - largest)) for s in sizes)) / power, positive)


def multiplied(*sizes: Size) -> Size:
    """Of a product of independent values."""
    return Size(sum(s.log for s in sizes), all(s.positive for s in sizes))


def summed(x: Size, n: float) -> Size:
    """Of a sum over n elements."""
    return Size(x.log + math.log2(max(n, 1)) * (1 if x.positive else 0.5), x.positive)


def mixed(*sizes: Size) -> Size:
    """Of values that are taken from one of several: about as large as the largest."""
    return Size(max(s.log for s in sizes), all(s.positive for s in sizes))


Sizes = Size | tuple[Size, ...]


class Unknown(Exception):
    """A size that a rule asks for is not known."""


class Operands:
    """What a rule sees of an operation: its arguments, the sizes of those that are values, and shapes."""

    def __init__(self, node: Node, found: dict[Node, Sizes]) -> None:
        self.node = node
        self.args: tuple[Any, ...] = node.args
        self.found = found

    def __getitem__(self, i: int) -> Size:
        """The size of argument `i`, a value or a number."""
        return self.size(self.args[i])

    def size(self, x: Any) -> Size:
        """The size of a value or number; Unknown if it has none."""
        if isinstance(x, (bool, int, float)):
            return of_number(float(x))
        found = self.found.get(x) if isinstance(x, Node) else None
        if not isinstance(found, Size):
            raise Unknown
        return found

    def given(self, i: int, default: Any = None) -> Any:
        """Argument `i` as written, or the default if it is left out."""
        return self.args[i] if len(self.args) > i else default

    def elements(self, x: Any = None) -> int:
        """The number of elements of a value, by default of the result."""
        return int((self.node if x is None else x).meta["val"].numel())

    def shape(self, x: Any = None) -> tuple[int, ...]:
        """The shape of a value, by default of the result."""
        return tuple((self.node if x is None else x).meta["val"].shape)


def packet(node: Node) -> Any:
    """The operation of a node, without its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def views_bits(node: Node) -> bool:
    """Returns True for a view in another dtype."""
    return any(isinstance(a, torch.dtype) for a in node.args)


Rule = Callable[[Operands], Sizes]

RULES: dict[Any, Rule] = {}
"""The rule of each operation, all of its overloads."""


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Registers a rule for operations; an operation has one rule."""
    return registering(RULES, targets)


def _terms(x: Operands) -> float:
    """The number of elements of the first operand for each one of the result."""
    return x.elements(x.args[0]) / max(1, x.elements())


_SHORT: tuple[tuple[tuple[Any, ...], Rule], ...] = (
    ((aten.neg,), lambda x: x[0].signed()),
    ((aten.div,), lambda x: Size(x[0].log - x[1].log, x[0].positive and x[1].positive)),
    ((aten.addcmul,), lambda x: added(x[0], multiplied(x[1], x[2]))),
    ((aten.rsqrt,), lambda x: Size(-x[0].log / 2, True)),
    ((aten.sqrt,), lambda x: Size(x[0].log / 2, True)),
    ((aten.reciprocal,), lambda x: Size(-x[0].log, x[0].positive)),
    ((aten.abs,), lambda x: Size(x[0].log, True)),
    ((aten.where,), lambda x: mixed(x[1], x[2])),
    ((aten.cat, aten.stack), lambda x: mixed(*map(x.size, x.args[0]))),
    # Filled with zeros or with minus infinity for a softmax: what is left is as large as before.
    ((aten.masked_fill,), lambda x: x[0]),
    ((aten.full, aten.full_like, aten.fill), lambda x: x[1]),
    ((aten.scalar_tensor,), lambda x: x[0]),
    ((aten.ones, aten.ones_like, aten.new_ones), lambda x: of_number(1)),
    ((aten.zeros, aten.zeros_like, aten.new_zeros), lambda x: of_number(0)),
    # Of angles from a full circle: rms sqrt(1/2), whatever the operand.
    ((aten.sin, aten.cos), lambda x: Size(-0.5)),
    ((aten.split, aten.split_with_sizes, aten.unbind, aten.chunk), lambda x: (x[0],) * len(x.node.meta["val"])),
    # As many squares, beside zeros.
    ((aten.slice_backward, aten.select_backward, aten.constant_pad_nd), lambda x: x[0].times(_terms(x) ** 0.5)),
    ((aten.sum,), lambda x: summed(x[0], _terms(x))),
    ((aten.mean,), lambda x: summed(x[0], _terms(x)).times(1 / _terms(x))),
    # A sum of products over the inner dimension.
    ((aten.mm, aten.bmm), lambda x: summed(multiplied(x[0], x[1]), x.shape(x.args[0])[-1])),
    # Half of a large operand is kept; of a small one half its size.
    ((aten.gelu, aten.silu), lambda x: Size(x[0].log - 0.8)),
    # Gradients times a derivative from 0 to 1.
    ((aten.gelu_backward, aten.silu_backward), lambda x: Size(x[0].log - 0.75)),
    ((aten.tanh_backward,), lambda x: Size(x[0].log - 0.5)),
    # Half of the squares stay.
    ((aten.relu,), lambda x: Size(x[0].log - 0.5, True)),
    ((aten.threshold_backward,), lambda x: Size(x[0].log - 0.5)),
    ((aten.sigmoid,), lambda x: Size(-1.0, True)),
    # The gradient times at most 1/4.
    ((aten.sigmoid_backward,), lambda x: Size(x[0].log - 2)),
    # The operand, at most 1.
    ((aten.tanh,), lambda x: Size(min(x[0].log, -0.5))),
    # The gradient, times the factor of the elements that are kept.
    ((aten.native_dropout_backward,), lambda x: x[0].times(math.sqrt(max(float(x.given(2)), 1)))),
    # Between 1/n of equal scores and 1/sqrt(n) of a single one: measured, n ** -0.75.
    ((aten._softmax, aten._safe_softmax), lambda x: Size(-0.75 * math.log2(x.shape()[-1]), True)),
    # The gradient times the probabilities.
    ((aten._softmax_backward_data,), lambda x: Size(x[0].log + x[1].log)),
    # Each row is the sum of the gradients at one token.
    ((aten.embedding_dense_backward,), lambda x: summed(x[0].signed(), x.elements(x.args[1]) / int(x.given(2)))),
    # The logarithm of 1 / n; and the gradient, less its sum times the probabilities.
    ((aten._log_softmax,), lambda x: of_number(-math.log(max(2, x.shape()[-1])))),
    ((aten._log_softmax_backward_data,), lambda x: x[0].signed()),
)
"""Operations whose rule is one expression."""

for _targets, _of in _SHORT:
    rule(*_targets)(_of)


@rule(
    *(aten.view, aten._unsafe_view, aten.t, aten.transpose, aten.permute, aten.squeeze, aten.unsqueeze),
    *(aten.clone, aten.detach, aten.alias, aten._to_copy, aten.expand, aten.slice, aten.select, aten.index),
    *(aten.embedding, aten.clamp, aten.clamp_min, aten.lift_fresh_copy, aten.repeat, aten.flip, aten.gather),
)
def moved(x: Operands) -> Sizes:
    """The elements of the operand, or some of them."""
    if views_bits(x.node):
        raise Unknown
    return x[0]


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


@rule(aten.pow)
def power(x: Operands) -> Sizes:
    """a ** k, of a number k."""
    k = x.args[1]
    if not isinstance(k, (int, float)):
        raise Unknown
    return Size(x[0].log * k, x[0].positive or k % 2 == 0)


@rule(aten.addmm, aten.baddbmm)
def addmm(x: Operands) -> Sizes:
    """a + b @ c, without factors."""
    if x.node.kwargs:
        raise Unknown
    return added(x[0], summed(multiplied(x[1], x[2]), x.shape(x.args[1])[-1]))


@rule(aten.native_dropout)
def dropout(x: Operands) -> Sizes:
    """1 - p of the elements, divided by that; and the mask."""
    left = 1 - float(x.given(1))
    return x[0].times(1 / math.sqrt(left)) if left > 0 else of_number(0), Size(0.5 * math.log2(left or 1), True)


def _attended(x: Operands, keys: Any) -> float:
    """A mean over n values with the probabilities of `softmax`: n ** -0.75 * sqrt(n)."""
    return -0.25 * math.log2(x.shape(keys)[-2])


@rule(aten._scaled_dot_product_flash_attention_for_cpu)
def attention(x: Operands) -> Sizes:
    """softmax(q @ k) @ v, and the logarithm of the sum of exponentials."""
    n = x.shape(x.args[1])[-2]
    return Size(x[2].log + _attended(x, x.args[1])), of_number(math.log(n + 1))


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def attention_backward(x: Operands) -> Sizes:
    """Of q, k and v: the factor 1 / sqrt(d) cancels the sum over d elements of grad @ v."""
    mean = Size(_attended(x, x.args[2]))
    grad, q, k, v = (x[i].signed() for i in range(4))
    return multiplied(grad, v, k, mean), multiplied(grad, v, q, mean), multiplied(grad, mean)


def _gain(x: Operands, weight: int) -> Size:
    return of_number(1) if x.given(weight) is None else x[weight]


@rule(aten.native_layer_norm)
def layer_norm(x: Operands) -> Sizes:
    """The gain, and the bias; the mean, and 1 / rms."""
    gain = _gain(x, 2).signed()
    out = gain if x.given(3) is None else added(gain, x[3])
    return out, Size(x[0].log - 3), Size(-x[0].log, True)


@rule(aten.native_layer_norm_backward)
def layer_norm_backward(x: Operands) -> Sizes:
    """The gradient times the gain over the rms of the operand; of gain and bias, sums over rows."""
    grad, weight = x[0].signed(), _gain(x, 5)
    rows = x.elements(x.args[1]) / math.prod(x.args[2])
    return Size(grad.log + weight.log - x[1].log), summed(grad, rows), summed(grad, rows)


@rule(aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional, aten.native_batch_norm)
def batch_norm(x: Operands) -> Sizes:
    """The gain, and the bias; the mean, and 1 / rms; averages of both. Also what torch_xla calls a layer norm."""
    gain = _gain(x, 1).signed()
    out = gain if x.given(2) is None else added(gain, x[2])
    mean, scale = Size(x[0].log - 3), Size(-x[0].log, True)
    return out, mean, scale, mean, Size(2 * x[0].log, True)


@rule(aten.native_batch_norm_backward)
def batch_norm_backward(x: Operands) -> Sizes:
    """The gradient times the gain over the rms of the operand; of gain and bias, sums."""
    grad = x[0].signed()
    of_weights = summed(grad, x.elements(x.args[0]) / x.shape(x.args[0])[1])
    return Size(grad.log + _gain(x, 2).log - x[1].log), of_weights, of_weights


_MEAN = 1
"""Of a loss: the mean of all rows, torch's default."""


@rule(aten.nll_loss_forward)
def nll_loss(x: Operands) -> Sizes:
    """One logarithm a row, and the number of rows."""
    rows = x.shape(x.args[0])[0]
    size = Size(x[0].log, True)
    return size if x.given(3, _MEAN) <= _MEAN else summed(size, rows), of_number(rows)


@rule(aten.nll_loss_backward)
def nll_loss_backward(x: Operands) -> Sizes:
    """One element of each row."""
    rows, classes = x.shape(x.args[1])
    grad = x[0].signed().times(1 / math.sqrt(classes))
    return grad.times(1 / rows) if x.given(4, _MEAN) == _MEAN else grad


@rule(aten.mse_loss)
def mse_loss(x: Operands) -> Sizes:
    """The mean of squared differences, or their sum."""
    square = Size(2 * added(x[0].signed(), x[1]).log, True)
    return summed(square, x.elements(x.args[0])) if x.given(2, _MEAN) > _MEAN else square


@rule(aten.mse_loss_backward)
def mse_loss_backward(x: Operands) -> Sizes:
    """Twice the difference, divided by the number of elements if the loss is their mean."""
    found = multiplied(x[0], added(x[1].signed(), x[2])).times(2).signed()
    return found.times(1 / x.elements()) if x.given(3, _MEAN) == _MEAN else found


@rule(operator.getitem)
def item(x: Operands) -> Sizes:
    """One of several results."""
    several, index = x.found.get(x.args[0]), int(x.args[1])
    if several is None or isinstance(several, Size) or len(several) <= index:
        raise Unknown
    return several[index]


# The analysis


def analyse(graph: Graph, given: Mapping[Node, Size]) -> dict[Node, Sizes]:
    """The sizes of all values that follow from `given`, the sizes of some inputs; unknown ones are missing."""
    found: dict[Node, Sizes] = dict(given)
    for node in graph.nodes:
        if node.op == "call_function" and node not in found and packet(node) in RULES:
            with suppress(Unknown):
                found[node] = RULES[packet(node)](Operands(node, found))
    return found


def known(size: Sizes | None) -> bool:
    """Returns True for the size of one value that is neither unknown nor zero nor infinite."""
    return isinstance(size, Size) and math.isfinite(size.log)


def reason(node: Node, found: Mapping[Node, Sizes]) -> str:
    """Why the size of a value is not known: the operations before it that have no rule, or are of no known size."""
    unknown = ancestors([node], lambda x: [y for y in x.all_input_nodes if not known(found.get(y))])
    operations = {packet(x) for x in unknown if x.op == "call_function"}
    if named := sorted(map(str, operations - RULES.keys())):
        return f"{', '.join(named)} has no rule"
    return "it is computed from zeros, or from values whose size is not known"
