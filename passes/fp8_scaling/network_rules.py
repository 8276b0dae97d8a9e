"""Sizes of activations, norms, attention, embeddings and losses, and of their backward operations.

Numbers like 0.75 are those of a normal distribution: the rms of gelu(x) is 0.57 of that of x, near x = 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from collage_neuron.passes.fp8_scaling.registry import Operands, Sizes, rule
from collage_neuron.passes.fp8_scaling.sizes import Size, added, multiplied, of_number, summed

aten: Any = torch.ops.aten


@rule(aten.gelu, aten.silu)
def gelu(x: Operands) -> Sizes:
    """Half of a large operand is kept; of a small one half its size."""
    return Size(x[0].log - 0.8)


@rule(aten.gelu_backward, aten.silu_backward)
def gelu_backward(x: Operands) -> Sizes:
    """The gradient times a derivative from 0 to 1."""
    return Size(x[0].log - 0.75)


@rule(aten.relu)
def relu(x: Operands) -> Sizes:
    """Half of the squares stay."""
    return Size(x[0].log - 0.5, True)


@rule(aten.threshold_backward)
def relu_backward(x: Operands) -> Sizes:
    """Half of the gradients stay."""
    return Size(x[0].log - 0.5)


@rule(aten.sigmoid)
def sigmoid(x: Operands) -> Sizes:
    """About 1/2."""
    return Size(-1.0, True)


@rule(aten.sigmoid_backward)
def sigmoid_backward(x: Operands) -> Sizes:
    """The gradient times at most 1/4."""
    return Size(x[0].log - 2)


@rule(aten.tanh)
def tanh(x: Operands) -> Sizes:
    """The operand, at most 1."""
    return Size(min(x[0].log, -0.5))


@rule(aten.tanh_backward)
def tanh_backward(x: Operands) -> Sizes:
    """The gradient times a derivative from 0 to 1."""
    return Size(x[0].log - 0.5)


@rule(aten.native_dropout)
def dropout(x: Operands) -> Sizes:
    """1 - p of the elements, divided by that; and the mask."""
    left = 1 - float(x.given(1))
    return x[0].times(1 / math.sqrt(left)) if left > 0 else of_number(0), Size(0.5 * math.log2(left or 1), True)


@rule(aten.native_dropout_backward)
def dropout_backward(x: Operands) -> Sizes:
    """The gradient, times the factor of the elements that are kept."""
    return x[0].times(math.sqrt(max(float(x.given(2)), 1)))


@rule(aten._softmax, aten._safe_softmax)
def softmax(x: Operands) -> Sizes:
    """Between 1/n of equal scores and 1/sqrt(n) of a single one: measured, n ** -0.75."""
    return Size(-0.75 * math.log2(x.shape()[-1]), True)


@rule(aten._softmax_backward_data)
def softmax_backward(x: Operands) -> Sizes:
    """The gradient times the probabilities."""
    return Size(x[0].log + x[1].log)


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
    rows = x.elements(x.args[1]) / math.prod(x.args[2])  # type: ignore[arg-type]  # a shape
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


@rule(aten.embedding_dense_backward)
def embedding_backward(x: Operands) -> Sizes:
    """Each row is the sum of the gradients at one token."""
    return summed(x[0].signed(), x.elements(x.args[1]) / int(x.given(2)))


@rule(aten._log_softmax)
def log_softmax(x: Operands) -> Sizes:
    """The logarithm of 1 / n."""
    return of_number(-math.log(max(2, x.shape()[-1])))


@rule(aten._log_softmax_backward_data)
def log_softmax_backward(x: Operands) -> Sizes:
    """The gradient, less its sum times the probabilities."""
    return x[0].signed()


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
