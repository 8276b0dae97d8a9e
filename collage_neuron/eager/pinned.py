"""Fp32 memory of parameters and states that something still refers to, between steps and in the middle of one.

What refers to it may write it then, and other code may write the words: elements of either count when the value is
presented again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from collage_neuron.eager.memory import are_alone, is_alone
from collage_neuron.states.bookkeeping import Pin, bookkeeping
from collage_neuron.states.sharding import local
from collage_neuron.states.shared_memory import memory_of

if TYPE_CHECKING:
    from collage_neuron.eager.codec import Value

Decode = Callable[[Sequence["Value"], Sequence[torch.Tensor]], None]
"""Writes the values to the tensors."""


class Pinned:
    """The memory of the values of one presentation."""

    def __init__(self) -> None:
        self._in_step: dict[torch.Tensor, Pin] | None = None
        """The pins of before other code ran in the middle of the step."""
        self._begun: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Fp32 tensors, with the memory and the elements that they had when the step began, or went on."""

    def among(self, optimizer: Optimizer, values: Iterable[Value]) -> list[tuple[Value, Pin]]:
        """Those of `values` that have memory which was pinned."""
        pins, self._in_step = bookkeeping(optimizer).pins if self._in_step is None else self._in_step, None
        found = [(v, pins.get(v.owner)) for v in values] if pins else []
        return [(v, pin) for v, pin in found if pin is not None and pin.shell is v.shell]

    def fill(self, found: Iterable[tuple[Value, Pin]], decode: Decode) -> None:
        """Fills this memory."""
        self._begun.clear()
        for v, pin in found:
            own = local(v.shell).detach()
            now = torch.empty_like(own)
            decode([v], [now])
            # Where the words were written they count: of an element written in both it is not known which was last.
            is_kept = now.view(torch.int32) == pin.value.view(torch.int32)
            self._begun.append((local(v.shell), own, torch.where(is_kept, own, now)))
            own.copy_(self._begun[-1][-1])

    @torch.no_grad()
    def restore(self) -> None:
        """Undoes what the step has done to it."""
        for shell, own, elements in self._begun:
            shell.data = own  # the step may have given it other memory
            own.copy_(elements)

    def keep(self, optimizer: Optimizer, values: Sequence[Value], decode: Decode, is_over: bool) -> None:
        """Keeps that of `values` that are in states, as stored: for the next step, or for this one if not `is_over`."""
        self._begun.clear()  # which refers to it too
        held: list[Value] = []
        if not are_alone([v.shell for v in values]):
            there = {id(x) for v in values for x in (v.p, *(dict.get(optimizer.state, v.p) or {}).values())}
            held = [v for v in values if id(v.owner) in there and not is_alone(v.shell)]
        decode(held, [local(v.shell) for v in held])
        # What refers to the memory finds what was stored; its copy tells whether somebody writes there.
        pins = {v.owner: Pin(v.shell, local(v.shell.detach()).clone(), memory_of(v.owner)) for v in held}
        if is_over:
            bookkeeping(optimizer).pins = pins
        else:
            self._in_step = pins
