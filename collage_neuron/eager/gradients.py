"""Presents gradients in fp32: the objects stay, as those of parameters do, and exchange what is inside them.

So a gradient is the same by every name that the step's code has for it. Gradients that lie in one buffer, with what the
optimizer holds of it, lie in one fp32 buffer during the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.eager.codec import bits
from collage_neuron.eager.memory import is_alone, memory_of, pool
from collage_neuron.states.sharding import ORDINARY, gradient, local, writable_gradient

Left = dict[int, torch.Tensor | None]
"""For each parameter the fp32 gradient that a step left."""


@dataclass(eq=False)
class Gradient:
    """A gradient, and the fp32 tensor that it presents."""

    owner: torch.Tensor
    """What is `p.grad` between steps."""
    shell: torch.Tensor
    """The fp32 tensor; while it is presented, what `owner` holds otherwise."""
    is_inside: bool
    """False if the object cannot exchange what is inside it: then `p.grad` is another one during the step."""


@dataclass(eq=False)
class Gradients:
    """The gradients of an optimizer's parameters during a step."""

    optimizer: Optimizer
    of: dict[int, Gradient] = field(default_factory=dict)
    """By the ids of the parameters that have one."""
    _buffers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Memory with several gradients, and the fp32 memory, both flat."""
    _others: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """What the optimizer holds of such memory."""

    def plan(self, params: Iterable[Any], held: Iterable[torch.Tensor]) -> None:
        """Makes the fp32 tensors; `held` are tensors that the optimizer holds, and that are no parameters or states."""
        self.of.clear()
        self._buffers, self._others = [], []
        given = [p for p in params if p.grad is not None]
        shared = [p for p in given if type(p.grad) in ORDINARY and not is_alone(p.grad)]
        inside = self._shared({id(p.grad): p.grad for p in shared}, held) if shared else {}
        for p in given:
            self.of[id(p)] = self._alone(p) if id(p.grad) not in inside else Gradient(p.grad, inside[id(p.grad)], True)
        alone = [p for p in given if id(p.grad) not in inside]
        torch_privates.copy_each([local(self.of[id(p)].shell) for p in alone], [gradient(p).detach() for p in alone])

    def _alone(self, p: Any) -> Gradient:
        shell = pool(self.optimizer).wide.get(p.grad) if pool(self.optimizer).wide else None
        if shell is None or shell.shape != p.shape:
            shell = pool(self.optimizer).empty(gradient(p))
        return Gradient(p.grad, shell, type(p.grad) in ORDINARY)

    def _shared(self, grads: Mapping[int, torch.Tensor], held: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The fp32 tensors of gradients that share a buffer with one another, or with what is held."""
        by_memory: dict[int, dict[int, torch.Tensor]] = {}
        for g in grads.values():
            by_memory.setdefault(memory_of(g), {})[id(g)] = g
        by_memory.pop(0, None)
        for x in held:
            if (alike := by_memory.get(memory_of(x))) is not None and x.dtype in {g.dtype for g in alike.values()}:
                alike[id(x)] = x
        inside = {}
        for found in by_memory.values():
            if len(found) > 1 and len({x.dtype for x in found.values()}) == 1:
                inside |= self._buffer(found)
        self._others = [(x, inside[id(x)]) for x in held if id(x) in inside and id(x) not in grads]
        return {key: x for key, x in inside.items() if key in grads}

    def _buffer(self, found: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        first = next(iter(found.values()))
        storage = first.untyped_storage()
        flat = torch.empty(0, dtype=first.dtype, device=first.device).set_(storage)  # type: ignore[call-overload]
        wide = flat.float()
        self._buffers.append((flat, wide))
        return {key: wide.as_strided(x.shape, x.stride(), x.storage_offset()) for key, x in found.items()}

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is exchanged."""
        yield from ((g.owner, g.shell) for g in self.of.values() if g.is_inside)
        yield from self._others

    def present(self, params: Iterable[Any]) -> None:
        """Sets `p.grad`, after the exchange."""
        for p in params:
            found = self.of.get(id(p))
            p.grad = None if found is None else found.owner if found.is_inside else found.shell

    def take(self, params: Iterable[Any]) -> Left:
        """What the step left as `p.grad`, which is none then; before the exchange back."""
        shells = {id(g.owner): g.shell for g in self.of.values() if g.is_inside}
        left: Left = {}
        for p in params:
            grad, p.grad = p.grad, None
            left[id(p)] = grad if grad is None else shells.get(id(grad), grad)
        return left

    def are_as_given(self, params: Iterable[Any]) -> bool:
        """Returns True if the step has neither written nor exchanged a gradient; asked while they are presented."""
        for p in params:
            found = self.of.get(id(p))
            if found is None:
                if p.grad is not None:
                    return False
                continue
            wide, own = (found.owner, found.shell) if found.is_inside else (found.shell, found.owner)
            if p.grad is not (found.owner if found.is_inside else found.shell):
                return False
            if not torch.equal(bits(local(wide)), bits(local(own).float())):
                return False
        return True

    @torch.no_grad()
    def write(self, p: Any, left: torch.Tensor | None) -> None:
        """The gradient after the step: a loop that does not clear it accumulates into it."""
        if left is None or p.grad is None:
            p.grad = None if left is None else left.detach().to(p.dtype)
        elif p.device.type == "xla" or not _is_same(local(left), local(p.grad)):
            # On XLA only the host could tell whether it was changed; rounding an unchanged one changes nothing.
            writable_gradient(p).copy_(local(left))

    @torch.no_grad()
    def write_buffers(self) -> None:
        """Writes what the step left in buffers with several gradients."""
        for flat, wide in self._buffers:
            if not _is_same(wide, flat):
                flat.copy_(wide)

    def keep(self) -> None:
        """Keeps the memory of gradients that something refers to: the next step presents them there."""
        kept = [(g.owner, g.shell) for g in self.of.values() if not is_alone(g.shell)]
        wide = pool(self.optimizer).wide
        if wide or kept:
            wide.clear()
            wide.update({owner: shell for owner, shell in kept if memory_of(shell)})


def _is_same(wide: torch.Tensor, own: torch.Tensor) -> bool:
    return torch.equal(bits(wide.to(own.dtype)), bits(own))
