"""Parameters without dimensions (a logit scale): each is updated as one with a single element is, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import follow, through_torch_save
from torch import nn
from torch.optim import Optimizer
from traced_updates import Stepping

import collage_neuron
from collage_neuron.numerics.strategies import DEFAULT

pytestmark = pytest.mark.usefixtures("rejecting")

CASES: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda ps: torch.optim.Adam(ps, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, amsgrad=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "nadam": lambda ps: torch.optim.NAdam(ps),
    "radam": lambda ps: torch.optim.RAdam(ps),
    "adamax": lambda ps: torch.optim.Adamax(ps),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, initial_accumulator_value=0.1),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.5),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True),
    "rprop": lambda ps: torch.optim.Rprop(ps),
    "asgd": lambda ps: torch.optim.ASGD(ps),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
}


class Scaled(nn.Module):
    """A layer and a scale, of one element: without dimensions or with one."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, 1.2345678))
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 6).view(2, 3))


def told(model: Scaled, optimizer: Optimizer) -> dict[str, Any]:
    """The scale and its states: dtypes and bits, without shapes; numbers as numbers."""
    state = dict(optimizer.state[model.scale]) | {"param": model.scale.detach()}
    return {k: (v.dtype, v.item()) if isinstance(v, torch.Tensor) else v for k, v in sorted(state.items())}


def compiled(make: Callable[[Any], Optimizer], shape: tuple[int, ...], **settings: Any) -> tuple[Scaled, Optimizer]:
    model = Scaled(shape)
    return collage_neuron.compile(model, make(model.parameters()), **settings)


def by_state_dict(model: Scaled, optimizer: Optimizer, make: Any) -> tuple[Scaled, Optimizer]:
    other, second = compiled(make, tuple(model.scale.shape), strategy=optimizer.param_groups[0]["collage_strategy"])
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())
    return other, second


WAYS = [
    (lambda model, optimizer, make: copy.deepcopy((model, optimizer)), "plus"),
    (lambda model, optimizer, make: through_torch_save((model, optimizer)), "fp32"),
    (by_state_dict, "plus"),
    (by_state_dict, "fp32"),
    (lambda model, optimizer, make: (model, collage_neuron.compile(optimizer, strategy="fp32")), "fp32"),
]


def begun(
    make: Callable[[Any], Optimizer], shape: tuple[int, ...], how: str, dtype: torch.dtype, strategy: str
) -> tuple[Scaled, Optimizer]:
    """A compiled run, of which plain torch has taken two steps, or made a checkpoint after two, or neither."""
    if how == "new":
        return compiled(make, shape, strategy=strategy)
    model = Scaled(shape).to(dtype)
    plain = make(model.parameters())
    follow(plain, range(2))
    if how == "stepped":
        return collage_neuron.compile(model, plain, strategy=strategy)
    loaded = compiled(make, shape, strategy=strategy)
    loaded[1].load_state_dict(plain.state_dict())
    return loaded


FP32, BF16 = torch.float32, torch.bfloat16
BEGINNINGS = [
    *(("new", FP32, strategy) for strategy in ("bf16", "plus", "fp32")),
    ("stepped", FP32, DEFAULT), ("stepped", BF16, DEFAULT),
    ("a checkpoint", FP32, "plus"), ("a checkpoint", FP32, "fp32"), ("a checkpoint", BF16, "plus"),
]  # fmt: skip


@pytest.mark.sampled(of=12)
@pytest.mark.parametrize(("how", "dtype", "strategy"), BEGINNINGS)
@pytest.mark.parametrize("name", CASES)
def test_as_one_element(name: str, how: str, dtype: torch.dtype, strategy: str) -> None:
    """Six steps: the same bits, in states of the same names and dtypes, as of a parameter of shape [1]."""
    flat, one = (begun(CASES[name], shape, how, dtype, strategy) for shape in ((), (1,)))
    follow(flat[1], range(2, 8))
    follow(one[1], range(2, 8))
    assert told(*flat) == told(*one)
    assert all(v.dim() == 0 for v in flat[1].state[flat[0].scale].values() if isinstance(v, torch.Tensor))


@pytest.mark.sampled(of=12)
@pytest.mark.parametrize(("way", "strategy"), WAYS)
@pytest.mark.parametrize("name", CASES)
def test_interrupted(name: str, strategy: str, way: Callable[..., tuple[Scaled, Optimizer]]) -> None:
    """A copy, and one that a checkpoint was loaded into, train on with the same bits."""
    whole, interrupted = (compiled(CASES[name], (), strategy=strategy) for _ in range(2))
    follow(whole[1], range(6))
    follow(interrupted[1], range(3))
    rest = way(*interrupted, CASES[name])
    follow(rest[1], range(3, 6))
    assert told(*rest) == told(*whole)


def test_numbers_that_torch_cast() -> None:
    """torch loads `mu_product` of a bf16 parameter in bf16; it is a number all the same."""
    model = Scaled(()).to(torch.bfloat16)
    stepped, loaded = (torch.optim.NAdam(model.parameters()) for _ in range(2))
    follow(stepped, range(2))
    loaded.load_state_dict(stepped.state_dict())
    assert loaded.state[model.scale]["mu_product"].dtype == torch.bfloat16
    collage_neuron.compile(loaded)
    follow(loaded, range(2, 4))
    assert loaded.state[model.scale]["mu_product"].dtype == torch.float32


Update = Callable[..., object]


def both_ways(update: Update, **settings: Any) -> list[tuple[Scaled, Optimizer]]:
    """Three steps of an update, of a scale without dimensions and of one with one."""
    runs = [compiled(lambda ps: Stepping(ps, update), shape, **settings) for shape in ((), (1,))]
    for _, optimizer in runs:
        follow(optimizer, range(3))
    return runs


def directed(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Keeps the direction of its last step, a tensor, as `step`."""
    s["step"] = s["step"] * 0.5 + g if "step" in s else g.clone()
    p.sub_(s["step"], alpha=lr)


def test_after_another_optimizer() -> None:
    """What is a tensor in one optimizer is a number in the next."""
    follow(compiled(lambda ps: Stepping(ps, directed), ())[1], range(2))
    follow(compiled(torch.optim.AdamW, ())[1], range(2))
    flat, one = both_ways(directed, strategy="fp32")
    assert told(*flat) == told(*one)


MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape": lambda p: torch.zeros(p.shape, device=p.device),
    "size": lambda p: torch.zeros(p.size(), dtype=p.dtype, device=p.device),
    "copy of the size": lambda p: torch.zeros(tuple(p.shape), device=p.device),
    "keyword": lambda p: torch.zeros(size=p.shape, device=p.device),
    "full": lambda p: torch.full(p.detach().shape, 0.0, device=p.device),
    "new": lambda p: p.new_zeros(p.shape),
    "filled": lambda p: torch.empty(p.shape, device=p.device).zero_(),
    "like": torch.zeros_like,
}


@pytest.mark.parametrize("strategy", ["plus", "fp32"])
@pytest.mark.parametrize("maker", MAKERS)
def test_states_made_from_the_size(maker: str, strategy: str) -> None:
    """The momentum of the first step counts; it is written in place."""

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        if "m" not in s:
            s["m"] = MAKERS[maker](p)
        s["m"].mul_(0.9).add_(g)
        p.sub_(s["m"], alpha=lr)

    flat, one = both_ways(update, strategy=strategy)
    assert told(*flat) == told(*one)
    assert flat[1].state[flat[0].scale]["m"].item() != 0.0


QUESTIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "dim": lambda t: t.dim() == 0,
    "ndim": lambda t: t.ndim < 1,
    "shape": lambda t: t.shape == (),
    "len": lambda t: len(t.shape) == 0,
    "size": lambda t: not t.size(),
    "stride": lambda t: t.stride() == (),
    "state": lambda t: t.mul(2.0).dim() == 0,
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_code_that_asks_for_dimensions(question: str) -> None:
    """A recording takes the branch of the parameter that it is of: what has dimensions decays."""

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        if not QUESTIONS[question](g):
            p.mul_(0.5)
        p.sub_(g, alpha=lr)

    (model, _), (other, _) = both_ways(update)
    assert model.scale.item() > 1.0
    assert model.weight.abs().max().item() < 0.6
    assert other.scale.item() < 0.7


@pytest.mark.parametrize("shape", [(), (1,)])
def test_what_is_written_into_a_number_of_the_step_is_not_lost(shape: tuple[int, ...]) -> None:
    """The gradient, into a tensor of one element that the step makes."""
    p = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    update: Update = lambda o, p, g, s, lr, t: p.sub_(torch.zeros(p.shape).add_(g))  # noqa: E731
    optimizer = collage_neuron.compile(Stepping([p], update), verbose=False)
    for t in range(1, 4):
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert p.item() == -t
