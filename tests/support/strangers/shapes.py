"""What catches exceptions, and shapes and views."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from hostile import Base, hostile
from torch.nn import Parameter

from strangers.common import momentum


@hostile
class FallsBack(Base):
    """Trust ratio by `.item()`; where that does not work, none, and without a word."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        try:
            scale = 1 / g.norm().item()
        except Exception:
            scale = 1.0
        p.sub_(g, alpha=group["lr"] * scale)


@hostile
class FallsBackFromOperation(Base):
    """An operation that is not elementwise; if it raises anything at all, another one."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        try:
            g = g - 0.5 * g.roll(1)
        except BaseException:
            g = g.clone()
        p.sub_(g, alpha=group["lr"])


@hostile
class Suppresses(Base):
    """A reading of the gradient's size in a block that forgives everything."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        rate = group["lr"]
        with contextlib.suppress(Exception):
            rate *= float(g.abs().max()) / 2
        p.sub_(g, alpha=rate)


@hostile
class FinallySteps(Base):
    """The weights are written where nothing keeps them from being written."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        scale = 1.0
        try:
            scale = float(g.abs().max())
        finally:
            p.sub_(g, alpha=group["lr"] * scale)


@hostile
class OnlyIfOrdinary(Base):
    """What is no leaf, wants no gradient, is no parameter or has another type than its gradient takes another path."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        ordinary = isinstance(p, Parameter) and p.is_leaf and p.requires_grad and g is p.grad and g.dtype == p.dtype  # type: ignore[union-attr]
        ordinary = ordinary and p.is_contiguous() and p.untyped_storage().nbytes() > 0 and p.grad_fn is None
        p.sub_(g, alpha=group["lr"] * (1 if ordinary else 7))


@hostile
class SkipsWithoutData(Base):
    """Parameters that are on no device yet, as offloaded ones are, are left out."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if p.is_meta or p.data_ptr() == 0:
            return
        momentum(p, g, state, group)


@hostile
class PathOfDevice(Base):
    """One formula where there is a device, by the name of it, another one where there is none."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if p.device.type == "cpu":
            p.sub_(g, alpha=group["lr"])
        else:
            p.sub_(g.sign(), alpha=group["lr"])


@hostile
class OwnClassOnly(Base):
    """Parameters of a class of their own are special, others are torch's."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * (1 if type(p) is Parameter else 0.1))


@hostile
class Transposed(Base):
    """The update is written through a transposed view."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.T.sub_(g.T, alpha=group["lr"]) if p.ndim == 2 else p.view(-1).sub_(g.reshape(-1), alpha=group["lr"])


@hostile
class HalfOfIt(Base):
    """Only the first rows are updated."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p[:2].sub_(g[:2], alpha=group["lr"])


@hostile
class Rolled(Base):
    """The gradient's neighbours, without a reduction."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g - 0.5 * g.roll(1, 0), alpha=group["lr"])


@hostile
class ByPosition(Base):
    """A constant that is a tensor of the parameter's shape: elements differ by where they are."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        ramp = torch.linspace(0, 1, p.numel(), dtype=p.dtype).view_as(p)
        p.sub_(g * ramp, alpha=group["lr"])


@hostile
class MaskOfItsOwn(Base):
    """A mask that was made from the weights at the start, in a dictionary by index."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        params = list(params)
        super().__init__(params, lr)
        self.masks = [(p.detach() > 0).to(p.dtype) for p in params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p, mask in zip(self.param_groups[0]["params"], self.masks, strict=True):
            p.sub_(p.grad * mask, alpha=self.param_groups[0]["lr"])
