"""The memory that a step as written needs for a moment."""

from __future__ import annotations

from typing import Any

import torch
from as_written import Written
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import collage_neuron

ELEMENTS = 1 << 20


class Scaled(Written):
    """Momentum over its norm, without temporary tensors."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state.setdefault("m", torch.zeros_like(p)).lerp_(g, 0.1)
        p.add_(m, alpha=-group["lr"] / float(m.norm() + 1))


class Living(TorchDispatchMode):
    """The bytes of all memory that operations have made and that is still there, and the most that there was."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self._held = 0, {}  # type: ignore[var-annotated]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(x, torch.Tensor) and x.numel() > 100:
                memory = x.untyped_storage()
                self._held[memory.data_ptr()] = torch.multiprocessing.reductions.StorageWeakRef(memory), memory.nbytes()
        self._held = {k: v for k, v in self._held.items() if not v[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._held.values()))
        return out


def test_a_step_needs_four_bytes_for_each_value() -> None:
    p = Parameter(torch.ones(1024, ELEMENTS // 1024, dtype=torch.bfloat16))
    optimizer = collage_neuron.compile(Scaled([p]), strategy="full")
    p.grad = torch.ones_like(p)
    optimizer.step()
    with Living() as living:
        optimizer.step()
    # The parameter, its gradient and the momentum in fp32, and their words; then the gradient is compared in bf16.
    assert 3 * 4 * ELEMENTS <= living.most <= (3 * 4 + 10 + 2 + 0.4) * ELEMENTS
    assert p.grad.dtype == torch.bfloat16
    assert sum(x.nbytes for x in optimizer.state[p].values()) == 6 * ELEMENTS
