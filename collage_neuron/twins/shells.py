"""The objects that stand for the parameters, and for the optimizer, in steps on copies: the same ones in every step.

Code may derive names from an identity (`f"k{id(p)}"`), which nothing can translate. It finds again what it has kept
under such a name if the copy of a parameter is the object that it was in the step before. Between steps it is empty.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from collage_neuron import torch_privates


class Shells:
    """Those of one optimizer."""

    def __init__(self) -> None:
        self._kept: MutableMapping[torch.Tensor, torch.nn.Parameter] = WeakTensorKeyDictionary()
        self._used: list[torch.nn.Parameter] = []
        self._optimizer: Any = None

    def optimizer(self, base: type[Optimizer]) -> Any:
        """An object of the class `base` without attributes."""
        if type(self._optimizer) is not base:
            self._optimizer = object.__new__(base)
        return self._optimizer

    def parameter(self, p: torch.Tensor, value: torch.Tensor) -> torch.nn.Parameter:
        """What stands for `p` in this step, with another value and no attributes."""
        found = self._kept.get(p)
        if found is None or type(found) is not type(p):
            found = torch_privates.made_of_class(type(p), value)
        else:
            found.data = value
        self._kept[p] = found
        self._used.append(found)
        return found

    def end(self) -> None:
        """The step is over: lets go of values and attributes."""
        for q in self._used:
            q.grad, q.data = None, q.data.new_empty(0)
            vars(q).clear()
        if self._optimizer is not None:
            vars(self._optimizer).clear()
        self._used.clear()


_shells: weakref.WeakKeyDictionary[Optimizer, Shells] = weakref.WeakKeyDictionary()


def shells(optimizer: Optimizer) -> Shells:
    """Those of an optimizer."""
    return _shells.setdefault(optimizer, Shells())
