"""Lays out a step for the driver, or takes the layout of an earlier one, where only addresses and numbers differ."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import add, is_

from torch import Tensor

from collage_neuron.passes.backends.native.driver import JOB
from collage_neuron.passes.backends.native.jobs import Group, Kernels, Step
from collage_neuron.passes.backends.native.memory import share_memory
from collage_neuron.passes.backends.protocol import Launch

Taken = list[tuple[int, Launch]]
"""The launches of a step that are not skipped, with their numbers."""


@dataclass(frozen=True, eq=False)
class Laid:
    """A step as it was laid out, for later ones whose tensors differ in nothing but values and addresses."""

    numbers: list[int]
    others: list[object]
    """`Launch.kept` of the launches after the first, in which this is kept."""
    apart: list[bool]
    """For each group, whether words lie apart."""
    addresses: list[int]
    bytes: list[int]
    """For each tensor the length of its memory."""
    step: Step
    """Without tensors."""

    def again(self, taken: Taken, groups: Sequence[Group]) -> Step | None:
        """The step for these launches; None if they are of other tensors, or share memory now."""
        if [i for i, _ in taken] != self.numbers or not all(
            map(is_, self.others, (launch.kept for _, launch in taken[1:]))
        ):
            return None
        slots = [group.slots() for group in groups]
        if [apart for apart, _ in slots] != self.apart:
            return None
        addresses = [*map(Tensor.data_ptr, chain.from_iterable(tensors for _, tensors in slots))]
        if addresses != self.addresses and not self._move(addresses):
            return None
        # The vectors of numbers are new in each step; all else of a job is as it was.
        self.step.jobs[JOB.index("scalars") :: len(JOB)] = array("q", chain.from_iterable(g.scalars for g in groups))
        return replace(self.step, changed=list(chain.from_iterable(group.writes for group in groups)))

    def _move(self, addresses: list[int]) -> bool:
        """Replaces the addresses, to which the jobs refer; False, and nothing is replaced, if memory is shared.

        Or if a tensor that is not empty has none.
        """
        if addresses.count(0) != self.bytes.count(0):  # only empty tensors have none
            return False
        if share_memory(addresses, list(map(add, addresses, self.bytes)), self.step.written):
            return False
        self.addresses[:] = addresses
        first = 0
        for rows in self.step.rows:
            rows[:] = array("q", addresses[first : first + len(rows)])
            first += len(rows)
        return True


def lay_out(launches: Sequence[Launch], kernels: Kernels) -> Step | None:
    """The step, without launches to be skipped.

    None if the reference has to take it all: parameters share memory, so that their order matters, or a tensor is not
    plainly in memory.
    """
    taken = [(i, x) for i, x in enumerate(launches) if x.reads and (x.finite is None or bool(x.finite))]
    groups: list[Group] = []
    for i, launch in taken:
        if not groups or groups[-1].update is not launch.update:
            groups.append(Group(launch.update, kernels.of(launch.update)))
        groups[-1].add(i, launch)
    kept = taken[0][1].kept if taken else None
    laid: Laid | None = None if kept is None else kept.get(kernels)
    again = None if laid is None else laid.again(taken, groups)
    if again is not None:
        return again
    step = Step()
    if not all(step.add(group) for group in groups) or step.shares_memory():
        return None
    are_whole = len(step.rows) == len(groups) and not step.left and not step.kept  # no parameter was taken alone
    if kept is not None and are_whole and all(launch.kept is not None for _, launch in taken):
        kept[kernels] = _laid(taken, groups, step)
    return step


def _laid(taken: Taken, groups: Sequence[Group], step: Step) -> Laid:
    others: list[object] = [launch.kept for _, launch in taken[1:]]
    apart = [group.slots()[0] for group in groups]
    lengths = [end - begin for begin, end in zip(step.begins, step.ends, strict=True)]
    without = replace(step, changed=[])
    return Laid([i for i, _ in taken], others, apart, list(step.begins), lengths, without)
