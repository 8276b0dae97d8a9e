"""A steady step knows what the last one found: what may change in between is still noticed, whatever it is."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import collage_neuron
from collage_neuron import torch_privates
from collage_neuron.states.sharding import Guard


def run(count: int = 3, steps: int = 3, **kwargs: Any) -> tuple[list[torch.nn.Parameter], Any]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4, 5, generator=generator).bfloat16()) for _ in range(count)]
    optimizer = collage_neuron.compile(torch.optim.AdamW(params, lr=1e-2), **{"strategy": "plus", **kwargs})
    for p in params:
        p.grad = torch.randn(4, 5, generator=generator).bfloat16()
    for _ in range(steps):
        optimizer.step()
    return params, optimizer


def test_no_state_and_no_gradient_is_kept_alive() -> None:
    params, optimizer = run()
    held = [weakref.ref(optimizer.state[params[0]]["exp_avg"]), weakref.ref(params[0].grad)]
    optimizer.state[params[0]]["exp_avg"] = torch.zeros(4, 5).bfloat16()
    params[0].grad = None
    assert [ref() for ref in held] == [None, None]


def transposed(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(5, 4, dtype=torch.bfloat16).t().copy_(t)


def _copied(t: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(t.detach().clone()) if isinstance(t, torch.nn.Parameter) else t.clone()


class Own(torch.Tensor):
    """A class of tensors."""


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype": torch.Tensor.bfloat16,
    "shape": lambda t: t[:1],
    "transposed": lambda t: t.T.contiguous().T,
    "broadcast": lambda t: t[:1].expand(4, 4),
    "class": lambda t: t.as_subclass(Own),
    "meta": lambda t: t.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "negated": torch._neg_view,
    "differentiable": lambda t: t.clone().requires_grad_(),
}
"""Tensors unlike `t`, a square one, in one property each."""


@pytest.mark.parametrize("twice", [False, True], ids=["by torch", "by Python"])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_guard_notices_what_changes_of_a_tensor(other: Callable[[torch.Tensor], torch.Tensor], twice: bool) -> None:
    first = torch.nn.Parameter(torch.ones(4, 4))
    tensors = [first, torch.ones(4, 4), torch.ones(()), *[first] * twice]  # torch's own takes no tensor twice
    guard = torch_privates.guard(tensors)
    assert guard(*tensors)
    assert guard(first, *map(_copied, tensors[1:]))
    assert not guard(first, other(tensors[1]), *tensors[2:])
    assert guard(*tensors)


def test_the_guard_of_a_step_is_that_of_torch() -> None:
    made = torch_privates.guard([torch.ones(2), torch.ones(3)])
    assert not hasattr(made, "__code__")  # a function in C: it is faster, and nothing else fails where it is gone


@pytest.mark.parametrize("twice", [False, True], ids=["by torch", "by Python"])
def test_a_guard_notices_a_tensor_that_takes_the_place_of_another_one(twice: bool) -> None:
    tensors = [first := torch.ones(4), torch.ones(4), torch.ones(4), *[first] * twice]
    guard = torch_privates.guard(tensors)
    assert guard(*tensors)
    assert not guard(first, tensors[1], tensors[1], *tensors[3:])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_of_a_nested_tensor_there_is_no_guard_which_would_end_the_process() -> None:
    assert Guard.of([torch.ones(2), torch.nested.nested_tensor([torch.ones(1)])]) is None
