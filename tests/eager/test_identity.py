"""What a step as written finds by an identity or an address, it finds again in the next one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from as_written import Written, compiled, equal, in_fp32, near, parameters, run, values
from torch import Tensor

FINDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "an id": lambda o, p: id(p),
    "the text of an id": lambda o, p: f"k{id(p)}",
    "an address": lambda o, p: p.data_ptr(),
    "the optimizer's id": lambda o, p: (f"{id(o)}", o.number(p)),
}


class Found(Written):
    """Finds its momentum by what is derived from an identity; it reads a value, so that it runs on copies."""

    find: Callable[[Any, Tensor], Any]

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.kept: Any = {}

    def number(self, p: Tensor) -> int:
        return next(i for i, q in enumerate(self.param_groups[0]["params"]) if q is p)

    def average(self, p: Tensor) -> Tensor:
        """The momentum of a parameter."""
        kept: Tensor = self.kept.setdefault(type(self).find(self, p), torch.zeros_like(p))
        return kept

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(self.average(p).mul_(0.9).add_(g), alpha=group["lr"] / (1 + float(g.norm())))


@pytest.mark.parametrize("how", FINDS)
def test_what_is_found_by_an_identity_is_found_again(how: str) -> None:
    make = type("Found", (Found,), {"find": FINDS[how]})
    optimizer, params = compiled(make, "fp32")
    run(optimizer, 5)
    assert len(optimizer.kept) == len(params)
    assert equal(values(optimizer, params), in_fp32(make, 5))


@pytest.mark.parametrize("every", [1, 2])
def test_an_address_is_that_of_the_first_step_where_steps_are_traced_until_they_ask_for_it(every: int) -> None:
    class ByAddress(Written):
        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            self.kept, state["t"] = vars(self).get("kept", {}), state.get("t", 0) + 1
            if state["t"] % every == 0:
                g = self.kept.setdefault(p.data_ptr(), torch.zeros_like(p)).mul_(0.9).add_(g)
            p.sub_(g, alpha=group["lr"])

    optimizer, params = compiled(ByAddress, "fp32")
    run(optimizer, 6)
    assert len(optimizer.kept) == len(params)
    assert near(values(optimizer, params), in_fp32(ByAddress, 6), 6)


def test_hooks_where_gradients_are_accumulated_still_run() -> None:
    """DistributedDataParallel has its hooks there; `p.data = x` in another type would lose them."""
    optimizer, params = compiled(type("Found", (Found,), {"find": FINDS["an id"]}), "plus")
    node = params[0].view_as(params[0]).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    calls: list[int] = []
    node.register_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    params[0].register_post_accumulate_grad_hook(lambda p: calls.append(2))
    reference = weakref.ref(params[0])
    run(optimizer, 2)
    params[0].grad = None
    params[0].float().sum().backward()
    assert calls == [2, 1]
    assert reference() is params[0]
    assert [p.grad.dtype for p in params if p.grad is not None] == [torch.bfloat16] * 5


class OfItself(Written):
    """Multiplies a parameter by itself: autocast keeps what it has cast, and refers weakly to what was inside."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        scale = torch.nn.functional.linear(p, p).float().mean() if p.dim() == 2 else 1
        p.sub_(scale * g, alpha=group["lr"])


def test_autocast_around_each_step_casts_parameters() -> None:
    optimizer, params = compiled(OfItself, "fp32")
    plain = parameters(torch.float32)
    for i, each in product(range(3), (optimizer, OfItself(plain))):
        with torch.autocast("cpu", torch.bfloat16):
            run(each, 1, i)
    assert {p.dtype for p in params} == {torch.bfloat16}
    assert equal(values(optimizer, params), plain)
