"""Parameters without dimensions (a logit scale): each is updated as one with a single element is, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from as_written import Written
from models import follow, through_torch_save
from torch import nn
from torch.optim import Optimizer
from worlds import run_script

import collage_neuron

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


@pytest.mark.sampled(of=6)
@pytest.mark.parametrize("strategy", ["bf16", "plus", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_as_one_element(name: str, strategy: str) -> None:
    """Six steps: the same bits, in states of the same names and dtypes, as of a parameter of shape [1]."""
    flat, one = ((compiled(CASES[name], shape, strategy=strategy)) for shape in ((), (1,)))
    follow(flat[1], range(6))
    follow(one[1], range(6))
    assert told(*flat) == told(*one)
    assert all(v.dim() == 0 for v in flat[1].state[flat[0].scale].values() if isinstance(v, torch.Tensor))


@pytest.mark.sampled(of=6)
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


@pytest.mark.sampled(of=6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_stepped_before(name: str, dtype: torch.dtype) -> None:
    """An optimizer that plain torch stepped, in fp32 or in bf16, is compiled as it is for a parameter of shape [1]."""
    both = []
    for shape in ((), (1,)):
        model = Scaled(shape).to(dtype)
        optimizer = CASES[name](model.parameters())
        follow(optimizer, range(2))
        both.append(collage_neuron.compile(model, optimizer))
        follow(both[-1][1], range(2, 5))
    assert told(*both[0]) == told(*both[1])


@pytest.mark.sampled(of=6)
@pytest.mark.parametrize(
    ("dtype", "strategy"), [(torch.float32, "plus"), (torch.float32, "fp32"), (torch.bfloat16, "plus")]
)
@pytest.mark.parametrize("name", CASES)
def test_plain_checkpoint(name: str, dtype: torch.dtype, strategy: str) -> None:
    both = []
    for shape in ((), (1,)):
        model = Scaled(shape).to(dtype)
        plain = CASES[name](model.parameters())
        follow(plain, range(2))
        both.append(compiled(CASES[name], shape, strategy=strategy))
        both[-1][1].load_state_dict(plain.state_dict())
        follow(both[-1][1], range(2, 5))
    assert told(*both[0]) == told(*both[1])


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


FRESH = """
import sys, torch, collage_neuron
p = torch.nn.Parameter(torch.tensor(1.5))
make = getattr(torch.optim, sys.argv[1])
plain = make([p], lr=0.01)
p.grad = torch.tensor(0.5)
plain.step()
optimizer = collage_neuron.compile(make([p], lr=0.01), strategy=sys.argv[2])
optimizer.load_state_dict(plain.state_dict())
p.grad = torch.tensor(0.5).bfloat16()
optimizer.step()
print(sorted((k, v.dtype) for k, v in optimizer.state[p].items()))
"""


@pytest.mark.parametrize(("name", "strategy"), [("AdamW", "fp32"), ("Adagrad", "plus")])
def test_in_a_fresh_process(name: str, strategy: str, tmp_path: Path) -> None:
    """Nothing that was compiled before in the process is needed to tell states from numbers."""
    printed = run_script(tmp_path, FRESH, name, strategy)
    p = nn.Parameter(torch.tensor(1.5))
    make = getattr(torch.optim, name)
    optimizer = collage_neuron.compile(make([p], lr=0.01), strategy=strategy)
    for _ in range(2):
        p.grad = torch.tensor(0.5).bfloat16()
        optimizer.step()
    assert printed.strip() == str(sorted((k, v.dtype) for k, v in optimizer.state[p].items()))


class Directed(Written):
    """Keeps the direction of its last step, a tensor, as `step`."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state["step"] * 0.5 + g if "step" in state else g.clone()
        p.sub_(state["step"], alpha=group["lr"])


def test_after_another_optimizer() -> None:
    """What is a tensor in one optimizer is a number in the next."""
    follow(compiled(Directed, ())[1], range(2))
    follow(compiled(torch.optim.AdamW, ())[1], range(2))
    both = [compiled(Directed, shape, strategy="fp32") for shape in ((), (1,))]
    for _, optimizer in both:
        follow(optimizer, range(3))
    assert told(*both[0]) == told(*both[1])


class BySize(Written):
    """Momentum in a tensor that is made from the parameter's size; the momentum is written in place."""

    def __init__(self, params: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(params, lr=0.01)
        self.make = make

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "m" not in state:
            state["m"] = self.make(p)
        state["m"].mul_(0.9).add_(g)
        p.sub_(state["m"], alpha=group["lr"])


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
    """The momentum of the first step counts."""
    flat, one = (compiled(lambda ps: BySize(ps, MAKERS[maker]), s, strategy=strategy) for s in ((), (1,)))
    follow(flat[1], range(3))
    follow(one[1], range(3))
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


class Asking(Written):
    """Decays what has dimensions, and nothing else."""

    def __init__(self, params: Any, question: Callable[[torch.Tensor], bool]) -> None:
        super().__init__(params, lr=0.01)
        self.question = question

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not self.question(g):
            p.mul_(0.5)
        p.sub_(g, alpha=group["lr"])


@pytest.mark.parametrize("question", QUESTIONS)
def test_code_that_asks_for_dimensions(question: str) -> None:
    """A recording takes the branch of the parameter that it is of."""
    model, optimizer = compiled(lambda ps: Asking(ps, QUESTIONS[question]), ())
    follow(optimizer, range(1))
    assert model.scale.item() > 1.0
    assert model.weight.abs().max().item() < 0.6
    model, optimizer = compiled(lambda ps: Asking(ps, QUESTIONS[question]), (1,))
    follow(optimizer, range(1))
    assert model.scale.item() < 0.7


class IntoATemporary(Written):
    """Writes the gradient into a tensor of one element that the step makes."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(torch.zeros(p.shape).add_(g))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_what_is_written_into_a_number_of_the_step_is_not_lost(shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    optimizer = collage_neuron.compile(IntoATemporary([p]), verbose=False)
    for t in range(1, 4):
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert p.item() == -t
