"""The twin on which a user's method runs: an optimizer of the original class, over exact fp32 copies.

The copies are made when the method first accesses parameters or states. A method that reads or sets numbers (a learning
rate) makes none. When the method returns, its results are stored in the optimizer's formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import wraps
from numbers import Number
from types import FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import FORMATS, Format
from collage_neuron.numerics.strategies import NO_ROLES, formats_for
from collage_neuron.optimizer.lazy_tables import Lazy
from collage_neuron.optimizer.substitution import leaves, substituted
from collage_neuron.settings import Settings
from collage_neuron.states import exchanged, kept_formats, low_words
from collage_neuron.states.names import is_component, names_in, suffixes
from collage_neuron.states.sharding import local
from collage_neuron.states.store import Record, State, is_host_scalar, is_idle, kept_format, read_fp32, store
from collage_neuron.twins.watch import memory_of

NOT_COPIED = ("state", "param_groups", "step")
PLAIN = (NoneType, Number, str, bytes, torch.dtype, torch.device)


class Twin:
    """`optimizer` takes the place of `original` while the method `name` runs."""

    def __init__(self, base: type[Optimizer], original: Optimizer, name: str) -> None:
        self.original, self.name = original, f"{base.__name__}.{name}"
        self.params: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self.made = self.over = False
        self.optimizer: Any = object.__new__(base)
        self.groups = [Lazy.of(None, self.make, group) for group in original.param_groups]
        self.state = Lazy.of(dict, self.make)
        self.list = list(self.groups)
        own = [original, original.param_groups, original.state, *original.param_groups]
        other = [self.optimizer, self.list, self.state, *self.groups]
        self.forth = {id(x): y for x, y in zip(own, other, strict=True)}
        self.back = {id(y): x for x, y in zip(own, other, strict=True)}
        self.given: list[Any] = []
        vars(self.optimizer).update(self._attributes(), state=self.state, param_groups=self.list, step=self._step)

    def _attributes(self) -> dict[str, Any]:
        own = {k: v for k, v in vars(self.original).items() if k not in NOT_COPIED}
        if not self.made and self._holds_parameters(own):
            self.make()
        return {k: v if _is_of_torch(k) else substituted(v, self.forth) for k, v in own.items()}

    def take(self, given: Any) -> Any:
        """The arguments for the method: `given`, with the twin's parameters and groups in place of the optimizer's.

        Iterators are exhausted for this. A function may be called only before the method accesses the weights.
        """
        given = _listed(given)
        self.given = [given]
        for leaf in leaves(given):
            if isinstance(leaf, (FunctionType, MethodType)) and getattr(leaf, "__self__", None) is not self.original:
                self.forth[id(leaf)] = self._guarded(leaf)
        if self._holds_parameters(given):
            self.make()
        return substituted(given, self.forth)

    def finish(self, result: Any) -> Any:
        """Stores what the method wrote; returns the method's `result` for the caller."""
        if self.optimizer.state is not self.state or self.optimizer.param_groups is not self.list:
            self.make()
        result = substituted(result, self.back)
        if self.made:
            self._check_result(result)
        self._write()
        return result

    def close(self) -> None:
        """Called after the method returned or raised: later accesses raise, since their effects would be lost."""
        self.over = True

    # --- the copies -----------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Makes the copies, once."""
        if self.over:
            raise self._rejected("looks at weights or states after it returned (a generator, or a context manager)")
        if self.made:
            return
        self.made = True
        exchanged.follow(self.original)
        low_words.drop_stale(self.original)
        self._check_graphs()
        self._check_modules([vars(self.original), self.given])
        for group in self.original.param_groups:
            for p in group["params"]:
                value = read_fp32(p, self.original.state.get(p, {}), "param", self._record(p))
                self.params[p] = q = torch.nn.Parameter(value, requires_grad=p.requires_grad)
                self.forth[id(p)], self.back[id(q)] = q, p
        for lazy, group in zip(self.groups, self.original.param_groups, strict=True):
            dict.update(lazy, params=[self.params[p] for p in group["params"]])
        self._read()

    @torch.no_grad()
    def _read(self) -> None:
        """Copies the current gradients, attributes and states of the parameters."""
        dict.clear(self.state)
        for p, q in self.params.items():
            q.grad = None if p.grad is None else _fp32(p.grad, q)
            vars(q).update(vars(p))
            state = self.original.state.get(p, {})
            if not is_idle(state):
                own = [k for k in state if not is_component(k, state)]
                dict.__setitem__(self.state, q, {k: _read_state(p, state, k, self._record(p)) for k in own})
        others = {k: v for k, v in self.original.state.items() if k not in self.params}
        dict.update(self.state, substituted(others, self.forth))

    @torch.no_grad()
    def _step(self, closure: Any = None) -> Any:
        """`self.step()` in a method: stores what the method has written so far, then takes the compiled step."""
        if closure is not None:
            raise self._rejected("steps with a closure, which would run the model on other weights than it has")
        self._write()
        result = self.original.step()
        for p, q in self.params.items():
            q.copy_(read_fp32(p, self.original.state.get(p, {}), "param", self._record(p)))
        for lazy, group in zip(self.groups, self.original.param_groups, strict=True):
            dict.update(lazy, {k: v for k, v in group.items() if k != "params"})
        vars(self.optimizer).update(self._attributes())
        self._read()
        return result

    def _record(self, p: torch.Tensor) -> Record:
        return kept_formats.of(self.original, p)

    # --- what the method left -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _write(self) -> None:
        groups, state = self.optimizer.param_groups, self.optimizer.state
        self._check_groups(groups)
        strategies = {p: Settings.of(group).strategy for group in self.original.param_groups for p in group["params"]}
        for p, q in self.params.items():
            self._write_states(p, dict.get(state, q) or {})
            self._write_param(p, q, formats_for(strategies[p], (), NO_ROLES, p.dtype)["param"])
        if self.made:
            self._write_other_states(state)
            low_words.remember_states(self.original)
        for group, other in zip(self.original.param_groups, groups, strict=True):
            params = group["params"] if not self.made else [self.back[id(q)] for q in other["params"]]
            new = {k: substituted(v, self.back) for k, v in dict.items(other) if k != "params"}
            group.clear()
            group.update({"params": params, **new})
        own = {k: v for k, v in vars(self.optimizer).items() if k not in NOT_COPIED}
        for gone in [k for k in vars(self.original) if k not in (*own, *NOT_COPIED)]:
            delattr(self.original, gone)
        vars(self.original).update({k: v if _is_of_torch(k) else substituted(v, self.back) for k, v in own.items()})

    def _write_states(self, p: torch.nn.Parameter, values: Mapping[str, Any]) -> None:
        state = self.original.state.get(p, {})
        for gone in [k for k in state if not is_component(k, state) and k not in values]:
            for key in (gone, *(gone + suffix for suffix in suffixes())):
                state.pop(key, None)
        for name, value in values.items():
            state = self.original.state[p]
            value = substituted(value, self.back)
            if name not in state:
                _write_new(p, state, name, value, self._record(p))
            elif not _same(value, _read_state(p, state, name, self._record(p))):
                _write_state(p, state, name, value, self._record(p))

    def _write_param(self, p: torch.nn.Parameter, q: torch.nn.Parameter, fmt: Format) -> None:
        if q.shape != p.shape:
            raise self._rejected(f"changes the shape of a parameter from {list(p.shape)} to {list(q.shape)}")
        if not _same(q.detach().float(), read_fp32(p, self.original.state.get(p, {}), "param", self._record(p))):
            state = self.original.state[p] if len(fmt.components) > 1 else self.original.state.get(p, {})
            store(p, state, "param", fmt, q.detach().float(), self._record(p))
            low_words.remember(self.original, p, low_words.FRESH if is_idle(state) else low_words.STEPPED)
        if q.grad is None or p.grad is None:
            p.grad = None if q.grad is None else q.grad.to(p.device, p.dtype)
        elif not _same(q.grad.float(), _fp32(p.grad, q)):
            p.grad.copy_(q.grad)  # in place: buffers of DistributedDataParallel are views of it
        p.requires_grad_(q.requires_grad)
        vars(p).update({k: substituted(v, self.back) for k, v in vars(q).items()})

    def _write_other_states(self, state: Mapping[Any, Any]) -> None:
        twins = set(self.params.values())
        others = {k: substituted(v, self.back) for k, v in state.items() if k not in twins}
        for gone in [k for k in self.original.state if k not in others and k not in self.params]:
            del self.original.state[gone]
        self.original.state.update(others)

    # --- what cannot be --------------------------------------------------------------------------------------------

    def _rejected(self, why: str) -> UnsupportedUpdate:
        return UnsupportedUpdate(
            f"{self.name}() {why}. It runs on exact fp32 copies, which are stored in the optimizer's formats when it "
            "returns, since the parameters of a compiled optimizer are rounded; no weight was changed. Change the "
            "method, or do its work outside with collage_neuron.exact_value and set_exact_value"
        )

    def _holds_parameters(self, x: Any) -> bool:
        own = {id(p) for group in self.original.param_groups for p in group["params"]}
        return any(id(leaf) in own for leaf in leaves(x))

    def _check_graphs(self) -> None:
        for group in self.original.param_groups:
            if any(p.grad is not None and p.grad.requires_grad for p in group["params"]):
                raise self._rejected("looks at gradients that have a graph (create_graph=True), which copies have not")

    def _check_modules(self, x: Any) -> None:
        modules = [leaf for leaf in leaves(x) if isinstance(leaf, torch.nn.Module)]
        if any(self._holds_parameters(list(module.parameters())) for module in modules):
            raise self._rejected("looks at weights or states and has the model as well, whose weights are not copied")

    def _guarded(self, function: Any) -> Any:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.made and not self.over:
                raise self._rejected("calls a function after it has looked at weights or states")
            return function(*args, **kwargs)

        self.back[id(guarded)] = function
        return guarded

    def _check_groups(self, groups: Any) -> None:
        known = {id(q) for q in self.params.values()}
        if len(groups) != len(self.original.param_groups):
            raise self._rejected("adds or removes a parameter group")
        if self.made and any(id(q) not in known for group in groups for q in group["params"]):
            raise self._rejected("puts another parameter into a group")

    def _check_result(self, result: Any) -> None:
        states = (s.values() for s in self.optimizer.state.values() if isinstance(s, dict))
        ours = [*self.params.values(), *(q.grad for q in self.params.values()), *(v for s in states for v in s)]
        memory = {_memory(t) for t in ours if isinstance(t, torch.Tensor) and t.numel()}
        shared = {_memory(v) for s in self.original.state.values() for v in leaves(s) if isinstance(v, torch.Tensor)}
        for leaf in leaves(result):
            if isinstance(leaf, torch.Tensor):
                if _memory(leaf) in memory - shared:
                    raise self._rejected("returns memory of a parameter, gradient or state, not a copy")
                if leaf.grad_fn is not None:
                    raise self._rejected("returns a tensor with a graph, whose gradients would go to the copies")
            elif not isinstance(leaf, PLAIN) and leaf is not self.original:
                raise self._rejected(f"returns a {type(leaf).__name__}, which may hold on to the copies")


def _is_of_torch(name: str) -> bool:
    return torch_privates.is_of_torch(name) or name.startswith("_collage_") or name == "defaults"


def _memory(t: torch.Tensor) -> int:
    return memory_of(local(t))


def _fp32(grad: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return grad.detach().to(q.device, torch.float32, copy=True)


def _read_state(p: torch.Tensor, state: Mapping[str, Any], name: str, record: Record) -> Any:
    value = state[name]
    if not isinstance(value, torch.Tensor) or is_host_scalar(value, p):
        return value
    ours = _is_like(value, p) or name in names_in(state).coded
    return read_fp32(p, state, name, record) if ours else value.detach().clone()


def _is_like(value: object, p: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == p.shape and value.is_floating_point()


def _write_new(p: torch.Tensor, state: State, name: str, value: Any, record: Record) -> None:
    """Stores a new state, in fp32 if it has the parameter's shape; a step that uses it converts it to its format."""
    if _is_like(value, p) and not is_host_scalar(value, p):
        store(p, state, name, FORMATS["fp32"], value.detach().float(), record)
    else:
        state[name] = value


def _write_state(p: torch.Tensor, state: State, name: str, value: Any, record: Record) -> None:
    if _is_like(value, p) and not is_host_scalar(state[name], p):
        store(p, state, name, kept_format(p, state, name, record), value.detach().float(), record)
    else:
        state[name] = value


def _same(x: Any, y: Any) -> bool:
    """Returns True if nothing was written; compares bits, so that an unchanged NaN counts as equal."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x is y:
        return x is y
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    x, y = local(x), local(y)
    if x.dtype == torch.float32:
        return torch.equal(x.contiguous().view(torch.int32), y.contiguous().view(torch.int32))
    return torch.equal(x, y)


def _listed(x: Any) -> Any:
    """`x` with iterators replaced by lists."""
    args, kwargs = x
    return [list(a) if isinstance(a, Iterator) else a for a in args], {
        k: list(v) if isinstance(v, Iterator) else v for k, v in kwargs.items()
    }
