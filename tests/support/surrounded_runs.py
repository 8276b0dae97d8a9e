"""Prints checksums of compiled runs in a process that sets a default dtype first: `surrounded_runs.py bfloat16 cpu`.

Nothing of the package is imported, and no constant is made, before the setting.
"""

from __future__ import annotations

import sys
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.optim import SGD, AdamW, Optimizer


class WithConstants(Optimizer):
    """Makes numbers as plain code does, by which the default dtype gets into the step; cannot be captured if `odd`."""

    def __init__(self, params: Any, lr: float = 1e-3, odd: bool = False) -> None:
        super().__init__(params, {"lr": lr, "odd": odd})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                if not group["odd"] or p.grad.sum().item() > 0:
                    m.mul_(torch.tensor(0.9))
                m.add_(p.grad, alpha=0.1)
                p.sub_(m * torch.full((1,), group["lr"], device=p.device))


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * 0.07


def trained(make: Any, device: str, **settings: Any) -> list[Any]:
    """Three steps, a checkpoint, and three steps of another one that has loaded it; what a model is exported as."""
    import collage_neuron
    from collage_neuron import checkpoint

    saved: Any = None
    for steps in (range(3), range(3, 6)):
        model: Any = Linear(300, 6, bias=False, dtype=torch.float32)
        model.weight = p = Parameter(numbers(0, 6, 300).to(device))
        optimizer: Any = collage_neuron.compile(make([p]), verbose=False, **settings)
        average = collage_neuron.AveragedModel(model, optimizer, decay=0.9)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for i in steps:
            p.grad = numbers(i + 1, 6, 300).bfloat16().to(device)
            optimizer.step()
            average.update_parameters(model)
        saved = optimizer.state_dict()
    collage_neuron.set_exact_value(optimizer, p, collage_neuron.exact_value(optimizer, p) * 1.001)
    weights, states = checkpoint.get_fp32_state_dict(model, optimizer)
    exported = [*weights.values(), *(t for state in states["state"].values() for t in state.values())]
    return [p, collage_neuron.explain(optimizer), *average.module.parameters(), *exported]


def checksum(results: list[Any]) -> int:
    found = 0
    for x in results:
        if isinstance(x, Tensor):
            x = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found = zlib.crc32(x if isinstance(x, bytes) else str(x).encode(), found)
    return found


def main(dtype: str, device: str) -> None:
    torch.set_default_dtype(getattr(torch, dtype))
    if device == "xla":
        import torch_xla  # noqa: F401  # registers the device
    for strategy in ("plus", "fp32", "stochastic", "split311")[: 4 if device == "cpu" else 1]:
        print(strategy, checksum(trained(AdamW, device, strategy=strategy)))
    print("captured", checksum(trained(WithConstants, device)))
    if device == "cpu":  # on XLA each operation of a step on copies is compiled
        print("copies", checksum(trained(lambda params: WithConstants(params, odd=True), device)))
        print("momentum", checksum(trained(lambda params: SGD(params, lr=1e-3, momentum=0.9), device)))


if __name__ == "__main__":
    main(*sys.argv[1:])
