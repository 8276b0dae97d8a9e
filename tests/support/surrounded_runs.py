"""Prints what comes out of compiled runs in processes that make a setting first: `surrounded_runs.py bfloat16 none`.

One line a run: the setting, the run's name, and a checksum of all bits. `xla bfloat16` is the setting with a parameter
on XLA's device. Each process is forked off one that has imported torch alone: nothing of the package is imported, and
no constant is made, before the setting.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._dynamo  # any optimizer imports it, for a second
import torch._inductor.fx_passes.post_grad  # torch_xla imports it, for three
from sampling import part
from torch.nn import Linear, Parameter
from torch.optim import SGD, AdamW, Optimizer

CPU = torch.device("cpu")


def surrounding(settings: str) -> AbstractContextManager[Any]:
    """Makes settings of the process, or returns the context that is one."""
    for setting in settings.split(", "):
        if setting in ("bfloat16", "float64"):
            torch.set_default_dtype(getattr(torch, setting))
        elif setting == "meta":
            torch.set_default_device("meta")
    return torch.autocast("cpu", torch.bfloat16) if "autocast" in settings else nullcontext()


class WithConstants(Optimizer):
    """Makes numbers as plain code does, by which the default dtype gets into the step; cannot be captured if `odd`."""

    def __init__(self, params: Any, lr: float = 1e-3, odd: bool = False) -> None:
        super().__init__(params, {"lr": lr, "odd": odd})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                if not group["odd"] or p.grad.sum().item() > 0:
                    state["m"].mul_(torch.tensor(0.9, device=CPU))
                state["m"].add_(p.grad, alpha=0.1)
                p.sub_(state["m"] * torch.full((1,), group["lr"], device=p.device))


def numbers(seed: int, *shape: int) -> torch.Tensor:
    g = torch.Generator(CPU).manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float32, device=CPU) * 0.07


def parameter(device: str = "cpu") -> Any:
    return Parameter(numbers(0, 6, 300).to(device))


def train(p: Any, optimizer: Optimizer, steps: range) -> None:
    for i in steps:
        p.grad = numbers(i + 1, 6, 300).bfloat16().to(p.device)
        optimizer.step()


def resumed(made: Callable[[Any], Optimizer], device: str = "cpu", **settings: Any) -> list[Any]:
    """Three steps, a checkpoint, and three steps of another optimizer that has loaded it."""
    import collage_neuron

    p = parameter(device)
    first = collage_neuron.compile(made([p]), verbose=False, **settings)
    train(p, first, range(3))
    q = Parameter(p.detach().float())
    second = collage_neuron.compile(made([q]), verbose=False, **settings)
    second.load_state_dict(first.state_dict())
    train(q, second, range(3, 6))
    return [q, collage_neuron.exact_value(second, q), *second.state[q].values()]


def entry_points(backend: str) -> Iterator[Any]:
    """What the rest of the public functions give."""
    import collage_neuron
    from collage_neuron import checkpoint

    model: Any = torch.nn.Sequential(Linear(4, 8, dtype=torch.float32, device=CPU), Linear(8, 4, device=CPU).float())
    for i, p in enumerate(model.parameters()):
        p.data.copy_(numbers(i, *p.shape))
    optimizer: Any = AdamW(model.parameters(), lr=1e-3)
    collage_neuron.compile(model, optimizer, backend=backend, verbose=False)
    average = collage_neuron.AveragedModel(model, optimizer, decay=0.9)
    for i in range(3):
        for p in model.parameters():
            p.grad = numbers(i, *p.shape).bfloat16()
        optimizer.step()
        average.update_parameters(model)
    p = model[0].weight
    collage_neuron.set_exact_value(optimizer, p, collage_neuron.exact_value(optimizer, p) * 1.001)
    collage_neuron.set_exact_value(optimizer, model[0].bias, 0.1)
    plain_model, plain = checkpoint.get_fp32_state_dict(model, optimizer)
    yield from plain_model.values()
    yield from (t for state in plain["state"].values() for t in state.values())
    yield from average.module.parameters()
    yield collage_neuron.explain(optimizer)
    yield collage_neuron.bytes_per_parameter(optimizer)
    yield collage_neuron.compile(WithConstants, backend=backend).__name__


def checksum(results: Any) -> int:
    found = 0
    for x in results:
        if isinstance(x, torch.Tensor):
            x = x.detach().cpu()
            x = (x.float() if not x.dim() else x).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found = zlib.crc32(x if isinstance(x, bytes) else str(x).encode(), found)
    return found


def main(said: str) -> None:
    setting = said.removeprefix("xla ")
    with surrounding(setting):
        from collage_neuron.numerics.strategies import DEFAULT, STRATEGIES
        from collage_neuron.passes.backends.native.backend import BACKEND

        on_cpu = ["reference"] if BACKEND.missing() else ["reference", "native"]
        if setting not in ("none", "bfloat16"):
            on_cpu = on_cpu[-1:]
        backends = ["xla"] if said != setting else on_cpu
        for backend in backends:
            device = "xla" if backend == "xla" else "cpu"
            if device == "xla":
                import torch_xla  # noqa: F401  # registers the device
            every = device == "cpu" and setting in ("none", "bfloat16")
            names = {DEFAULT, "plus", *part(STRATEGIES, 12, backend)} if every else {DEFAULT}
            for name in sorted(names):
                given: dict[str, Any] = {"device": device, "strategy": name, "backend": backend}
                print(said, backend, name, checksum(resumed(lambda params: AdamW(params, lr=1e-3), **given)))
            if backend != backends[-1]:  # what follows differs before a backend is met
                continue
            given["strategy"] = DEFAULT
            print(said, backend, "captured", checksum(resumed(WithConstants, **given)))
            if device == "cpu":  # on XLA each operation of a step on copies is compiled
                odd = resumed(lambda params: WithConstants(params, odd=True), **given)
                print(said, backend, "copies", checksum(odd))
                print(said, backend, "momentum", checksum(resumed(lambda ps: SGD(ps, lr=1e-3, momentum=0.9), **given)))
                print(said, backend, "others", checksum(entry_points(backend)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    gc.freeze()
    gc.get_freeze_count = lambda: 0  # `compile` would list half a million objects of torch each time
    for argument in sys.argv[1:]:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            main(argument)
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, argument
