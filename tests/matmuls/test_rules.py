"""Every rule against the operation itself: the predicted size of a result is within a binade of the measured one."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fp8_models import binades
from torch import Tensor
from torch.fx import Graph

from collage_neuron.matmuls.scales import size_of
from collage_neuron.passes.fp8_scaling.sizes import (
    RULES,
    Size,
    added,
    analyse,
    known,
    multiplied,
    of_number,
    reason,
    summed,
)  # fmt: skip

aten: Any = torch.ops.aten


def normal(*shape: int, size: float = 1.0, seed: int = 0) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def predicted(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The size that the rules give the result of an operation, and the result."""
    graph = Graph()
    tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
    holders = {id(t): graph.placeholder(f"x{i}") for i, t in enumerate(tensors)}

    def put(x: Any) -> Any:
        if isinstance(x, list):
            return [put(y) for y in x]
        return holders[id(x)] if isinstance(x, Tensor) else x

    node = graph.call_function(target, tuple(put(a) for a in args), kwargs)
    for t in tensors:
        holders[id(t)].meta["val"] = t
    node.meta["val"] = result = target(*args, **kwargs)
    given = {holders[id(t)]: size_of(t) for t in tensors if t.is_floating_point()}
    return analyse(graph, given).get(node), result


X, Y, G = normal(32, 64, size=3.0), normal(32, 64, size=0.2, seed=1), normal(32, 64, size=0.01, seed=2)
Z = normal(32, 64, seed=3)
POSITIVE = X.abs()
W = normal(64, size=0.5, seed=4)
IDS = torch.randint(16, (32,), generator=torch.Generator().manual_seed(0))
HEADS = [normal(2, 4, 32, 16, seed=i) for i in range(4)]
ATTENDED = aten._scaled_dot_product_flash_attention_for_cpu.default(*HEADS[:3])
NORMED = aten.native_layer_norm.default(X, [64], W, W, 1e-5)
SCORES = torch.log_softmax(Z, -1)
TOTAL = torch.tensor(32.0)
BATCHED = (None, None, True, 0.1, 1e-5)

CASES: list[tuple[Any, Sequence[Any]]] = [
    *((op.default, (X,)) for op in (aten.t, aten.clone, aten.detach, aten.alias, aten._to_copy, aten.lift_fresh_copy)),
    *((op.default, (X,)) for op in (aten.neg, aten.abs, aten.relu, aten.ones_like)),
    *((op.default, (Z,)) for op in (aten.gelu, aten.silu, aten.sigmoid, aten.tanh)),
    *((op.default, (G, Z)) for op in (aten.gelu_backward, aten.silu_backward)),
    *((op.default, (POSITIVE + 1,)) for op in (aten.rsqrt, aten.reciprocal)),
    *((op.default, (X * 9,)) for op in (aten.sin, aten.cos)),
    *((op, (X, 2.5)) for op in (aten.full_like.default, aten.fill.Scalar)),
    *((op.default, (X, [64, 32])) for op in (aten.view, aten._unsafe_view)),
    *((op, (X, 0)) for op in (aten.squeeze.dim, aten.unsqueeze.default)),
    *((op.default, ([X, Z],)) for op in (aten.cat, aten.stack)),
    (aten.transpose.int, (X, 0, 1)),
    (aten.permute.default, (X, [1, 0])),
    (aten.expand.default, (X, [4, 32, 64])),
    (aten.slice.Tensor, (X, 0, 0, 16)),
    (aten.select.int, (X, 0, 3)),
    (aten.index.Tensor, (X, [IDS])),
    (aten.embedding.default, (X, IDS)),
    (aten.clamp.default, (X, -9.0, 9.0)),
    (aten.clamp_min.default, (POSITIVE, 0.1)),
    (aten.repeat.default, (X, [2, 1])),
    (aten.flip.default, (X, [0])),
    (aten.gather.default, (X, 0, IDS[None, :].expand(4, 32).contiguous())),
    (aten.split.Tensor, (X, 16)),
    (aten.split_with_sizes.default, (X, [16, 16])),
    (aten.unbind.int, (X,)),
    (aten.chunk.default, (X, 2)),
    (aten.slice_backward.default, (X, [128, 64], 0, 0, 32, 1)),
    (aten.select_backward.default, (X, [8, 32, 64], 0, 3)),
    (aten.constant_pad_nd.default, (X, [64, 0])),
    (aten.add.Tensor, (X, Y)),
    (aten.add.Tensor, (X, 5)),
    (aten.add.Tensor, (POSITIVE, POSITIVE)),
    (aten.sub.Tensor, (X, Z)),
    (aten.mul.Tensor, (X, Y)),
    (aten.mul.Tensor, (X, -0.3)),
    (aten.mul.Tensor, (X, X)),
    (aten.div.Tensor, (X, 7)),
    (aten.addcmul.default, (X, Y, Z)),
    (aten.pow.Tensor_Scalar, (X, 2)),
    (aten.sqrt.default, (POSITIVE,)),
    (aten.sum.dim_IntList, (X, [0])),
    (aten.sum.dim_IntList, (POSITIVE, [0])),
    (aten.mean.dim, (X, [-1])),
    (aten.mean.dim, (POSITIVE, [-1])),
    (aten.mm.default, (X, Y.t().contiguous())),
    (aten.mm.default, (POSITIVE, POSITIVE.t().contiguous())),
    (aten.bmm.default, (X[None], Y.t()[None].contiguous())),
    (aten.addmm.default, (X[:, :32], X, Y.t().contiguous())),
    (aten.baddbmm.default, (X[None, :, :32], X[None], Y.t()[None].contiguous())),
    (aten.where.self, (Z > 0, X, Y)),
    (aten.masked_fill.Scalar, (X, Z > 2, 0.0)),
    (aten.full.default, ([3], 2.5)),
    (aten.scalar_tensor.default, (2.5,)),
    (aten.ones.default, ([3],)),
    (aten.new_ones.default, (X, [3])),
    (aten.threshold_backward.default, (G, X, 0)),
    (aten.sigmoid_backward.default, (G, torch.sigmoid(Z))),
    (aten.tanh_backward.default, (G, torch.tanh(Z))),
    (aten.native_dropout.default, (X, 0.3, True)),
    (aten.native_dropout_backward.default, (G * (Z > -1), Z > -1, 1.2)),
    (aten._softmax.default, (Z, -1, False)),
    (aten._safe_softmax.default, (Z, -1)),
    (aten._softmax_backward_data.default, (G, torch.softmax(Z, -1), -1, torch.float32)),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, HEADS[:3]),
    (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (HEADS[3], *HEADS[:3], *ATTENDED, 0.0, False)),
    (aten.native_layer_norm.default, (X, [64], W, None, 1e-5)),
    (aten.native_layer_norm.default, (X, [64], W, Y[0], 1e-5)),
    (aten.native_layer_norm_backward.default, (G, X, [64], *NORMED[1:], W, W, [True, True, True])),
    (aten._native_batch_norm_legit.no_stats, (X, W, None, True, 0.1, 1e-5)),
    (aten.native_batch_norm.default, (X, W, None, *BATCHED)),
    (aten._native_batch_norm_legit_functional.default, (X, W, W, normal(64), POSITIVE[0], True, 0.1, 1e-5)),
    (
        aten.native_batch_norm_backward.default,
        (G, X, W, None, None, X.mean(0), (X.var(0) + 1e-5).rsqrt(), True, 1e-5, [True, True, True]),
    ),
    (aten.embedding_dense_backward.default, (normal(32, 8), IDS, 16, -1, False)),
    (aten._log_softmax.default, (Z, -1, False)),
    (aten._log_softmax_backward_data.default, (G, SCORES, -1, torch.float32)),
    (aten.nll_loss_forward.default, (SCORES, IDS, None, 1, -100)),
    (aten.nll_loss_backward.default, (torch.tensor(0.3), SCORES, IDS, None, 1, -100, TOTAL)),
    (aten.nll_loss_forward.default, (SCORES, IDS, None, 2, -100)),
    (aten.mse_loss.default, (X, Y)),
    (aten.mse_loss.default, (X, Y, 2)),
    (aten.mse_loss_backward.default, (torch.tensor(0.3), X, Y, 1)),
]
WITHOUT_A_SIZE = {aten.zeros, aten.zeros_like, aten.new_zeros, operator.getitem}
"""Results of size zero, and one of several results."""
ROUGH = {aten.native_layer_norm, aten._native_batch_norm_legit, aten.native_batch_norm} | {
    aten._native_batch_norm_legit_functional
}
"""Norms: means are small, and by how much depends on the data; nothing is multiplied by them."""


@pytest.mark.parametrize(("target", "args"), CASES, ids=lambda x: str(x) if not isinstance(x, (list, tuple)) else "")
def test_the_size_of_a_result(target: Any, args: Sequence[Any]) -> None:
    found, result = predicted(target, args, {})
    assert found is not None
    pairs = [(found, result)] if isinstance(result, Tensor) else list(zip(found, result, strict=False))
    pairs = pairs[:1] + pairs[2:3] if target.overloadpacket in ROUGH else pairs
    compared = [
        (size, t) for size, t in pairs if isinstance(t, Tensor) and t.is_floating_point() and bool((t != 0).any())
    ]
    assert compared
    for size, t in compared:
        assert abs(size.log - binades(t)) <= 1, (size, binades(t))
        assert not size.positive or bool((t >= 0).all())


def test_every_rule_has_a_case() -> None:
    assert RULES.keys() - {target.overloadpacket for target, _ in CASES} == WITHOUT_A_SIZE


def test_a_sum_of_positive_numbers_grows_faster() -> None:
    assert summed(Size(0.0), 64) == Size(3.0)
    assert summed(Size(0.0, True), 64) == Size(6.0, True)
    assert added(Size(1.0), Size(1.0)) == Size(1.5)
    assert added(Size(1.0, True), Size(1.0, True)) == Size(2.0, True)
    assert multiplied(Size(1.0, True), Size(2.0)) == Size(3.0)
    assert of_number(-0.25) == Size(-2.0, False)


def test_zeros_add_nothing_and_are_not_known() -> None:
    zero = of_number(0)
    assert added(zero, Size(3.0)) == Size(3.0)
    assert added(zero, zero).log == -math.inf
    assert not known(zero)
    assert not known(multiplied(zero, Size(1.0)))
    assert not known(None)
    assert not known((Size(1.0), Size(1.0)))


def test_what_is_not_known_stays_so_and_says_why() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    odd = graph.call_function(aten.erfinv.default, (x,))
    after = graph.call_function(aten.neg.default, (odd,))
    sizes = analyse(graph, {x: Size(0.0)})
    assert after not in sizes
    assert reason(after, sizes) == "aten.erfinv has no rule"
    bits = graph.call_function(aten.view.dtype, (x, torch.int32))
    assert bits not in analyse(graph, {x: Size(0.0)})
    assert "from zeros" in reason(bits, sizes)
