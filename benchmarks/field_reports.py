"""Sixteen reports of people who train in bf16, played through: what happens today, in one table.

Errors are distances from a float64 run of AdamW on the same bf16 gradients, as fractions of the way that it goes, with
betas .9 and .95 unless said. Three minutes on one core::

    python benchmarks/field_reports.py
    python benchmarks/field_reports.py --only 1 2 12
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import collage_neuron
from collage_neuron.numerics.strategies import DEFAULT, STRATEGIES

ELEMENTS, STEPS, BETAS = (16, 256), 400, (0.9, 0.95)
COMPARED = ("split433", "plus", "full", "fp32", "torch")


@dataclass(frozen=True)
class Run:
    """A run of AdamW on a stream of bf16 gradients."""

    rate: float
    size: float
    steps: int = STEPS
    betas: tuple[float, float] = BETAS
    decay: float = 0.0
    cosine: bool = True
    gradients: float = 1e-3
    burst: float = 1.0
    """Gradients of steps 100 to 119 are so many times as large."""

    def start(self) -> Tensor:
        return self.size * torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))

    def stream(self) -> Iterator[Tensor]:
        g = torch.Generator().manual_seed(1)
        mean, scale = 0.1 * torch.randn(ELEMENTS, generator=g), torch.randn(ELEMENTS, generator=g).exp()
        for t in range(self.steps):
            noise = torch.randn(ELEMENTS, generator=g)
            larger = self.burst if 100 <= t < 120 else 1.0
            yield (self.gradients * larger * scale * (noise + mean)).bfloat16()

    def rate_at(self, t: int) -> float:
        if not self.cosine:
            return self.rate
        warm = self.steps // 10
        return self.rate * min((t + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, t - warm) / (self.steps - warm))))

    def adamw(self, p: nn.Parameter) -> AdamW:
        return AdamW([p], lr=self.rate, betas=self.betas, weight_decay=self.decay)


def trained(run: Run, strategy: str, after: Callable[[int, nn.Parameter, Any], None] | None = None) -> Tensor:
    """The weights at the end, exactly; `after` is called after each step. `torch` is plain fp32."""
    p = nn.Parameter(run.start())
    optimizer: Any = run.adamw(p)
    if strategy != "torch":
        optimizer = quietly(collage_neuron.compile, run.adamw(p), strategy=strategy, verbose=False)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t, grad in enumerate(run.stream()):
            optimizer.param_groups[0]["lr"] = run.rate_at(t)
            p.grad = grad.to(p.dtype)
            optimizer.step()
            if after is not None:
                after(t, p, optimizer)
    return p.detach().double() if strategy == "torch" else collage_neuron.exact_value(optimizer, p).double()


def compiled(run: Run, strategy: str = DEFAULT) -> tuple[nn.Parameter, Any]:
    """A parameter and its optimizer before the first step."""
    p = nn.Parameter(run.start())
    return p, collage_neuron.compile(run.adamw(p), strategy=strategy, verbose=False)


def exact(run: Run) -> Tensor:
    """The same in float64, by torch's own AdamW."""
    p = nn.Parameter(run.start().double())
    optimizer = run.adamw(p)
    for t, grad in enumerate(run.stream()):
        optimizer.param_groups[0]["lr"] = run.rate_at(t)
        p.grad = grad.double()
        optimizer.step()
    return p.detach()


def error(run: Run, end: Tensor, wanted: Tensor | None = None) -> float:
    wanted = exact(run) if wanted is None else wanted
    return float((end - wanted).norm() / (wanted - run.start().double()).norm())


def quietly(f: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """The result of `f`, and the warnings that it gave, by class."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        result = f(*args, **kwargs)
    return result, [w.category.__name__ for w in given]


def shown(names_and_numbers: Iterator[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {number:.2g}" for name, number in names_and_numbers)


# --- the reports ----------------------------------------------------------------------------------------------------

REPORTS: dict[int, tuple[str, Callable[[], str]]] = {}


def report(number: int, situation: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    def add(f: Callable[[], str]) -> Callable[[], str]:
        REPORTS[number] = situation, f
        return f

    return add


@report(1, "fine-tuning rates, warm-up and cosine over 400 steps: errors")
def fine_tuning() -> str:
    lines = []
    for rate in (6e-7, 1e-5):
        for size in (0.07, 0.3):
            run = Run(rate, size)
            wanted = exact(run)
            lines.append(f"{rate:g} of {size}: " + shown((s, error(run, trained(run, s), wanted)) for s in COMPARED))
    return "\n".join(lines)


@report(2, "decay alone (gradients of zero), rate 1e-4, weight decay .01, 1500 steps: the share that arrives")
def decay_alone() -> str:
    run = Run(1e-4, 0.07, steps=1500, decay=0.01, cosine=False, gradients=0.0)
    way = (1 - 1e-6) ** 1500 - 1

    def arrived(strategy: str) -> float:
        start = run.start().double()
        return float(((trained(run, strategy) - start) * start).sum() / start.square().sum()) / way

    given = quietly(compiled, run, "plus")[1]
    names = ("split433", "split412", "split323", "plus", "full", "fp32", "torch")
    return shown((s, arrived(s)) for s in names) + f"; `plus` warns: {given}"


@report(3, "torch.set_default_dtype(bfloat16) before compile, in a new process: strategies with the bits of fp32")
def default_dtype() -> str:
    digests = [
        subprocess.run([sys.executable, "-c", DEFAULT_DTYPE.format(dtype)], capture_output=True, text=True, check=False)
        for dtype in ("float32", "bfloat16")
    ]
    narrow, wide = (set(done.stdout.splitlines()) for done in digests)
    return f"{len(narrow & wide)} of {len(STRATEGIES)}"


DEFAULT_DTYPE = """
import hashlib, torch, collage_neuron
from collage_neuron.numerics.strategies import STRATEGIES
torch.set_default_dtype(torch.{})
for strategy in STRATEGIES:
    g = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(0.07 * torch.randn(8, 256, generator=g, dtype=torch.float32))
    try:
        optimizer = collage_neuron.compile(torch.optim.AdamW([p], lr=1e-3), strategy=strategy, verbose=False)
        for _ in range(3):
            p.grad = (1e-3 * torch.randn(8, 256, generator=g, dtype=torch.float32)).to(p.dtype)
            optimizer.step()
        words = [p.detach(), *(x for x in optimizer.state[p].values() if isinstance(x, torch.Tensor))]
        print(strategy, hashlib.md5(b"".join(w.double().numpy().tobytes() for w in words)).hexdigest())
    except Exception as error:
        print(strategy, torch.get_default_dtype(), type(error).__name__)
"""


@report(4, "a checkpoint whose `step` is bf16, at step 250, 300 steps more: the count, and the error")
def bf16_step() -> str:
    run = Run(1e-4, 0.07, steps=550, cosine=False, betas=(0.9, 0.999))

    def reload(t: int, p: nn.Parameter, optimizer: Any) -> None:
        if t == 249:
            saved = optimizer.state_dict()
            saved["state"][0]["step"] = saved["state"][0]["step"].bfloat16()
            optimizer.load_state_dict(saved)
        counts.append(float(optimizer.state[p]["step"]))

    counts: list[float] = []
    off = error(run, trained(run, DEFAULT, reload))
    return f"{counts[-1]:g}, {off:.2g}"


def low_words(p: nn.Parameter, optimizer: Any) -> Tensor:
    """What the exact values have beside the bf16 ones."""
    return collage_neuron.exact_value(optimizer, p).double() - p.detach().double()


@report(5, "other weights loaded by model.load_state_dict between steps: the share of the old low words that stays")
def loaded_weights() -> str:
    shares = []
    for strategy in ("split433", "plus", "fp32"):
        model = nn.Linear(256, 16, bias=False)
        optimizer: Any = AdamW(model.parameters(), lr=1e-4)
        model, optimizer = quietly(collage_neuron.compile, model, optimizer, strategy=strategy, verbose=False)[0]
        p = model.weight
        p.grad = torch.randn_like(p)
        optimizer.step()
        before = low_words(p, optimizer)
        quietly(model.load_state_dict, {"weight": torch.randn(16, 256)})
        p.grad, optimizer.param_groups[0]["lr"] = torch.zeros_like(p), 0.0
        quietly(optimizer.step)
        shares.append((strategy, float(((low_words(p, optimizer) != 0) & (before != 0)).double().mean())))
    return shown(iter(shares))


@report(6, "p.data.clamp_(-.01, .01) after each step: how far beyond the bound, in halves of a last place of bf16")
def clamped() -> str:
    run, beyond = Run(1e-3, 0.02, steps=100), []

    def clamp(step: int, p: nn.Parameter, optimizer: Any) -> None:
        p.data.clamp_(-0.01, 0.01)

    for strategy in ("split433", "plus", "full"):
        end = trained(run, strategy, clamp)
        beyond.append((strategy, float((end.abs().max() - 0.01) / (0.01 * 2**-9))))
    return shown(iter(beyond))


@report(7, "an average of decay .98, kept by torch's AveragedModel and by ours: errors, and the warning of the former")
def averages() -> str:
    run, ends = Run(1e-4, 0.07, cosine=False), {}
    average: Any
    kinds: tuple[Any, ...] = (torch.optim.swa_utils.AveragedModel, collage_neuron.AveragedModel)
    for kind in kinds:
        model: Any = nn.Linear(ELEMENTS[1], ELEMENTS[0])
        model.weight.data = run.start()
        optimizer: Any = AdamW(model.parameters(), lr=run.rate, betas=run.betas, weight_decay=0.0)
        model, optimizer = collage_neuron.compile(model, optimizer, verbose=False)
        exact_average, given = None, []
        if kind is collage_neuron.AveragedModel:
            average = kind(model, optimizer, decay=0.98)
        else:
            average = kind(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))
        for grad in run.stream():
            model.weight.grad, model.bias.grad = grad, torch.zeros_like(model.bias)
            given += quietly(optimizer.step)[1]
            average.update_parameters(model)
            value = collage_neuron.exact_value(optimizer, model.weight).double()
            exact_average = value if exact_average is None else 0.98 * exact_average + 0.02 * value
        ends[kind.__module__.partition(".")[0]] = (
            error(run, average.module.weight.detach().double(), exact_average),
            given,
        )
    return ", ".join(f"{name} {off:.2g} {given}" for name, (off, given) in ends.items())


@report(8, "48 optimizers of one parameter, stepped in gradient hooks: warnings, seconds to compile")
def many_optimizers() -> str:
    params = [nn.Parameter((0.1 + 0.01 * i) * torch.randn(32, 32)) for i in range(48)]
    began = time.perf_counter()
    optimizers, given = quietly(
        lambda: [collage_neuron.compile(AdamW([p], lr=1e-6), strategy="plus", verbose=False) for p in params]
    )
    seconds = time.perf_counter() - began
    for p, optimizer in zip(params, optimizers, strict=True):
        p.grad = torch.randn_like(p)
        given += quietly(optimizer.step)[1]
    return f"{len(given)}, {seconds:.1f} s"


@report(9, "a frozen fp16 base beside a trained head")
def frozen_base() -> str:
    model = nn.Sequential(nn.Linear(8, 8).half().requires_grad_(False), nn.Linear(8, 2))
    model, _ = collage_neuron.compile(model, AdamW(model[1].parameters()), verbose=False)
    return ", ".join(str(layer.weight.dtype) for layer in model)


@report(10, "norms that stay fp32: their dtype in the model, and the optimizer's update of them beside torch's fp32")
def stays_fp32() -> str:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    plain = nn.Parameter(model[1].weight.detach().clone())
    model, optimizer = collage_neuron.compile(model, AdamW(model.parameters()), keep_fp32=["1.*"], verbose=False)
    model(torch.randn(4, 8).bfloat16()).float().square().sum().backward()
    plain.grad = model[1].weight.grad.float()
    AdamW([plain]).step()
    optimizer.step()
    return f"{model[1].weight.dtype}, equal: {torch.equal(plain, model[1].weight)}"


@report(11, "a step skipped for Inf: AdamW's `step` after three steps of which one is skipped")
def skipped() -> str:
    p = nn.Parameter(torch.ones(8))
    optimizer: Any = collage_neuron.compile(AdamW([p]), nonfinite="skip", verbose=False)
    for value in (1.0, math.inf, 1.0):
        p.grad = torch.full_like(p, value)
        optimizer.step()
    return f"{float(optimizer.state[p]['step']):g}"


@report(12, "`light` after 20 steps of 30-fold gradients, beta2 = .999, 4000 steps: errors, and the warning at compile")
def burst() -> str:
    run = Run(1e-4, 0.07, betas=(0.9, 0.999), burst=30.0, cosine=False, steps=4000)
    wanted = exact(run)
    given = quietly(compiled, run, "light")[1]
    return shown((s, error(run, trained(run, s), wanted)) for s in ("light", "plus", "split433")) + f"; {given}"


@report(13, "frozen at compile, trained later as a new group: the warning")
def unfrozen() -> str:
    model: Any = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2))
    model, optimizer = collage_neuron.compile(model, AdamW(model[1].parameters()), verbose=False)
    model[0].requires_grad_(True)
    _, given = quietly(optimizer.add_param_group, {"params": list(model[0].parameters())})
    return f"{given}"


@report(14, "p.copy_(p.clone()) between compile and the first step: what 1.001 trains on from")
def own_value() -> str:
    values = []
    for strategy in ("split433", "plus", "fp32"):
        p = nn.Parameter(torch.full((8,), 1.001))
        optimizer: Any = collage_neuron.compile(AdamW([p], lr=0.0), strategy=strategy, verbose=False)
        with torch.no_grad():
            p.copy_(p.clone())
        p.grad = torch.ones_like(p)
        quietly(optimizer.step)
        values.append(f"{strategy} {float(collage_neuron.exact_value(optimizer, p)[0]):.6f}")
    return ", ".join(values)


class Lookahead(AdamW):
    """AdamW with slow weights, to which it goes back every five steps; it reads a number, so it runs as written."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "slow" not in state:
                    state["slow"] = p.detach().clone()
                whole = bool(torch.linalg.qr(p.float())[0].isfinite().all())  # matrices: the step runs as written
                if whole and int(state["step"].item()) % 5 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])
        return loss


@report(15, "slow weights (Lookahead) in a step that runs as written, rate 6e-7: errors")
def positions() -> str:
    run = Run(6e-7, 0.07)

    def end(strategy: str | None, dtype: torch.dtype = torch.float32) -> Tensor:
        p = nn.Parameter(run.start().to(dtype))
        optimizer: Any = Lookahead([p], lr=run.rate, betas=run.betas, weight_decay=0.0)
        if strategy is not None:
            optimizer = quietly(collage_neuron.compile, optimizer, strategy=strategy, verbose=False)[0]
        for t, grad in enumerate(run.stream()):
            optimizer.param_groups[0]["lr"] = run.rate_at(t)
            p.grad = grad.to(p.dtype)
            quietly(optimizer.step)
        return p.detach().double() if strategy is None else collage_neuron.exact_value(optimizer, p).double()

    wanted = end(None, torch.float64)
    names = ("split433", "split444", None)
    return shown((s or "torch", error(run, end(s), wanted)) for s in names)


@report(16, "p.mul_(1 - 1e-4) in the loop after each step: the step that warns")
def written_in_the_loop() -> str:
    steps = []
    for strategy in ("split433", "plus"):
        p, optimizer = compiled(Run(1e-3, 0.07), strategy)
        for t, grad in enumerate(Run(1e-3, 0.07, steps=40).stream()):
            p.grad = grad
            if quietly(optimizer.step)[1]:
                steps.append(f"{strategy} {t}")
                break
            with torch.no_grad():
                p.mul_(1 - 1e-4)
    return ", ".join(steps)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", choices=sorted(REPORTS), help="numbers of reports")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = options(argv)
    torch.set_num_threads(1)
    for number in given.only or sorted(REPORTS):
        situation, play = REPORTS[number]
        try:
            result = play()
        except Exception as raised:  # a report that is not right today is a row of the table too
            result = f"{type(raised).__name__}: {raised}"
        print(f"{number:>2}  {situation}", *(f"    {line}" for line in result.splitlines()), sep="\n", flush=True)


if __name__ == "__main__":
    main()
