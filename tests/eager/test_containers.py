"""States in dictionaries that are found by numbers, as heavyball keeps them: kept as the optimizer made them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from as_written import Written, compiled, equal, in_fp32, run, values
from torch.nn import Parameter

import collage_neuron
from collage_neuron.states.bookkeeping import bookkeeping


class ByView(Written):
    """A dictionary for each view of a parameter, by the number of the view; beside a momentum of its own name."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> None:
        own = state.setdefault(0, {"count": 0, "exp_avg": torch.zeros_like(p)})
        own["count"] += 1
        momentum = state.setdefault("momentum", torch.zeros_like(p)).lerp_(g, 0.5)
        p.sub_(own["exp_avg"].lerp_(momentum, 0.1), alpha=group["lr"] / own["count"])


def test_a_state_found_by_a_number_is_kept_as_it_is_made() -> None:
    optimizer, params = compiled(ByView)
    run(optimizer, 4)
    assert bookkeeping(optimizer).as_written
    assert equal(values(optimizer, params), in_fp32(ByView, 4))
    assert optimizer.state[params[0]][0]["exp_avg"].dtype == torch.float32
    assert "0                  as made" in collage_neuron.explain(optimizer)
    whole = sum(p.numel() for p in params)
    single = sum(p.numel() for p in params if p.numel() == 1)  # single numbers are kept too, and 0-d ones not counted
    assert collage_neuron.bytes_per_parameter(optimizer) > 4 + 4 + 4 + 2 - 8 * single / whole


HOLDS: dict[str, Callable[[Any, torch.Tensor, dict[str, Any], dict[str, Any]], Any]] = {
    "state": lambda o, p, state, group: state.setdefault("x", torch.zeros_like(p)),
    "set": lambda o, p, state, group: next(iter(state.setdefault("x", {torch.zeros_like(p)}))),
    "mapping": lambda o, p, state, group: state.setdefault("x", MappingProxyType({0: torch.zeros_like(p)}))[0],
    "attribute": lambda o, p, state, group: vars(o).setdefault("xs", {}).setdefault(p, torch.zeros_like(p)),
    "group": lambda o, p, state, group: group.setdefault("xs", {}).setdefault(id(p), [torch.zeros_like(p)])[0],
    "no parameter": lambda o, p, state, group: o.state["all"].setdefault(id(p), torch.zeros_like(p)),
}


@pytest.mark.parametrize("where", HOLDS)
def test_tensors_that_the_optimizer_keeps_are_counted_once(where: str) -> None:
    """6 bytes of the parameter (bf16 and fp32), 2 of the gradient, 4 of the tensor."""

    class Holds(Written):
        def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            x = HOLDS[where](self, p, state, group).add_(g)
            self.again, self.params = [x], [p]
            p.sub_(x / float(x.norm() + 1), alpha=group["lr"])
            if where == "state":  # a list of it would be rejected
                self.again = []

    params = [Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in ((4, 6), (8,))]
    optimizer: Any = collage_neuron.compile(Holds(params), strategy="fp32", verbose=False)
    run(optimizer, 1)
    assert collage_neuron.bytes_per_parameter(optimizer) == 6 + 2 + 4
    elsewhere = where in ("attribute", "group", "no parameter")
    assert ("in attributes and settings: 0.000128 MB" in collage_neuron.explain(optimizer)) == elsewhere


class Log(list[int]):
    """Hands each entry on."""

    def append(self, x: int) -> None:
        HANDED_ON.append(x)
        super().append(x)


class Named(OrderedDict[str, int]):
    def __setitem__(self, k: str, x: int) -> None:
        HANDED_ON.append(x)
        super().__setitem__(k, x)


HANDED_ON: list[int] = []


@pytest.mark.parametrize("read", [False, True])
def test_methods_of_containers_of_the_users_are_called_by_its_code_alone(read: bool) -> None:
    class Logs(Written):
        named: Any

        def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            log = vars(self).setdefault("log", Log())
            log.append(len(log))
            self.named["n"] = len(log)
            p.sub_(g, alpha=group["lr"] / (float(g.norm() + 1) if read else 1.0))

    handed_on = []
    for dtype in (torch.float32, torch.bfloat16):
        p = Parameter(torch.ones(8).to(dtype))
        optimizer: Any = Logs([p])
        vars(optimizer)["named"] = Named()
        if dtype == torch.bfloat16:
            optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
        HANDED_ON.clear()
        run(optimizer, 4)
        handed_on.append([*HANDED_ON])
        assert [*optimizer.log] == [0, 1, 2, 3]
    assert handed_on[0] == handed_on[1]


def test_neither_are_they_where_a_step_is_put_back() -> None:
    class Doubles(OrderedDict[str, float]):
        def __setitem__(self, k: str, x: float) -> None:
            super().__setitem__(k, 2 * x)

    class Raises(Written):
        named: Any

        def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            p.sub_(torch.linalg.qr(g)[0], alpha=group["lr"])
            self.named.clear()
            raise ZeroDivisionError

    optimizer: Any = Raises([Parameter(torch.ones(4, 4).bfloat16())])
    optimizer.named = Doubles(b=1.0, a=2.0)
    optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run(optimizer, 1)
        assert [*optimizer.named.items()] == [("b", 2.0), ("a", 4.0)]
