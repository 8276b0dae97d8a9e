"""Presents fp32 values: the objects of parameters and states stay, and exchange what is inside them.

While they are presented, the object of a parameter, or of a state in words, has an fp32 tensor inside, and its `shell`
has the first word. So identities, dictionary keys, hooks and what autograd knows of a parameter stay. What the step
keeps (`p.data` in a list) refers to the fp32 memory, which is presented in the next step too, as long as something
does.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.eager import codec
from collage_neuron.eager.codec import bits
from collage_neuron.eager.memory import pool
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import Format
from collage_neuron.passes.backends.protocol import Backend, Launch
from collage_neuron.settings import Settings
from collage_neuron.states import kept_formats
from collage_neuron.states.bookkeeping import Pin, bookkeeping
from collage_neuron.states.names import names_in
from collage_neuron.states.sharding import gradient, local, version
from collage_neuron.states.store import is_idle, kept_format
from collage_neuron.states.values import values_in


@dataclass(eq=False)
class Value:
    """A parameter or a state in words, and the fp32 tensor that it presents."""

    p: torch.Tensor
    name: str
    owner: torch.Tensor
    """The object: the parameter, or what is in its state."""
    fmt: Format
    further: list[torch.Tensor]
    """All words but the first one."""
    shell: torch.Tensor
    """The fp32 tensor; while it is presented, the first word."""

    def words(self) -> list[torch.Tensor]:
        """All words, while they are not presented."""
        return [local(x) for x in (self.owner.detach(), *self.further)]


@dataclass(eq=False)
class Presentation:
    """The values of an optimizer during one step, or one call of a method."""

    optimizer: Optimizer
    kind: str = "step"
    is_on: bool = False
    values: list[Value] = field(default_factory=list)
    groups: dict[int, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    """The parameters and their groups, by the id of the parameter."""
    grads: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = field(default_factory=dict)
    """For each parameter its gradient, and the fp32 one that it presents."""
    _shells: dict[int, torch.Tensor] = field(default_factory=dict)
    _aliases: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    # --- before the step ------------------------------------------------------------------------------------------

    def plan(self) -> set[int]:
        """Finds the values and fills fp32 tensors with them; returns the ids of their objects and words."""
        launches: dict[Backend, list[Launch]] = defaultdict(list)
        self.values, self.groups, self._aliases = [], {}, []
        known: set[int] = set()
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in self.groups:
                    self.groups[id(p)] = p, group
                    backend = codec.converter(Settings.of(group).backend, p.device)
                    launches[backend] += self._plan(p, known)
        for backend, each in launches.items():
            codec.run(backend, each)
        return known

    def _plan(self, p: Any, known: set[int]) -> Iterator[Launch]:
        state, record = dict.get(self.optimizer.state, p), kept_formats.of(self.optimizer, p)
        state = state if isinstance(state, dict) else {}
        as_made = bookkeeping(self.optimizer).as_made
        others = as_made.get(p, ()) if as_made else ()
        names = (k for k in values_in(state, p, record) if k not in others and is_in_words(state, k, record))
        for name in ("param", *names):
            owner, fmt = p if name == "param" else state[name], kept_format(p, state, name, record)
            further = [state[key] for key in fmt.keys(name)[1:]]
            if id(owner) not in known:  # one object may have two names
                value = Value(p, name, owner, fmt, further, self._shell(owner))
                self.values.append(value)
                known |= {id(owner), *map(id, further)}
                yield from self._filling(value)

    def _shell(self, owner: torch.Tensor) -> torch.Tensor:
        """Memory for the value: in a step the same each time it is presented, since variables may refer to it."""
        pins = bookkeeping(self.optimizer).pins
        shell = self._shells.get(id(owner))
        if shell is None and pins and owner in pins:
            shell = pins[owner].shell
        if shell is None or shell.shape != owner.shape:
            shell = pool(self.optimizer).shell(owner)
        self._shells[id(owner)] = shell
        return shell

    def _filling(self, value: Value) -> Iterator[Launch]:
        pins = bookkeeping(self.optimizer).pins
        pin = pins.get(value.owner) if pins else None
        if pin is None or pin.shell is not value.shell:
            yield codec.decoded(value.fmt, value.words(), local(value.shell), value.name)
            return
        # What still refers to the memory may have written it: that counts, unless the words were written since.
        backend, now = converter_of(self.groups, value.p), torch.empty_like(local(value.shell))
        codec.run(backend, [codec.decoded(value.fmt, value.words(), now, value.name)])
        if version(value.owner) != pin.version or torch.equal(bits(local(value.shell)), bits(pin.value)):
            local(value.shell).copy_(now)

    def alias(self, tensors: Iterable[torch.Tensor]) -> None:
        """Finds those of `tensors`, which the optimizer holds, that lie in the memory of first words.

        Raises:
            UnsupportedUpdate: one is more than a part of a first word.
        """
        memories = {memory_of(v.owner): v for v in self.values if not is_alone(v.owner)}
        memories.pop(0, None)
        for x in tensors if memories else ():
            value = memories.get(memory_of(x))
            if value is not None and x.numel():
                self._aliases.append((x, _part(value, x)))

    def enter(self) -> None:
        """Presents the values that were planned."""
        for p, _ in self.groups.values():
            self.grads[id(p)] = p.grad, self._wide(p)
            state = dict.get(self.optimizer.state, p)
            if isinstance(state, dict):
                self._put_aside(p, state)
        for v in self.values:
            if v.shell.requires_grad != v.owner.requires_grad:
                v.shell.requires_grad_(v.owner.requires_grad)
        self._exchange()
        self.is_on = True
        for p, _ in self.groups.values():
            p.grad = self.grads[id(p)][1]

    def _exchange(self) -> None:
        done: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for own, shell in self._pairs():
                torch_privates.exchange(own, shell)
                done.append((own, shell))
        except RuntimeError as error:
            for own, shell in reversed(done):
                torch_privates.exchange(own, shell)
            raise UnsupportedUpdate(
                f"something in C++ refers weakly to a parameter or a state, which then cannot be fp32 ({error})"
            ) from error

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [*((v.owner, v.shell) for v in self.values), *self._aliases]

    def _put_aside(self, p: torch.Tensor, state: Any) -> None:
        """Takes the further words out of a state; and a state of nothing else out of the optimizer."""
        if is_idle(state):
            del self.optimizer.state[p]
            return
        names = names_in(state)
        for key in [key for key in state if key not in names.own]:
            del state[key]

    def _wide(self, p: Any) -> torch.Tensor | None:
        if p.grad is None:
            return None
        wide = pool(self.optimizer).wide
        own, known = gradient(p), wide.get(p.grad)
        found = None if known is None else known()
        if found is None or found.shape != p.shape:
            found = pool(self.optimizer).empty(own)
            wide[p.grad] = weakref.ref(found)
        local(found).copy_(own.detach())
        return found

    def gradients_are_as_given(self) -> bool:
        """Returns True if the step has neither written nor exchanged a gradient; asked while values are presented."""
        pairs = ((p.grad, *self.grads[id(p)]) for p, _ in self.groups.values())
        return all(
            now is wide and (own is None or wide is None or torch.equal(bits(local(wide)), bits(local(own).float())))
            for now, own, wide in pairs
        )

    # --- after it -------------------------------------------------------------------------------------------------

    def leave(self) -> dict[int, tuple[torch.Tensor | None, bool]]:
        """Puts the words back; returns for each parameter its fp32 gradient, and whether it requires one."""
        left = {}
        for p, _ in self.groups.values():
            left[id(p)] = p.grad, p.requires_grad
            p.grad = None
        for own, shell in reversed(self._pairs()):
            torch_privates.exchange(own, shell)
        self.is_on = False
        return left

    def pin(self) -> None:
        """Keeps the memory of values that something still refers to, and lets go of the rest."""
        pins = bookkeeping(self.optimizer).pins
        pins.clear()
        for v in self.values:
            if not is_alone(v.shell):
                codec.run(converter_of(self.groups, v.p), [codec.decoded(v.fmt, v.words(), local(v.shell), v.name)])
                pins[v.owner] = Pin(v.shell, local(v.shell.detach()).clone(), version(v.owner))

    def clear(self) -> None:
        """Lets go of all tensors."""
        for each in (self.values, self.grads, self._shells, self._aliases):
            each.clear()


def is_in_words(state: Mapping[str, Any], name: str, record: Mapping[str, str]) -> bool:
    """Returns True for a state that is stored in a format: others are as they were made."""
    return name in record or name in names_in(state).watched or state[name].dtype == torch.bfloat16


def converter_of(groups: Mapping[int, tuple[Any, dict[str, Any]]], p: torch.Tensor) -> Backend:
    """The backend that converts for a parameter."""
    return codec.converter(Settings.of(groups[id(p)][1]).backend, p.device)


def memory_of(t: torch.Tensor) -> int:
    """A number of the memory in which `t` lies; 0 if it has none of its own."""
    t = local(t)
    if t.layout is not torch.strided or t.is_meta:
        return 0
    try:
        return torch_privates.storage_id(t.untyped_storage())
    except (RuntimeError, NotImplementedError):  # a wrapper, such as what torch_xla makes on the CPU
        return 0


def is_alone(t: torch.Tensor) -> bool:
    """Returns True if nothing else refers to the memory of `t`."""
    return memory_of(t) != 0 and torch_privates.holders(local(t)) <= 1


def _part(value: Value, x: torch.Tensor) -> torch.Tensor:
    """The part of the fp32 tensor that lies where `x` lies in the first word."""
    shell, owner = local(value.shell).detach(), local(value.owner.detach())
    first = x.storage_offset() - owner.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    span = sum((n - 1) * s for n, s in zip(owner.shape, owner.stride(), strict=True))
    if x.dtype != owner.dtype or shell.stride() != owner.stride() or first < 0 or last > span:
        raise UnsupportedUpdate(
            f"the optimizer holds a tensor of shape {list(x.shape)} that lies in the memory of "
            f"{'a parameter' if value.name == 'param' else f'the state {value.name!r}'} and beyond it, or in another "
            "type, and during a step that value has fp32 memory of its own: hold a clone(), or the parameter itself; "
            "nothing was updated"
        )
    return shell.as_strided(x.shape, x.stride(), shell.storage_offset() + first)
