"""Unusual names, methods that are overridden, and parameters that come and go."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hostile import Base, World, case, hostile
from torch.nn import Parameter

from strangers.common import Ball, momentum


@hostile
class OddNames(Base):
    """Names of states that are no names of Python: a dot, a blank, a keyword, nothing."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        for name in ("exp.avg", "a b", "lambda", ""):
            m = state.setdefault(name, torch.zeros_like(p))
            m.mul_(0.5).add_(g)
            p.sub_(m, alpha=group["lr"])


@hostile
class LowNames(Base):
    """A state that is called as the low word of another one."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        for i, name in enumerate(("m", "m_lo")):
            m = state.setdefault(name, torch.zeros_like(p))
            m.mul_(0.5 + i / 4).add_(g)
            p.sub_(m, alpha=group["lr"])


@hostile
class MasterName(Base):
    """A state with the name of the compiler's own."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        m = state.setdefault("param_master", torch.zeros_like(p))
        m.mul_(0.5).add_(g)
        p.sub_(m, alpha=group["lr"])


@case
def parameter_replaced(world: World) -> None:
    """A parameter in the list of a group is replaced by another object, as when a layer grows."""
    world.compile(Ball(world.params))
    world.step(10)
    world.params[0] = Parameter(torch.full((5, 3), 0.375, dtype=world.params[0].dtype))
    world.optimizer.param_groups[0]["params"][0] = world.params[0]
    world.step(10)


@case
def from_the_model(world: World) -> None:
    """The step goes over the parameters of a model that the optimizer holds, not over its groups."""
    model = torch.nn.ParameterList(world.params)

    class OfModel(Base):
        def __init__(self, model: Any) -> None:
            super().__init__(model.parameters())
            self.model = model

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.model.parameters():
                momentum(p, p.grad, self.state[p], self.param_groups[0])

    world.compile(OfModel(model))
    world.step(20)


@case
def hook_with_arguments(world: World) -> None:
    """A hook before the step exchanges the arguments of it for a closure that makes the gradients."""
    world.compile(Ball(world.params))

    def closed(o: Any, args: Any, kwargs: Any) -> Any:
        world.backward()
        for p in world.params:
            p.grad = p.grad * 2 if p.grad is not None else None
        return args, kwargs

    world.optimizer.register_step_pre_hook(closed)
    world.step(20)


@case
def inference_mode(world: World) -> None:
    """Steps are taken in inference mode, and then not."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2))
    world.step(5)
    with torch.no_grad():
        world.step(5)
    with torch.inference_mode():
        world.step(5)
    world.step(5)


@case
def first_gradients_late(world: World) -> None:
    """No parameter has a gradient in the first steps, one never has."""
    world.compile(torch.optim.NAdam(world.params, lr=1e-2))
    world.step(3, without=(0, 1, 2))
    world.step(3, without=(0, 1))
    world.step(20, without=(1,))


@hostile
class ZeroGradOfItsOwn(Ball):
    """`zero_grad`, `add_param_group`, `state_dict` and `load_state_dict` are overridden, and used by the step."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        param_group.setdefault("gain", 0.5 + len(self.param_groups))
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "more"})

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * group["gain"])


@case
def own_state_dict(world: World) -> None:
    """The same, saved and loaded midway."""
    world.compile(ZeroGradOfItsOwn(world.params))
    world.step(5)
    world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))
    world.step(5)
