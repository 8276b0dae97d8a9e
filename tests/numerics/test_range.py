"""Gradients from 1e-38 to 3e38: what is compiled is finite exactly where torch's own fp32 step is.

Torch's loop over single tensors is run on fp32 parameters beside the compiled optimizers. Five kinds of elements are
left out, from the moment on at which they are met:

* values within 2**-6 of the largest fp32 number: bf16 rounds some of them to infinity, fp32 others;
* Nesterov's sum of the gradient and the momentum within 2**-4 of it: a momentum in 8 bits is off by up to 2**-4.7;
* RMSprop's `square_avg - grad_avg ** 2` where both overflow (`centered`, |g| above 1.8e20): torch's kernel on the CPU
  multiplies and adds in one rounding, where the product does not overflow, and finds inf; in two steps it is NaN;
* the same difference where its terms are near each other, or below 2**-126: bf16's rounding of the first (half an ulp a
  step for 100 steps), or its underflow, may make the difference negative and its root NaN;
* once a second moment is infinite that is stored in blocks: it is read as NaN, so that the elements of its block do not
  stand still without a sign; and while it is within 2**-3 of the largest number, since `u8q16` is off by up to 2**-4.

Each element is a row, so that it is a block of its own: what a block with an infinity makes of its other elements is
tested in test_block_formats.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from models import MODES, REPRESENTATIVE
from sampling import part
from torch import Tensor
from torch.optim import Optimizer
from torch_cases import CASES, Case, parameter

import collage_neuron
from collage_neuron.numerics.strategies import has_blocks
from collage_neuron.states.store import read_exact, record_of

STEPS = 20
MAX = torch.finfo(torch.float32).max
MAGNITUDES = [3e38, 1e38, 1e37, 1e30, 6e20, 5e20, 1e20, 2e19, 1.9e19, 1.8e19, 1e19, 1e13, 1e3, 1.0, 1e-3, 1e-18, 1e-20,
              1e-22, 1e-30, 1e-37, 1e-38]  # fmt: skip
PATTERNS = 4
"""Of a magnitude's elements: always, in alternating signs, once among ordinary gradients, now and then among them."""


def gradients() -> Iterator[Tensor]:
    """bf16 gradients: row i follows pattern i, column j has magnitude j."""
    generator = torch.Generator().manual_seed(0)
    extreme = torch.tensor(MAGNITUDES)
    for t in range(STEPS):
        ordinary = torch.randn(len(MAGNITUDES), generator=generator) * 0.1
        alternating = -extreme if t % 2 else extreme
        once, sometimes = (extreme if met else ordinary for met in (t == 3, t % 5 == 1))
        yield torch.stack([extreme, alternating, once, sometimes]).bfloat16()[..., None]


def start() -> Tensor:
    return torch.randn(PATTERNS, len(MAGNITUDES), 1, generator=torch.Generator().manual_seed(1)) * 0.02


def near_the_largest(x: Tensor, distance: float) -> Tensor:
    return (x.abs() > MAX * (1 - distance)) & (x.abs() < MAX * (1 + distance))


class Plain:
    """Torch's own optimizer in fp32 and, to know what rounding decides, in float64."""

    def __init__(self, case: Case) -> None:
        self.params = [parameter(start().bfloat16(), dtype) for dtype in (torch.float32, torch.float64)]
        self.optimizers = [case.plain(p) for p in self.params]
        self.unsure = torch.zeros(start().shape, dtype=torch.bool)

    def step(self, g: Tensor) -> None:
        for p, optimizer in zip(self.params, self.optimizers, strict=True):
            p.grad = g.to(p.dtype)
            optimizer.step()
        exact = self.values(1)
        for x in exact.values():
            self.unsure |= near_the_largest(x, 2**-6)
        group = self.optimizers[1].param_groups[0]
        if group.get("nesterov"):
            self.unsure |= near_the_largest(g + group["momentum"] * exact["momentum_buffer"], 2**-4)
        if "grad_avg" in exact:
            square, subtracted = exact["square_avg"], exact["grad_avg"].square()
            self.unsure |= (subtracted > MAX) | (subtracted > square / 2) | (square < 2**-126)

    def values(self, which: int = 0) -> dict[str, Tensor]:
        """The parameter and its states."""
        p = self.params[which]
        state = self.optimizers[which].state[p]
        return {"param": p.detach()} | {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape}


def lost(plain: Plain, strategy: str) -> Tensor:
    """The mask of elements with a state that is infinite, or nearly so, if the strategy stores states in blocks."""
    states = [x for name, x in plain.values().items() if name != "param"] if has_blocks(strategy) else []
    wrong = (~x.isfinite() | near_the_largest(x, 2**-3) for x in states)
    return torch.stack([torch.zeros_like(plain.unsure), *wrong]).any(0)


def differing(plain: Plain, optimizer: Optimizer, p: Tensor, known: Tensor | None = None) -> dict[str, list[float]]:
    """By value, the first gradients for which compiled and plain are not both finite, or both not; not of `known`."""
    found = {}
    left_out = plain.unsure if known is None else plain.unsure | known
    for name, x in plain.values().items():
        if name != "param" and name not in optimizer.state[p]:
            continue  # a state that a group of this strategy keeps on the host
        y = read_exact(p, optimizer.state[p], name, record_of(optimizer, p)).cpu()
        wrong = (x.isfinite() != y.isfinite()) & ~left_out
        if wrong.any():
            found[name] = [MAGNITUDES[j] for _, j, _ in wrong.nonzero()[:3].tolist()]
    return found


NAMES = [name for name, case in CASES.items() if case.measured]


@pytest.mark.sampled(
    of=7, each=False
)  # what is finite depends on the format, and each example has a third of the formats
@pytest.mark.parametrize("name", NAMES)
def test_finite_exactly_where_torch_in_fp32_is(name: str) -> None:
    plain = Plain(CASES[name])
    modes = part([mode for mode in MODES if mode[0] in REPRESENTATIVE], 3, name)
    params = {mode: parameter(start().bfloat16(), torch.bfloat16) for mode in modes}
    compiled = {
        (strategy, arithmetic): collage_neuron.compile(CASES[name].of(p), strategy=strategy, arithmetic=arithmetic)
        for (strategy, arithmetic), p in params.items()
    }
    for t, g in enumerate(gradients()):
        known = {mode: lost(plain, mode[0]) for mode in compiled} if t else {}
        plain.step(g)
        for mode, optimizer in compiled.items():
            params[mode].grad = g
            optimizer.step()
            assert not differing(plain, optimizer, params[mode], known.get(mode)), f"{mode}, step {t}"
    assert plain.unsure.double().mean() <= 0.5


@pytest.mark.parametrize("strategy", ["plus", "full", "light", "fp32", "fp32_states", "bf16"])
def test_large_gradients_train_as_in_torch(strategy: str) -> None:
    """At 1e20 the square overflows, times 1 - beta2 it does not: the steps are those of fp32, not zero."""
    plain, compiled = (parameter(torch.zeros(8), dtype) for dtype in (torch.float32, torch.bfloat16))
    optimizers = [
        torch.optim.AdamW([plain], lr=1e-2, foreach=False),
        collage_neuron.compile(torch.optim.AdamW([compiled], lr=1e-2), strategy=strategy),
    ]
    for _ in range(10):
        for p, optimizer in zip((plain, compiled), optimizers, strict=True):
            p.grad = torch.full_like(p, 1e20)
            optimizer.step()
    assert torch.allclose(collage_neuron.exact_value(optimizers[1], compiled), plain, rtol=2**-5, atol=0)
    assert (plain < -0.09).all()
