"""Presents gradients in fp32: `p.grad` is an fp32 tensor in a step, and its object of before has the same memory then.

So a gradient is the same by every name that the step's code has for it, and what the code keeps of it stays fp32.
Gradients that lie in one buffer, with what the optimizer holds of it, lie in one fp32 buffer during the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.eager.memory import Pool, are_alone, bits, is_alone, pool
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states.sharding import ORDINARY, gradient, is_sharded, local, writable_gradient
from collage_neuron.states.shared_memory import common_base, first_shared, memory_of, same_part

if TYPE_CHECKING:
    from collage_neuron.trace.step_kinds import Placeholders

Left = dict[int, torch.Tensor | None]
"""For each parameter the fp32 gradient that a step left."""

Parts = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Tensors that lie in a buffer, by their ids, with the fp32 tensors that they present."""


@dataclass(eq=False, slots=True)
class Gradient:
    """A gradient, and the fp32 tensor that it presents."""

    owner: torch.Tensor
    """What is `p.grad` between steps."""
    wide: torch.Tensor
    """What is `p.grad` during one."""


@dataclass(eq=False)
class Gradients:
    """The gradients of an optimizer's parameters during a step."""

    optimizer: Optimizer
    of: dict[int, Gradient] = field(default_factory=dict)
    """By the ids of the parameters that have one."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """What is exchanged: objects of gradients, and of what the optimizer holds of their memory, with fp32 tensors."""
    _buffers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Parts of memory with several gradients, and of the fp32 memory."""
    are_single: bool = True
    """True if no gradient has elements of another one, of a parameter or a state, or memory that the optimizer holds.

    Nor is one of a class of its own. Views of one buffer, as DDP makes them, are single: what is written to one is not
    in another.
    """
    are_as_before: bool = False
    """True if gradients that wait are of the same parameters as in the last step, and lie as theirs did."""
    _made: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """The placeholders of the last step."""
    _in_buffers: Collection[int] = ()
    """The ids of gradients that lie there."""
    _before: list[torch.Tensor] = field(default_factory=list)
    """What has the memory that each gradient had before."""
    _versions: list[int] = field(default_factory=list)
    """Their versions when gradients were presented."""

    def plan(
        self,
        params: Iterable[Any],
        held: Sequence[torch.Tensor],
        owners: Sequence[torch.Tensor],
        waiting: Placeholders | None = None,
    ) -> None:
        """Makes the fp32 tensors; `owners` are parameters and states, `held` others of the optimizer.

        With `waiting`, the tensors are its placeholders, and get their values from `compute`.
        """
        both = [(p, g) for p in params if (g := p.grad) is not None]
        given, grads, shared = [p for p, _ in both], [g for _, g in both], dict[int, torch.Tensor]()
        if not are_alone(grads):
            shared = {id(g): g for g in grads if type(g) in ORDINARY and _is_shared(g)}
        self.pairs, self._buffers = [], []
        memory = pool(self.optimizer)
        known = memory.wide
        for key in [key for key, (owner, wide) in known.items() if owner() is None or wide() is None]:
            del known[key]
        is_met = bool(shared) and _meet(list(shared.values()), [*owners, *held])
        are_known = ORDINARY.issuperset(map(type, grads)) or all(type(g) in ORDINARY or is_sharded(g) for g in grads)
        self.are_single = are_known and not (is_met or known) and len({*map(id, grads)}) == len(given)
        if waiting is not None:
            self._plan_waiting(given, grads, waiting)
            return
        inside = _parts_held(grads, held)
        shared |= inside
        parts = self._parts(shared, held, inside) if shared else {}
        self._in_buffers = parts.keys()
        self.of = {}
        alone: dict[int, tuple[Any, Any, torch.Tensor]] = {}
        for p, grad in zip(given, grads, strict=True):
            wide = self._wide(grad, memory, parts)
            self.of[id(p)] = Gradient(grad, wide)
            known[id(grad)] = weakref.ref(grad), weakref.ref(wide)
            if id(grad) not in parts:
                alone[id(grad)] = p, grad, wide
        torch_privates.copy_each(
            [local(wide) for *_, wide in alone.values()], [gradient(p) for p, *_ in alone.values()]
        )
        # A second object over the memory: `p.grad` becomes `wide`, and the object that was `p.grad` has this inside.
        self.pairs += [(grad, wide.detach()) for _, grad, wide in alone.values()]
        self.pairs += [(x, wide.detach()) for x, wide in parts.values()]

    def _plan_waiting(self, given: Sequence[Any], grads: Sequence[Any], waiting: Placeholders) -> None:
        self._in_buffers = ()
        made = waiting.gradients(given)
        self.are_as_before, self._made = made is self._made, made
        wide, others = zip(*made, strict=True) if made else ((), ())
        self.of = dict(zip(map(id, given), map(Gradient, grads, wide), strict=True))
        self.pairs = list(zip(grads, others, strict=True))

    def check_apart(self) -> None:
        """Raises UnsupportedUpdate for gradients that have elements of one another, and are not in one buffer."""
        grads = list({id(g.owner): g.owner for g in self.of.values()}.values())
        if not are_alone(grads) and first_shared([g for g in grads if id(g) not in self._in_buffers]):
            raise UnsupportedUpdate(
                "a gradient and another gradient share memory, and each has fp32 memory of its own during the step, so "
                "that what is written to the one would not be seen in the other; clone() it"
            )

    def let_go(self) -> None:
        """Keeps no gradient."""
        self.of, self.pairs, self._before, self._versions = {}, [], [], []

    def exchanged(self) -> list[Gradient]:
        """The gradients whose objects present fp32 tensors too."""
        done = {id(own) for own, _ in self.pairs}
        return [g for g in self.of.values() if id(g.owner) in done]

    def compute(self, waiting: Placeholders) -> None:
        """Gives gradients that wait memory and their values, while they are presented."""
        self._made = []
        inside = {id(owner): other for owner, other in self.pairs}
        owners = [torch_privates.part(inside.get(id(g.owner), g.owner)) for g in self.of.values()]
        made = [pool(self.optimizer).empty(own) for own in owners]
        torch_privates.copy_each(made, owners)
        for g, into in zip(self.of.values(), made, strict=True):
            if id(g.owner) in inside:
                waiting.give(torch_privates.part(g.owner), into.detach())
            waiting.give(torch_privates.part(g.wide), into)
            pool(self.optimizer).wide[id(g.owner)] = weakref.ref(g.owner), weakref.ref(g.wide)

    def sources(self) -> dict[int, torch.Tensor]:
        """What has the values of those that wait, by the ids of these: for whoever copies it."""
        inside = {id(owner): other for owner, other in self.pairs}
        return {id(g.wide): inside.get(id(g.owner), g.owner) for g in self.of.values()}

    def _wide(self, grad: torch.Tensor, memory: Pool, parts: Parts) -> torch.Tensor:
        """The fp32 tensor of a gradient: that of the last step, if something refers to it."""
        if id(grad) in parts:
            return parts[id(grad)][1]
        if parts and id(part := torch_privates.part(grad)) in parts:
            made: torch.Tensor = torch_privates.sharded_like(parts[id(part)][1], grad)
            return made
        known = memory.wide.get(id(grad))
        found = known[1]() if known is not None and known[0]() is grad else None
        return memory.empty(grad) if found is None or found.shape != grad.shape else found

    def _parts(self, grads: Mapping[int, torch.Tensor], held: Iterable[torch.Tensor], inside: Collection[int]) -> Parts:
        """Gradients that share a buffer with one another or with what is held, and this, with their fp32 tensors.

        What is `inside` DTensors is held.
        """
        by_memory: dict[int, dict[int, torch.Tensor]] = {}
        for g in grads.values():
            by_memory.setdefault(memory_of(g), {})[id(g)] = g
        by_memory.pop(0, None)
        for x in held:
            by_memory.get(memory_of(x), {})[id(x)] = x
        parts: Parts = {}
        for found in by_memory.values():
            is_shared = len(found) > 1 or not found.keys().isdisjoint(inside)
            if is_shared and len({x.dtype for x in found.values()}) == 1:
                parts |= self._buffer(found)
        return parts

    def _buffer(self, found: Mapping[int, torch.Tensor]) -> Parts:
        first = next(iter(found.values()))
        on_xla = first.device.type == "xla"
        flat = _base_on_xla(found.values()) if on_xla else first.new_empty(0).set_(first.untyped_storage())
        known = pool(self.optimizer).buffers
        before, wide = known.get(memory_of(first), (flat, None))
        if wide is None or before.dtype != flat.dtype or before.numel() != flat.numel():
            wide = torch.empty_like(flat, dtype=torch.float32)
        wide.copy_(flat)
        known[memory_of(first)] = flat, wide
        parts = {key: (x, cast(torch.Tensor, same_part(x, flat, wide))) for key, x in found.items()}
        # not of what is presented, whose insides are exchanged: of the same memory
        self._buffers += [(x.detach(), w.detach()) for x, w in parts.values()]
        return parts

    def enter(self, waiting: Placeholders | None) -> None:
        """Exchanges what is inside the objects; one that something in C++ refers to weakly stays as it is."""
        self.pairs = self._exchanged()
        if waiting is not None:
            waiting.present(self.pairs)
        inside = {id(own): other for own, other in self.pairs}
        # Those of inference mode have no versions, and torch communicates in parts of DTensors.
        before = [inside.get(id(g.owner), g.owner) for g in self.of.values()]
        if not ORDINARY.issuperset(map(type, before)):
            before = [local(x) for x in before if not is_sharded(x)]
        self._before = list(filterfalse(torch.Tensor.is_inference, before))
        self._versions = list(map(torch_privates.version, self._before))

    def _exchanged(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The pairs that torch exchanges; most often these are all."""
        try:
            if ORDINARY.issuperset(type(own) for own, _ in self.pairs):
                torch_privates.exchange_all(self.pairs)
                return self.pairs
        except RuntimeError:  # something in C++ refers weakly to one of them; none is exchanged
            pass
        done = []
        for own, other in self.pairs:
            with suppress(RuntimeError):
                torch_privates.exchange(own, other)
                done.append((own, other))
        return done

    def leave(self, waiting: Placeholders | None = None) -> None:
        """Exchanges it back."""
        if waiting is not None:
            waiting.withdraw(self.pairs)
        are_ordinary = ORDINARY.issuperset(type(own) for own, _ in self.pairs)
        exchange = torch_privates.exchange_each if are_ordinary else torch_privates.exchange_shards
        exchange(reversed(self.pairs))

    def present(self, params: Iterable[Any]) -> None:
        """Sets `p.grad`, after the exchange."""
        for p in params:
            found = self.of.get(id(p))
            wide = None if found is None else found.wide
            if found is not None and vars(found.owner):
                vars(found.wide).update(torch_privates.attributes(found.owner))
            if p.grad is not wide:
                p.grad = wide

    def check_written(self) -> None:
        """Raises UnsupportedUpdate if the step has written the memory that a gradient had before."""
        # What the optimizer holds of that memory presents fp32 too. What only somebody else holds of it does not.
        if list(map(torch_privates.version, self._before)) != self._versions:
            raise UnsupportedUpdate(
                "step() writes to the memory of a gradient by another name than p.grad, which does not see it (a "
                "flat buffer that another object holds); write to p.grad, or let an attribute of the optimizer hold it"
            )

    def check_given(self, params: Iterable[Any], dtypes: Mapping[int, torch.dtype]) -> None:
        """Raises UnsupportedUpdate if the step gives a parameter, of these `dtypes`, a part of a held tensor."""
        for p in params:
            own, g = self.of.get(id(p)), p.grad
            # After the step such a gradient is one of another type, in memory of its own: the tensor would not see it.
            is_new = g is not None and (own is None or g is not own.wide) and dtypes[id(p)] != torch.float32
            if is_new and _is_part_of_held(g):
                raise UnsupportedUpdate(
                    "step() gives a parameter a gradient that is a part of a tensor which something holds, and would "
                    "be in other memory after the step; do so before the step, or clone() the gradient"
                )

    def are_presented(self, params: Iterable[Any]) -> bool:
        """Returns True if no other object is `p.grad`."""
        return all(p.grad is (None if (found := self.of.get(id(p))) is None else found.wide) for p in params)

    def take(self, params: Iterable[Any]) -> Left:
        """What the step left as `p.grad`, which is none then; before the exchange back."""
        left: Left = {}
        for p in params:
            left[id(p)], p.grad = p.grad, None
        return left

    def are_as_given(self, params: Iterable[Any]) -> bool:
        """Returns True if the step has neither written nor exchanged a gradient; asked while they are presented."""
        before = {id(owner): inside for owner, inside in self.pairs}
        for p in params:
            found = self.of.get(id(p))
            if p.grad is not (None if found is None else found.wide):
                return False
            if found is None:
                continue
            own = before.get(id(found.owner), found.owner)
            if not torch.equal(bits(local(found.wide)), bits(local(own).float())):
                return False
        return True

    @torch.no_grad()
    def write(self, left: Left, params: Iterable[Any]) -> None:
        """The gradients after the step: a loop that does not clear them accumulates into them."""
        for flat, wide in self._buffers:
            if flat.device.type == "xla" or not _are_same([(wide, flat)]):
                flat.copy_(wide)
        both: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        small: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        for p in params:
            given, found = self.of.get(id(p)), left[id(p)]
            if given is not None:  # its own object has what was written to it, if it is not `p.grad` any more too
                own, x = given.owner, local(given.wide)
                (small if x.numel() <= SMALL and x.is_cpu else both).append((p, own, x))
            if found is not (None if given is None else given.wide):
                p.grad = None if found is None else found.detach().to(p.dtype)
        if not _are_same([(x, local(own)) for _, own, x in small]):  # one comparison for all: most are unchanged
            both += small
        for p, own, x in both:
            # On XLA only the host could tell whether it was changed; rounding an unchanged one changes nothing.
            if p.device.type == "xla" or not _are_same([(x, local(own))]):
                (writable_gradient(p) if p.grad is own else local(own)).copy_(x)

    def keep(self) -> None:
        """Keeps fp32 tensors of which something has the memory, for as long as their gradients are there."""
        self.pairs, self._before, self._versions = [], [], []
        known = pool(self.optimizer).wide
        for g in self.of.values() if not are_alone([g.wide for g in self.of.values()]) else ():
            if id(g.owner) not in self._in_buffers and not is_alone(g.wide):
                known[id(g.owner)] = weakref.ref(g.owner), _giving(g.wide)


def _base_on_xla(found: Collection[torch.Tensor]) -> torch.Tensor:
    """What all are views of, and whose views tell where they lie, as no address does on XLA."""
    base = common_base(found)
    if base is None or {base.dtype} != {x.dtype for x in found}:
        raise UnsupportedUpdate(
            "gradients lie in one memory, with one another or with what the optimizer holds, and are not views of one "
            "tensor, so that nothing tells where on an XLA device: clone() them"
        )
    return base


def _parts_held(grads: Iterable[torch.Tensor], held: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The parts of gradients that are DTensors, by their ids, if something that is held lies in their memory."""
    parts = [torch_privates.part(g) for g in grads if type(g) not in ORDINARY and is_sharded(g)]
    memories = set(map(memory_of, held)) if parts else set()
    return {id(x): x for x in parts if memory_of(x) in memories}


def _meet(grads: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Returns True if gradients have elements in common, or if one is in the memory of other tensors."""
    memories = set(map(memory_of, grads))
    return any(memory_of(x) in memories for x in others) or first_shared(grads) is not None


def _is_part_of_held(g: torch.Tensor) -> bool:
    """Returns True for a part of a larger tensor whose object somebody has."""
    larger = [x for x in (torch_privates.base_of(g),) if x is not None and x.numel() > g.numel()]
    return any(n > 2 for n in torch_privates.references(larger))  # two are the list's and the call's


def _is_shared(g: torch.Tensor) -> bool:
    return memory_of(g) != 0 and not is_alone(g)


def _giving(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: x  # a lambda in the loop would give the last tensor of the loop


SMALL = 1 << 12
"""Elements of gradients that are compared together."""


def _are_same(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Returns True if each first tensor, rounded, has the bits of the second one."""
    by_type: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for wide, own in pairs:
        by_type.setdefault(own.dtype, []).append((wide, own))
    return all(
        torch.equal(bits(joined([x for x, _ in alike]).to(dtype)), bits(joined([x for _, x in alike])))
        for dtype, alike in by_type.items()
    )


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The elements of all, of one dtype."""
    return tensors[0] if len(tensors) == 1 else torch_privates.flattened(tensors)
