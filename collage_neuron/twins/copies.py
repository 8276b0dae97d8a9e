"""The fp32 copies on which a step runs: an optimizer of the user's class over copies of all parameters and states.

The copy has its own attributes, groups and states, so that a step that raises leaves the optimizer as it was. The
objects in them are the real ones: what the step changes there is undone by `HostState` if it fails. Whatever holds a
parameter, its id, a group or the optimizer holds the copy during the step (`exchange`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format
from collage_neuron.passes.backends.protocol import Backend, Launch
from collage_neuron.passes.capture.host_state import HostState
from collage_neuron.passes.capture.shadow import SWITCHES
from collage_neuron.settings import OURS, Settings
from collage_neuron.states import kept_formats
from collage_neuron.states.names import names_in
from collage_neuron.states.store import kept_format
from collage_neuron.states.values import values_in
from collage_neuron.twins import codec
from collage_neuron.twins.kept import Kept
from collage_neuron.twins.memory import pool
from collage_neuron.twins.shells import shells
from collage_neuron.twins.watch import memory_of

NOT_COPIED = ("state", "param_groups", "step")
HOOKS = {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}


class Copies:
    """An optimizer of the class `base` with fp32 copies of the parameters and states of `original`."""

    def __init__(self, base: type[Optimizer], original: Optimizer) -> None:
        self.base, self.original = base, original
        self._shells = shells(original)
        self.optimizer = self._shells.optimizer(base)
        own = {k: v for k, v in vars(original).items() if k not in NOT_COPIED}
        vars(self.optimizer).update(own | {key: {} for key in HOOKS & own.keys()})
        self.params: dict[torch.Tensor, torch.nn.Parameter] = {}
        self.given: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """For each parameter, by name, the copies of its states that were decoded."""
        self.attributes = dict(own)
        self._pool = pool(original)
        self._launches: dict[Backend, list[Launch]] = defaultdict(list)
        self.optimizer.state = defaultdict(dict)
        self.optimizer.param_groups = [self._group(group) for group in original.param_groups]
        self.groups = [{**group, "params": [*group["params"]]} for group in self.optimizer.param_groups]
        states = original.state.items()
        self.optimizer.state.update({k: v for k, v in states if k not in self.params})
        for backend, launches in self._launches.items():
            codec.run(backend, launches)

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        backend = codec.converter(Settings.of(group).backend, group["params"][0].device) if group["params"] else None
        for p in group["params"]:
            assert backend is not None
            self._copy(p, backend)
        own = {k: False if k in SWITCHES else v for k, v in group.items() if k not in OURS}
        return own | {"params": [self.params[p] for p in group["params"]]}

    def _copy(self, p: Any, backend: Backend) -> None:
        state, record = self.original.state.get(p, {}), kept_formats.of(self.original, p)
        value = self._decoded(p, p.detach(), kept_format(p, state, "param", record), "param", backend)
        self.params[p] = q = self._shells.parameter(p, value)
        q.requires_grad_(p.requires_grad)
        vars(q).update(vars(p))
        q.grad = None if p.grad is None else self._pool.empty(p.grad).copy_(p.grad.detach())
        if p not in self.original.state:
            return
        names = names_in(state)
        ours = values_in(state, p, record)
        self.given[p] = {k: self._decoded(p, state[k], kept_format(p, state, k, record), k, backend) for k in ours}
        if names.own:
            self.optimizer.state[q] = {k: self.given[p].get(k, state[k]) for k in names.own}

    def _decoded(self, p: Any, first: torch.Tensor, fmt: Format, name: str, backend: Backend) -> torch.Tensor:
        """Memory for an fp32 value whose first word is `first`; `_launches` gets what fills it."""
        value = self._pool.empty(first)
        words = [first, *(self.original.state[p][key] for key in fmt.keys(name)[1:])]
        self._launches[backend].append(codec.decoded(fmt, words, value, name))
        return value

    # --- what holds parameters ------------------------------------------------------------------------------------

    def host(self) -> HostState:
        """The host objects that the step can reach, as they are now."""
        states = {f"optimizer.state[p{i}]": s for i, s in enumerate(self.optimizer.state.values()) if type(s) is dict}
        of_params = {f"an attribute of p{i}": vars(q) for i, q in enumerate(self.params.values()) if vars(q)}
        return HostState(self.base, self.optimizer, states | of_params)

    def ids(self) -> set[int]:
        """The ids of parameters, of their copies, and of the copies of states."""
        values = (x for of_param in self.given.values() for x in of_param.values())
        return set(map(id, (*self.params, *self.params.values(), *values)))

    def kept(self) -> Kept:
        """The tensors that the copy shares with the optimizer, as they are now."""
        ours = {k: v for k, v in vars(self.optimizer).items() if k not in NOT_COPIED and not k.startswith("_collage_")}
        of_params = [vars(q) for q in self.params.values() if vars(q)]
        return Kept([ours, self.optimizer.param_groups, self.optimizer.state, *of_params], self.ids())

    @contextmanager
    def in_place(self, host: HostState) -> Iterator[None]:
        """A context in which what holds a parameter, a group, the optimizer, an id or an address, holds the copies.

        `host` are the objects that can hold them when it begins.
        """
        own, other = self.original, self.optimizer
        pairs = [(own, other), (own.param_groups, other.param_groups), (own.state, other.state)]
        pairs += [*zip(own.param_groups, other.param_groups, strict=True), *self.params.items()]
        _exchange(host, pairs, self._addresses())
        yield
        _exchange(self.host(), [(y, x) for x, y in pairs], {y: x for x, y in self._addresses().items()})

    def _addresses(self) -> dict[int, int]:
        """The addresses of the parameters, and those of their copies."""
        found = {p.data_ptr(): q.data_ptr() for p, q in self.params.items() if p.numel() and q.numel()}
        return {x: y for x, y in found.items() if x and y}  # XLA has none

    def memories(self) -> set[int]:
        """The memory of the copies."""
        found = [x for values in self.given.values() for x in values.values()]
        found += [x for q in self.params.values() for x in (q, q.grad) if x is not None]
        return set(map(memory_of, found)) - {0}

    @cached_property
    def originals(self) -> Mapping[int, str]:
        """The memory of the parameters, gradients and words that the copies stand for, and what they are."""
        found: dict[int, str] = {}
        for p in self.params:
            state, given = self.original.state.get(p, {}), self.given.get(p, {})
            words = [k for k in state if k in given or k not in names_in(state).own]
            found |= {memory_of(state[k]): f"optimizer.state[p][{k!r}]" for k in words}
            found |= {memory_of(x): what for x, what in ((p, "a parameter"), (p.grad, "a gradient")) if x is not None}
        found.pop(0, None)
        return found


def _exchange(host: HostState, pairs: Sequence[tuple[Any, Any]], addresses: Mapping[int, int]) -> None:
    host.exchange({id(x): y for x, y in pairs}, {**{id(x): id(y) for x, y in pairs}, **addresses})
