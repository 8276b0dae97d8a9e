"""Times what steps cost on the host, traced and by default, beside plain torch: 148 tensors of 32 x 32.

The three step in turn in one process, so that the machine is the same for all, and the ratio to plain torch is that of
steps that follow one another; `docs/development/tracing.md` has the table. By default torch's elementwise classes are
recorded, and all others are traced::

    python benchmarks/traced_steps.py
    python benchmarks/traced_steps.py --cases loop LAMB --tensors 300 --steps 101
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import torch
import torch.distributed as dist
from foreign import Lamb, ScheduleFreeAdamW, TransformersAdamW
from host_time import WARM_UP, Params
from interception import AsWritten, Intercepted
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

import collage_neuron
from collage_neuron.trace.recorded_classes import TRACE

Make = Callable[[Params], torch.optim.Optimizer]


class Reading(Optimizer):
    """Adam, whose steps are `scaled` by numbers that are read."""

    def __init__(self, params: Params, scaled: Callable[[Reading, Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.scaled, self.total, self.place = scaled, torch.zeros(()), 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.total, self.place = torch.zeros(()), 0
        for p in self.param_groups[0]["params"]:
            state, g = self.state[p], p.grad
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            state["m"].mul_(0.9).add_(g, alpha=0.1)
            state["v"].mul_(0.999).addcmul_(g, g, value=0.001)
            p.sub_(self.scaled(self, p, state["m"] / (state["v"].sqrt() + 1e-8)), alpha=0.01)


class Defaulted(Optimizer):
    """Adam, which makes its first states in each step, and uses them in one: `setdefault` is common."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            v = self.state[p].setdefault("v", torch.zeros_like(p)).mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.sub_(m / (v.sqrt() + 1e-8), alpha=0.01)


class Listed(Optimizer):
    """Momentum in two calls, over values in lists: what is cheapest in plain torch, and runs as written."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            (m,) = self.state[p].setdefault("m", [torch.zeros_like(p)])
            p.sub_(m.lerp_(p.grad, 0.1), alpha=0.01)


def by_place(optimizer: Reading, _: Any, u: torch.Tensor) -> torch.Tensor:
    """By another number for each."""
    optimizer.place += 1
    return u * (1 + 0.001 * optimizer.place)


def by_trust(_: Reading, p: Any, u: torch.Tensor) -> torch.Tensor:
    """LAMB's ratio, as two numbers on the host."""
    weight, size = p.norm().item(), u.norm().item()
    return u * (weight / size if weight > 0 and size > 0 else 1.0)


def clipped(_: Reading, p: Any, u: torch.Tensor) -> torch.Tensor:
    """By a number on the host."""
    size: float = p.grad.norm().item()
    return u * min(1.0, 1 / (size + 1e-6))


def by_the_sum(optimizer: Reading, p: Any, u: torch.Tensor) -> torch.Tensor:
    """By the norms of this one and of those before it, which are no numbers on the host."""
    optimizer.total = optimizer.total + p.grad.norm()
    return u / (1 + optimizer.total)


def flipped(_: Reading, p: Any, u: torch.Tensor) -> torch.Tensor:
    """What is not compiled: such a step runs as written."""
    return u.flip(0)


CASES: dict[str, Make] = {
    "AdamW, fused": partial(AdamW, fused=True),
    "Adam, fused": partial(Adam, fused=True),
    "SGD, fused": partial(SGD, lr=0.01, momentum=0.9, fused=True),
    "Adagrad, fused": partial(Adagrad, fused=True),
    "AdamW, foreach": partial(AdamW, foreach=True),
    "RMSprop, foreach": partial(RMSprop, foreach=True),
    "NAdam, foreach": partial(NAdam, foreach=True),
    "loop": TransformersAdamW,
    "setdefault": Defaulted,
    "schedule-free": ScheduleFreeAdamW,
    "LAMB": Lamb,
    "a rate for each": partial(Reading, scaled=by_place),
    "Adafactor, .item()": Adafactor,
    "trust, .item()": partial(Reading, scaled=by_trust),
    "clipped, .item()": partial(Reading, scaled=clipped),
    "sum of norms": partial(Reading, scaled=by_the_sum),
    "as written": partial(Reading, scaled=flipped),
    "as written, two calls": Listed,
}


KINDS = "plain", "default", "traced", "least"


def compiled(optimizer: Any) -> Any:
    return collage_neuron.compile(optimizer, strategy="plus", backend="native", verbose=False)


def made(make: Make, count: int, is_compiled: bool) -> Any:
    """An optimizer with gradients."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(32, 32).bfloat16()) for _ in range(count)]
    optimizer: Any = make(params)
    if is_compiled:
        optimizer = compiled(optimizer)
    for p in params:
        p.grad = torch.randn_like(p)
    return optimizer


def times(name: str, count: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of processor time of each step, by how it is taken."""
    kinds = {kind: made(CASES[name], count, kind in ("default", "traced")) for kind in KINDS}
    kinds["least"].step()  # it has states now
    kinds["least"] = (AsWritten if "as written" in name else Intercepted)(kinds["least"])
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for i in range(WARM_UP + steps):
        for kind, optimizer in kinds.items():
            os.environ[TRACE] = "on" if kind == "traced" else ""
            start = process_time()
            optimizer.step()
            if i >= WARM_UP:
                found[kind].append(1e3 * (process_time() - start))
    traces = kinds["traced"]._collage_bookkeeping.traces
    if traces.misses and "as written" not in name:
        raise RuntimeError(f"steps are not traced: {traces.why}")
    return found


def one_for_each(count: int, steps: int) -> str:
    """What optimizers of one parameter each cost: to compile, to step, and in hooks of gradients, as a whole step."""
    compiled(AdamW([torch.nn.Parameter(torch.zeros(1))]))  # what is imported for the first one
    os.environ[TRACE] = ""
    models = [
        torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(count))).bfloat16() for _ in range(2)
    ]
    plain, ours = ([AdamW(layer.parameters()) for layer in model] for model in models)
    start = process_time()
    ours = [*map(compiled, ours)]
    seconds = process_time() - start
    whole = _ratio([partial(_backward, model) for model in models], steps, _in_hooks(models, (plain, ours)))
    alone = _ratio([partial(_step_all, optimizers) for optimizers in (plain, ours)], steps)
    return (
        f"{count} AdamW of one parameter: compiled in {seconds:.2f} s; a step {alone:.1f} times a plain one, "
        f"and {whole:.1f} times with forward and backward pass, in hooks of gradients"
    )


def over_shards(count: int, steps: int) -> str:
    """What a step of AdamW costs over DTensors, such as those of `fully_shard`; here one process has all of them."""
    named: Any = dist
    dist.init_process_group("gloo", store=named.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    plain, ours = (made(partial(AdamW, fused=True), count, False) for _ in range(2))
    for group in (plain.param_groups[0], ours.param_groups[0]):
        group["params"] = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in group["params"]]
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    ratio = _ratio([plain.step, compiled(ours).step], steps)
    dist.destroy_process_group()
    return f"AdamW, fused, over {count} DTensors: a step {ratio:.1f} times a plain one"


def _in_hooks(models: Sequence[Any], optimizers: Sequence[Any]) -> list[Any]:
    """Steps each optimizer as soon as the gradient of its parameter is there; returns what removes the hooks."""
    return [
        layer.weight.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        for model, own in zip(models, optimizers, strict=True)
        for layer, optimizer in zip(model, own, strict=True)
    ]


def _backward(model: Any) -> None:
    model.zero_grad()
    model(torch.ones(16, 32, dtype=torch.bfloat16)).float().square().mean().backward()


def _step_all(optimizers: Sequence[Any]) -> None:
    for optimizer in optimizers:
        optimizer.step()


def _ratio(both: Sequence[Callable[[], None]], steps: int, hooks: Sequence[Any] = ()) -> float:
    """How much longer the second takes than the first, which take turns; `hooks` are removed at the end."""
    found = list[float]()
    for _ in range(WARM_UP + steps):
        times = [process_time()]
        for run in both:
            run()
            times.append(process_time())
        found.append((times[2] - times[1]) / (times[1] - times[0]))
    for hook in hooks:
        hook.remove()
    return median(found[WARM_UP:])


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the median step of each case, and the median ratio of a step to the one of plain torch before it.

    The least that a step may cost (`interception.py`) says whether a goal is out of reach.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tensors", type=int, default=148)
    parser.add_argument("--steps", type=int, default=29, help="steps that are measured (default 29)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    print(f"{'ms a step':22}{'plain':>8}{'default':>8}{'traced':>8}, of plain: {'default':>8}{'traced':>8}{'least':>8}")
    for name in given.cases:
        found = times(name, given.tensors, given.steps)
        plain, *others = found.values()
        ratios = [median(map(lambda x, y: x / y, each, plain)) for each in others]
        told = [*(f"{median(each):8.2f}" for each in (plain, *others[:2])), " " * 12, *(f"{x:8.1f}" for x in ratios)]
        print(f"{name:22}{''.join(told)}", flush=True)
    print(one_for_each(48, given.steps))
    print(over_shards(given.tensors, given.steps))


if __name__ == "__main__":
    main()
