"""Optimizers whose steps cannot run on fp32 values, with what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from as_written import Written

State = dict[str, Any]


class Rejected(Written):
    """Reads a value, so that it runs on copies, and then does what cannot be."""

    def update(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        p.sub_(g / float(g.norm() + 1), alpha=group["lr"])
        self.more(p, g, state, group)

    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        raise NotImplementedError


class AliasOfParameter(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        state["z"] = p.data


class OneStateTwice(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        state["a"] = state["b"] = torch.zeros_like(p)


class FlatBuffer(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        flat = torch.zeros(p.numel() + 8)
        self.flats = [*getattr(self, "flats", []), flat]
        state["m"] = flat[: p.numel()].view(p.shape)


class KeepsGradient(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        state["last"] = g


class ListOfViews(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        state.setdefault("m", torch.zeros_like(p))
        state["rows"] = [state["m"][:1]] if p.dim() else []


class KeepsAnArray(Rejected):
    """What numpy writes into its memory, torch would see in the copy of one step only."""

    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        state.setdefault("m", torch.zeros_like(p))
        state.setdefault("array", state["m"].numpy()[...])


class KeepsAMemoryview(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        state.setdefault("m", torch.zeros_like(p))
        self.views = [*getattr(self, "views", []), memoryview(state["m"].numpy())]


class KeepsAFlatArray(Rejected):
    """States that are views of one array of numpy, through which numpy writes."""

    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        if "m" not in state:
            self.flats = [*getattr(self, "flats", []), numpy.zeros(p.numel() + 8, dtype=numpy.float32)]
            state["m"] = torch.from_numpy(self.flats[-1])[: p.numel()].view(p.shape)


class NotADictionary(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        self.state[p] = [g.clone()]


class NumberAsName(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        state[3] = g.clone()  # type: ignore[index]


class OurName(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        state["m"], state["m_lo"] = g.clone(), g.clone()


class OtherShape(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        p.data = p.data[None]


class OtherGroups(Rejected):
    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        group["params"] = group["params"][:1]


class ReadsTheOriginal(Rejected):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        kept = torch.nn.ParameterList(params)
        self.read: Callable[[], float] = lambda: float(kept[0].sum())

    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        p.sub_(self.read())


class HeldView(Rejected):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.kept = [p.data[:1] for p in params if p.dim()]

    def more(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        p.mul_(1.0)


REJECTED: dict[type[Rejected], str] = {
    AliasOfParameter: r"a parameter and .*share memory",
    OneStateTwice: r"optimizer\.state\[p\]\['a'\] and optimizer\.state\[p\]\['b'\] share memory",
    FlatBuffer: r"optimizer\.state\[p\]\['m'\] and a tensor that the optimizer holds elsewhere share memory",
    KeepsGradient: "share memory",
    KeepsAnArray: r"optimizer\.state\[p\]\['m'\] and a tensor that the optimizer holds elsewhere share memory",
    KeepsAFlatArray: r"optimizer\.state\[p\]\['m'\] and a tensor that the optimizer holds elsewhere share memory",
    KeepsAMemoryview: r"optimizer\.state\[p\]\['m'\] and a tensor that the optimizer holds elsewhere share memory",
    ListOfViews: r"optimizer\.state\[p\]\['m'\] and a tensor that the optimizer holds elsewhere share memory",
    NotADictionary: r"an object of type list as optimizer\.state\[p\]",
    NumberAsName: "a state called 3",
    OurName: "a state called 'm_lo'",
    OtherShape: r"makes a parameter of shape \[24, 40\] one of torch.float32, shape \[1, 24, 40\]",
    OtherGroups: r"changes the list param_groups\[0\]\['params'\]",
    ReadsTheOriginal: "uses a parameter itself .in aten.sum",
    HeldView: "a parameter and a tensor that the optimizer holds elsewhere share memory",
}
