"""What operations return is worked out once for tensors that are alike; what torch rejects is rejected each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from collage_neuron.passes.functionalize.recorded_ops import Geometry, results_without_data

aten = torch.ops.aten


class Counting(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("func", [aten.add.Tensor, aten.add_.Tensor])
def test_tensors_that_are_alike_are_looked_at_once(func: torch._ops.OpOverload) -> None:
    def of(x: float) -> list[Geometry]:
        return results_without_data(func, (torch.full((3, 5), x), torch.ones(5)), {"alpha": x})

    assert of(1.0) == [Geometry((3, 5), (5, 1), torch.float32, 0)]
    with Counting() as seen:  # type: ignore[no-untyped-call]  # torch's
        assert of(2.0) == of(3.0)
    assert seen.count == 2 * 2  # the two tensors that are given


def test_an_operation_that_torch_rejects_is_rejected_each_time() -> None:
    x, wider = torch.ones(3), torch.ones(2, 3)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            results_without_data(aten.mul_.Tensor, (x, wider), {})
        assert results_without_data(aten.mul_.Tensor, (wider, x), {})[0].shape == (2, 3)


def test_dimensions_of_a_reduction_tell_results_apart() -> None:
    x = torch.ones(3, 5)
    shapes = [results_without_data(aten.sum.dim_IntList, (x, [dim]), {})[0].shape for dim in (0, 1, 0)]
    assert shapes == [(5,), (3,), (5,)]
