"""Optimizers whose steps leave what cannot be stored: they raise once the step has run, and everything is restored."""

from __future__ import annotations

from typing import Any

import torch
from as_written import Written

State = dict[str, Any]


class Rejected(Written):
    """Reads a value, so that it runs as written, and then leaves what has no place."""

    def update(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        p.sub_(g / float(g.norm() + 1), alpha=group["lr"])
        self.more(p, g, state, group)

    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        raise NotImplementedError


class NotADictionary(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        self.state[p] = [g.clone()]


class OurName(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        state["m"], state["m_lo"] = g.clone(), g.clone()


class CalledParam(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        state.setdefault("param", torch.zeros(2)).add_(1)


class OtherShape(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        p.data = p.data[None]


REJECTED: dict[type[Rejected], str] = {
    NotADictionary: r"an object of type list as optimizer\.state\[p\]",
    OurName: "a state called 'm_lo'",
    CalledParam: "a state called 'param'",
    OtherShape: r"makes a parameter of shape \[24, 40\] one of shape \[1, 24, 40\]",
}
