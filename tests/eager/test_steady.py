"""Steps as written that present and store what the last one did (`eager/steady.py`) have the bits of all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.eager.memory import pool
from collage_neuron.eager.rollback import tensors_in
from collage_neuron.eager.steady import Steady
from collage_neuron.states.step_inventory import Structure


class Flipped(Optimizer):
    """Adam without its bias corrections, with an operation that is not compiled; `also` does more in a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kept: list[Any] = []
        self.also: Callable[[Any, Any], Any] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["n"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
            state["n"] += 1
            state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.sub_((state["m"] / (state["v"].sqrt() + 1e-8)).flip(0), alpha=0.1)
            self.more(p, state)
        if self.also is not None:
            self.also(self, [p for group in self.param_groups for p in group["params"]])
            self.also = None

    def more(self, p: Any, state: Any) -> None:
        """What a subclass does besides."""


class Listed(Flipped):
    """The same with sums of gradients in a list and in a dictionary, which are no words; `p` has a part of both."""

    def more(self, p: Any, state: Any) -> None:
        (total,) = state.setdefault("list", [torch.zeros_like(p)])
        total.add_(p.grad)
        named = state.setdefault("named", {0: torch.zeros_like(p)})
        for x in named.values():
            p.sub_(x.add_(p.grad), alpha=0.001)
        p.sub_(total, alpha=0.001)


def in_step(also: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def arranged(optimizer: Any, params: Any) -> None:
        optimizer.also = also

    return arranged


def no_gradient(optimizer: Any, params: Any) -> None:
    params[1].grad = None


def loaded(optimizer: Any, params: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def transposed(optimizer: Any, params: Any) -> None:
    params[0].data = params[0].data.t().contiguous().t()


def other_backend(optimizer: Any, params: Any) -> None:
    optimizer.param_groups[0]["collage_backend"] = "reference"


def one_more(optimizer: Any, params: Any) -> None:
    params.append(Parameter(torch.ones(4, 4).bfloat16()))
    optimizer.add_param_group({"params": params[-1:]})


def replaced(optimizer: Any, params: Any) -> None:
    optimizer.state[params[0]]["m"] = optimizer.state[params[0]]["m"] * 2


def exchanged(optimizer: Any, params: Any) -> None:
    one, other = (optimizer.state[p] for p in params[::2])
    one["m"], other["m"] = other["m"], one["m"]


def counted(optimizer: Any, params: Any) -> None:
    """No later step finds another structure, and looks anew."""
    state = optimizer.state[params[0]]
    state["n"] = params[0] * 1.0 if state["n"] == 13 else state["n"]


def moved_without(optimizer: Any, params: Any) -> None:
    """What has no gradient is written too."""
    no_gradient(optimizer, params)
    optimizer.also = lambda optimizer, params: [p.mul_(0.5) for p in params]


EVENTS: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda optimizer, params: None,
    "no gradient": no_gradient,
    "a state is written": lambda optimizer, params: optimizer.state[params[0]]["m"].zero_(),
    "a state is cleared": lambda optimizer, params: optimizer.state[params[0]].clear(),
    "other strides": transposed,
    "another backend": other_backend,
    "a checkpoint": loaded,
    "one parameter more": one_more,
    "frozen": lambda optimizer, params: params[1].requires_grad_(False),
    "in the step, a gradient": in_step(lambda optimizer, params: params[0].grad.mul_(2)),
    "in the step, a value is kept": in_step(lambda optimizer, params: optimizer.kept.append(params[0].data)),
    "in the step, another state": in_step(replaced),
    "in the step, one state more": in_step(
        lambda optimizer, params: optimizer.state[params[0]].update(late=params[0] * 1.0)
    ),
    "in the step, states are exchanged": in_step(exchanged),
    "in the last step, a number becomes a tensor": in_step(counted),
    "in the step, other strides": in_step(transposed),
    "in the step, without a gradient": moved_without,
}


def set_list(make: Callable[[Any, Any], Any], name: str = "list") -> Callable[[Any, Any], None]:
    """Exchanges what is in the state of the first parameter under a name."""

    def event(optimizer: Any, params: Any) -> None:
        optimizer.state[params[0]][name] = make(params[0], optimizer.state[params[0]])

    return event


def shared(optimizer: Any, params: Any) -> None:
    """Two parameters have one list."""
    optimizer.state[params[2]]["list"] = optimizer.state[params[0]]["list"]


def no_list(optimizer: Any, params: Any) -> None:
    del optimizer.state[params[0]]["list"]


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "another list": set_list(lambda p, state: [torch.ones_like(p, dtype=torch.float32)]),
    "a list that is written": lambda optimizer, params: optimizer.state[params[0]]["list"][0].mul_(2),
    "a tuple": set_list(lambda p, state: (torch.ones_like(p, dtype=torch.float32),)),
    "no list": no_list,
    "one list for two": shared,
    "a longer dictionary": lambda optimizer, params: optimizer.state[params[0]]["named"].update({7: params[0] * 1.0}),
    "in the step, another list": in_step(set_list(lambda p, state: [p * 1.0])),
    "in the step, a list of a gradient": in_step(set_list(lambda p, state: [p.grad])),
    "in the step, a list becomes a tensor": in_step(set_list(lambda p, state: p * 1.0, "late")),
    "words in a list": set_list(lambda p, state: [state["m"]]),
    "in the step, named by a tensor": in_step(
        lambda optimizer, params: optimizer.state[params[0]].update({params[1]: [1]})
    ),
}
"""The same for what is not in words."""


def ran(event: Callable[[Any, Any], Any], strategy: str, cls: type[Flipped]) -> tuple[list[torch.Tensor], list[bool]]:
    """What is left after 13 steps, with the event before some of them; and whether each found what the last one did."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).bfloat16()) for shape in ((4, 4), (5,), (4, 4))]
    optimizer: Any = collage_neuron.compile(cls(params), strategy=strategy, verbose=False)
    steady = []
    for i in range(13):
        for p in params:
            p.grad = torch.randn(p.shape).bfloat16()
        if i in (6, 10, 12):  # the last one shows what a step leaves, before another one looks at it
            event(optimizer, params)
        optimizer.step()
        steady.append(pool(optimizer).steady is not None)
    words = [x for p in params for x in tensors_in(optimizer.state[p])]
    return [x.detach() for x in (*params, *words, *(p.grad for p in params if p.grad is not None))], steady


@pytest.mark.filterwarnings("ignore::collage_neuron.RunsAsWritten")
@pytest.mark.parametrize("strategy", ["plus", "split433", "stochastic"])
@pytest.mark.parametrize(
    ("name", "cls"), [*((name, Flipped) for name in EVENTS), *((name, Listed) for name in EVENTS | CHANGES)]
)
def test_bits_are_those_of_steps_that_look_anew(
    name: str, cls: type[Flipped], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = (EVENTS | CHANGES)[name]
    found, steady = ran(event, strategy, cls)
    monkeypatch.setattr(Steady, "begin", lambda *_: None)
    monkeypatch.setattr(Steady, "of", lambda *_: None)
    monkeypatch.setattr(Structure, "is_of", lambda *_: False)
    anew, _ = ran(event, strategy, cls)
    assert len(found) == len(anew)
    assert all(map(torch.equal, found, anew))
    assert steady[5]  # before anything has happened
