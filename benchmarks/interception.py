"""The least that a step costs whose operations wait: a bound for whatever defers them in Python, for traced_steps.py.

The user's `step()` runs on placeholders as ours are. Each call is taken and remembered, and returns what was prepared:
nothing is compared, presented, launched or stored. A number that is read runs the calls that it depends on once, in
torch, with arguments that were prepared too. Of a step as written the least is `step()` in fp32, on values that were
copied, and exchanged, and are so again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from collage_neuron import torch_privates
from collage_neuron.trace.method_cache import METHODS

taken: list[tuple[Any, Any, Any]] = []
"""The calls of the step, with their arguments."""
prepared: Iterator[Any] = iter(())
"""What they return."""


def _called(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    taken.append((function, args, kwargs or {}))
    return next(prepared)


class Taking(torch.Tensor):
    """A placeholder."""

    __torch_function__: Any = torch.nn.Parameter.__torch_function__
    __torch_dispatch__: Any = classmethod(_called)


def _method(function: Any) -> Any:
    def method(*args: Any, **kwargs: Any) -> Any:
        taken.append((function, args, kwargs))
        return next(prepared)

    return method


def _reading(function: Any) -> Any:
    def method(self: torch.Tensor) -> Any:
        taken.append((function, (self,), {}))
        calls, number = next(prepared)
        for call, args, kwargs in calls:
            call(*args, **kwargs)
        return number

    return method


READS = torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__float__
for _name in METHODS:
    setattr(Taking, _name, _method(getattr(torch.Tensor, _name)))
for _read in READS:
    setattr(Taking, _read.__name__, _reading(_read))


class Intercepted:
    """Steps of an optimizer that has states, as if its operations waited."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.returns = optimizer, list[Any]()
        self.values: dict[int, Any] = {}
        """Placeholders and what they stand for, by their ids."""
        self.made: list[Any] = []
        """The calls, with these values."""
        self.needs: dict[int, set[int]] = {}
        """The calls on which memory depends, by its addresses."""
        states, optimizer.state = optimizer.state, type(optimizer.state)(dict)
        for group in optimizer.param_groups:
            group["params"] = [self._waiting(p, states[p]) for p in group["params"]]
        self._run(self._learned())

    def step(self) -> None:
        """Takes a step that makes the calls of the first one."""
        self._run(iter(self.returns))

    def _run(self, returns: Iterator[Any]) -> None:
        global prepared
        prepared = returns
        taken.clear()
        self.optimizer.step()

    def _waiting(self, p: Any, state: Any) -> Any:
        found = self._placeholder(p.detach().float())
        found.grad = self._placeholder(p.grad.float())
        self.optimizer.state[found] = {
            k: self._placeholder(x.float()) if isinstance(x, torch.Tensor) and x.dim() else x for k, x in state.items()
        }
        return found

    def _placeholder(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return [self._placeholder(each) for each in x] if isinstance(x, (list, tuple)) else x
        found = torch_privates.without_memory(Taking, x.shape, x.stride(), x.dtype, x.device, 0)
        self.values[id(found)] = found, x
        return found

    def _value(self, x: Any) -> Any:
        return type(x)(map(self._value, x)) if isinstance(x, (list, tuple)) else self.values.get(id(x), (x, x))[1]

    def _learned(self) -> Iterator[Any]:
        """What calls return, which are made."""
        done: set[int] = set()
        while True:
            function, args, kwargs = taken[-1]
            given, named = self._value(args), {k: self._value(x) for k, x in kwargs.items()}
            tensors = [x for x in (*given, *named.values()) if isinstance(x, torch.Tensor)]
            needed = {len(self.made)}.union(*(self.needs.get(_memory(x), ()) for x in tensors))
            self.made.append((function, given, named))
            out = function(*given, **named)
            if function in READS:
                self.returns.append(([self.made[i] for i in sorted(needed - done)], out))
                done |= needed
            else:
                self.returns.append(args[0] if out is given[0] else self._placeholder(out))
                if isinstance(out, torch.Tensor):
                    self.needs[_memory(out)] = needed
            yield self.returns[-1] if function not in READS else ((), out)


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class AsWritten:
    """Steps of an optimizer that has states, in fp32."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        params = [p for group in optimizer.param_groups for p in group["params"]]
        states = [x for p in params for x in optimizer.state[p].values()]
        owners = [*params, *(x for each in states for x in (each if isinstance(each, list) else [each]))]
        self.pairs = [(x, x.detach().float().requires_grad_(x.requires_grad)) for x in owners]
        for p, wide in self.pairs[: len(params)]:
            wide.grad = p.grad.float()
        self.words, self.wide = [x.data for x in owners], [wide.data for _, wide in self.pairs]
        self.grads, self.wide_grads = [p.grad for p in params], [wide.grad for _, wide in self.pairs[: len(params)]]

    def step(self) -> None:
        """Takes a step."""
        torch_privates.copy_each([*self.wide, *self.wide_grads], [*self.words, *self.grads])
        torch_privates.exchange_each(self.pairs)
        self.optimizer.step()
        torch_privates.exchange_each(self.pairs)
        torch_privates.copy_each(self.words, self.wide)
