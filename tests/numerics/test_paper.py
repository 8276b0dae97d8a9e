"""arithmetic="bf16" is the paper's algorithm: bit for bit, operation by operation, a transcription made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import paper_adamw as paper
import pytest
import torch
import torch.fx as fx
from paper_adamw import BF16, Hyper, State
from planned import plan_update
from torch import Tensor

import collage_neuron
from collage_neuron.numerics.eft import round_to, widen

pytestmark = pytest.mark.filterwarnings("ignore::collage_neuron.SmallSteps")  # the data are meant to be out of range

ELEMENTS = 4096
STRATEGIES = ("light", "plus")
KEYS = ("param", "param_lo", "exp_avg", "exp_avg_sq", "exp_avg_sq_lo")
"""The compiled optimizer's components in the order of `State`."""

LEARNING_RATES = [1e-3 * min(1.0, t / 5) * (1 + math.cos(math.pi * t / 30)) / 2 for t in range(30)]
LEARNING_RATES += [0.0, 1.0, 1.0, 0.0, 1e-6]
"""Warm-up from 0, cosine decay, then the values with which a constant would be folded."""


def wide(generator: torch.Generator, low: int, high: int) -> Tensor:
    """Numbers with every mantissa and sign, exponents from low to high, and zeros of both signs."""
    mantissa = 1 + torch.randint(0, 128, (ELEMENTS,), generator=generator) / 128
    exponent = torch.randint(low, high + 1, (ELEMENTS,), generator=generator)
    sign = torch.randint(-1, 2, (ELEMENTS,), generator=generator)
    return torch.ldexp(mantissa * sign, exponent)


def ordinary(generator: torch.Generator) -> Iterator[Tensor]:
    """Weights, then gradients, as in training; the weights are fp32 and start with a low word."""
    yield torch.randn(ELEMENTS, generator=generator) * 0.02
    while True:
        yield torch.randn(ELEMENTS, generator=generator) * 1e-3


def adversarial(generator: torch.Generator) -> Iterator[Tensor]:
    """Weights smaller and larger than their updates; gradients over 60 binades, repeated, opposite, zero."""
    yield wide(generator, -40, 8)
    while True:
        g = wide(generator, -40, 20)
        yield from (g, g, -g, torch.zeros_like(g))


DATA: dict[str, Callable[[torch.Generator], Iterator[Tensor]]] = {"ordinary": ordinary, "adversarial": adversarial}


class Compiled:
    """torch.optim.AdamW, compiled, on one parameter."""

    def __init__(self, strategy: str, theta: Tensor, h: Hyper) -> None:
        self.p = torch.nn.Parameter(theta)
        adamw = torch.optim.AdamW([self.p], lr=h.lr, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay)
        self.optimizer = collage_neuron.compile(adamw, strategy=strategy, arithmetic="bf16")
        self.keys = KEYS if strategy == "plus" else KEYS[:-1]

    def components(self) -> dict[str, Tensor]:
        """What is stored, by name; zeros where no step has created it yet."""
        state = {"param": self.p.detach()} | self.optimizer.state[self.p]
        return {key: state.get(key, torch.zeros_like(self.p.detach())).clone() for key in self.keys}

    def as_state(self) -> State:
        return State(*self.components().values(), *[None] * (len(KEYS) - len(self.keys)))

    def prepare(self, g: Tensor, lr: float) -> None:
        self.p.grad = g
        self.optimizer.param_groups[0]["lr"] = lr

    def roundings(self) -> list[Tensor]:
        """Results of the roundings that the coming step does, in order; the optimizer is left as it was."""
        job = plan_update(torch.optim.AdamW, self.optimizer, self.optimizer.param_groups[0], [self.p])
        scalars = torch.tensor(job.update.scalars.run(job.recording.slots), dtype=torch.float32)
        inputs = self.components() | {"grad": self.p.grad}
        interpreter = RoundingInterpreter(job.update.graph)
        interpreter.run(*[inputs[key] for key in job.update.inputs], *scalars.unbind())
        return interpreter.results


class RoundingInterpreter(fx.Interpreter):
    """Keeps what each round_to returns, except of numbers that are rounded already: those round nothing.

    One of those is the smaller of two, which is how the low word of the parameter is limited.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.results: list[Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.target is round_to and getattr(n.args[0], "target", None) not in (round_to, widen, torch.minimum):
            self.results.append(result.to(BF16))
        return result


Step = Callable[[State, Tensor, int, Hyper], State]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def trajectories(strategy: str, data: str, h: Hyper, step: Step = paper.adamw) -> Iterator[tuple[Compiled, State]]:
    """The compiled optimizer and the transcription side by side, after each of the LEARNING_RATES."""
    stream = DATA[data](torch.Generator().manual_seed(0))
    compiled = Compiled(strategy, next(stream), h)
    state = compiled.as_state()
    for t, (lr, g) in enumerate(zip(LEARNING_RATES, stream, strict=False), 1):
        compiled.prepare(g.bfloat16(), lr)
        state = step(state, g.bfloat16(), t, h._replace(lr=lr))
        compiled.optimizer.step()
        yield compiled, state


def differing(compiled: Compiled, state: State) -> set[str]:
    """Names of the components in which a bit differs."""
    pairs = zip(compiled.components().items(), state, strict=False)
    return {key for (key, x), y in pairs if y is None or not torch.equal(bits(x), bits(y))}


def first_difference(strategy: str, data: str, h: Hyper, step: Step = paper.adamw) -> set[str]:
    """The components that differ after the first step after which any does; empty if none ever does."""
    return next(filter(None, (differing(c, s) for c, s in trajectories(strategy, data, h, step))), set())


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_component_has_the_bits_of_the_paper(strategy: str, data: str, beta2: float) -> None:
    assert first_difference(strategy, data, Hyper(lr=1e-3, beta2=beta2)) == set()


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_operation_has_the_bits_of_the_paper(strategy: str, data: str) -> None:
    """The roundings of the rewritten graph, in order, are the operations of the transcription, in order."""
    stream = DATA[data](torch.Generator().manual_seed(0))
    h = Hyper(lr=1e-3)
    compiled = Compiled(strategy, next(stream), h)
    for t, (lr, g) in enumerate(zip(LEARNING_RATES, stream, strict=False), 1):
        compiled.prepare(g.bfloat16(), lr)
        state, grad = compiled.as_state(), g.bfloat16()
        with paper.recorded() as expected:
            paper.adamw(state, grad, t, h._replace(lr=lr))
        found = compiled.roundings()
        assert len(found) == len(expected)
        wrong = [i for i, (x, y) in enumerate(zip(found, expected, strict=True)) if not torch.equal(bits(x), bits(y))]
        assert not wrong, f"step {t}, lr {lr}: operations {wrong}"
        compiled.optimizer.step()


@pytest.mark.parametrize(
    ("beta2", "hi", "lo"),
    [
        (0.9, 0.8984375, 0.001564),
        (0.95, 0.94921875, 0.000782),
        (0.98, 0.98046875, -0.000469),
        (0.99, 0.98828125, 0.0017166),
        (0.999, 1.0, -0.00099945),
    ],
)
def test_beta2_is_split_as_in_the_paper(beta2: float, hi: float, lo: float) -> None:
    """The words known from papers.md A2 are those of the transcription, and those in the update's scalar vector."""
    words = [w.item() for w in paper.split(beta2)]
    assert words == [hi, pytest.approx(lo, rel=2**-9)]
    compiled = Compiled("plus", torch.ones(4), Hyper(lr=1e-3, beta2=beta2))
    compiled.prepare(torch.ones(4, dtype=BF16), 1e-3)
    compiled.optimizer.step()
    job = plan_update(torch.optim.AdamW, compiled.optimizer, compiled.optimizer.param_groups[0], [compiled.p])
    vector = job.update.scalars.run(job.recording.slots)
    assert [x for (form, _), x in zip(job.update.scalars.entries, vector, strict=True) if form != "fp32"] == words


def test_the_transcription_is_error_free_where_the_paper_says_so() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (wide(generator, -8, 8).bfloat16() for _ in range(2))
    large, small = torch.where(a.abs() >= b.abs(), a, b), torch.where(a.abs() >= b.abs(), b, a)
    x, y = paper.fast2sum(large, small)
    assert torch.equal(x.double() + y.double(), a.double() + b.double())
    p, e = paper.two_prod_fma(a, b)
    assert torch.equal(p.double() + e.double(), a.double() * b.double())


# What the comparison must catch: a transcription with the released defect, and a package with one thing wrong.
