"""The reference backend, which runs the explicit-rounding graph in PyTorch, operation by operation.

Every `round_to` is a real cast, so no rounding can be fused away: this backend is the oracle of the others, on any
device. It is itself checked against exact rationals and float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from collage_neuron.errors import ComputedOnHost, warn_user
from collage_neuron.numerics.block_formats import BLOCK, first_of_each, spread
from collage_neuron.numerics.formats import BY_ELEMENT
from collage_neuron.numerics.tensor_sums import RUN, RUNS, groups_of
from collage_neuron.passes.backends.by_parameter import ByParameter, Lowered, masked, write
from collage_neuron.passes.backends.inline import inlined
from collage_neuron.passes.backends.protocol import Backend, EveryDevice, Found, Launch, Measure
from collage_neuron.passes.backends.reference_rows import ReferenceRows, numbers, operands_of
from collage_neuron.passes.backends.staged import find, reductions_of, store_small
from collage_neuron.passes.backends.torch_neuron import narrows
from collage_neuron.passes.ir.update import Update

CHUNK = 1 << 16
"""Elements that the CPU updates at a time, so that the next operation finds the last result in the cache."""
assert CHUNK % (RUN * RUNS) == 0  # no group of runs is in two pieces


class GroupSums:
    """Sums groups of runs of a reduction's operands (`numerics.tensor_sums`), piece by piece on the CPU."""

    def __init__(self, part: Update) -> None:
        (stage,) = part.stages
        self._reductions, self._forward = reductions_of(stage), operands_of(stage)
        self._reads = [part.blocks.get(key, 0) for key in part.inputs]

    def __call__(self, components: Sequence[Tensor], scalars: Tensor) -> list[Tensor]:
        """For each result of the stage, the sums of groups of 64 runs of its terms, in row-major order."""
        length = components[self._reads.index(0)].shape[-1:].numel()
        flat = [c.detach().reshape(-1) for c in _spread(components, self._reads, length)]
        most = CHUNK if flat[0].device.type == "cpu" else max(flat[0].numel(), 1)
        pieces = zip(*(c.split(most) for c in flat), strict=True)
        found = [self._of_piece(piece, scalars) for piece in pieces]
        return [torch.cat(groups) for groups in zip(*found, strict=True)]

    def _of_piece(self, piece: Sequence[Tensor], scalars: Tensor) -> list[Tensor]:
        operands = self._forward(*piece, *scalars.unbind())
        return [groups_of(reduction, x) for reduction, x in zip(self._reductions, operands, strict=True)]


def _spread(components: Sequence[Tensor], blocks: Sequence[int], length: int) -> list[Tensor]:
    """The components with a word for each element of rows of this length."""
    return [spread(c, k, length) if k else c for c, k in zip(components, blocks, strict=True)]


class ReferenceUpdate:
    """Callable form of an update on the reference backend."""

    def __init__(self, update: Update) -> None:
        self._forward = inlined(update.graph).forward
        self._draws = update.draws
        self._elementwise, self._sums = len(update.outputs + update.wanted), len(update.sums)
        self._reads = [update.blocks.get(key, 0) for key in update.inputs]
        self._writes = [update.blocks.get(key, 0) for key in update.outputs]

    def __call__(self, components: Sequence[Tensor], scalars: Tensor) -> Sequence[Tensor]:
        """New components from the old ones and the fp32 scalar vector; words of blocks have a shape of their own.

        A measured update also returns its sums, added in float64, and its counts, in int64: a vector of each.
        """
        first = components[self._reads.index(0)]
        if not any(self._reads + self._writes):
            return self._in_pieces(components, first.numel(), CHUNK, scalars)
        length, block = first.shape[-1], max(self._reads + self._writes)
        most = max(CHUNK // block, 1) * block
        results = self._in_pieces(_spread(components, self._reads, length), length, most, scalars)
        stored = zip(results, self._writes, strict=False)
        return [*(first_of_each(r, k) if k else r for r, k in stored), *results[len(self._writes) :]]

    def _in_pieces(self, components: Sequence[Tensor], length: int, most: int, scalars: Tensor) -> Sequence[Tensor]:
        """The results for rows of `length` elements: on the CPU for some rows at a time, or `most` elements of one."""
        first = components[0]
        if first.device.type != "cpu" or first.numel() <= CHUNK:
            return self._run(components, scalars)
        height = max(CHUNK // length, 1)
        groups = zip(*(c.detach().reshape(-1, length).split(height) for c in components), strict=True)
        pieces = (piece for group in groups for piece in zip(*(c.split(most, dim=1) for c in group), strict=True))
        found, start = [], 0
        for piece in pieces:
            found.append(self._run(piece, scalars, start))
            start += piece[0].numel()
        results = list(zip(*found, strict=True))
        size = self._elementwise
        measures = [torch.stack(parts).sum(0) for parts in results[size:]]
        return [*(torch.cat([w.reshape(-1) for w in words]).view(first.shape) for words in results[:size]), *measures]

    def _run(self, components: Sequence[Tensor], scalars: Tensor, start: int = 0) -> Sequence[Tensor]:
        """The results for a piece of the parameter, whose first element has the index `start`."""
        index = [numbers(components[0], start)] if self._draws else []
        results: Sequence[Tensor] = self._forward(*components, *index, *scalars.unbind())
        if self._sums:
            end = self._elementwise
            middle = end + self._sums
            results = [*results[:end], torch.stack([*results[end:middle]]), torch.stack([*results[middle:]])]
        # An fp32 component that only moves (a state becomes another, or keeps the old parameter) comes back as itself:
        # the caller writes one result after the other, and must not find it overwritten.
        given = {id(c) for c in components}
        return [r.clone() if id(r) in given else r for r in results]


class Reference(ByParameter):
    """Runs the graph itself, on any device."""

    name = "reference"
    devices = EveryDevice()
    layouts = frozenset({BY_ELEMENT, f"block:{BLOCK}"})
    takes_rows = True
    measures = True
    draws = True
    reduces = True
    joins = True
    sees_as = True

    def lower(self, update: Update) -> Lowered:
        """A function that runs the graph, in pieces on the CPU."""
        return ReferenceUpdate(update)

    def run(self, launches: Sequence[Launch]) -> Sequence[Measure]:
        """Runs each launch, parameter by parameter."""
        if any(narrows(reads[0].device) for launch in launches for reads in launch.reads[:1]):
            return on_host(self, launches)
        # Of all parameters of a launch at once: processes send one message, as with any other backend.
        found = [find(x, self._sums_of) if x.update.between and x.is_taken else None for x in launches]
        return self.run_found(launches, found)

    def _sums_of(self, part: Launch, rows: Tensor) -> Sequence[Sequence[Tensor]]:
        sums = self.group_sums(part.update)
        return [sums(reads, row) for reads, row in zip(part.reads, rows, strict=True)]

    def run_found(self, launches: Sequence[Launch], before: Sequence[Found | None]) -> Sequence[Measure]:
        """The same if the stages before the last ones have been run, but for the launches that have None."""
        pairs = zip(launches, before, strict=True)
        return [measure for launch, found in pairs for measure in self.run_one(launch, found)]

    def run_one(self, launch: Launch, before: Found | None = None) -> list[Measure]:
        """The same, and the stages of an update that has some."""
        update, size = launch.update, len(launch.update.outputs)
        if not update.is_staged:
            return super().run_one(launch)
        measured = []
        for i, (reads, writes) in enumerate(zip(launch.reads, launch.writes, strict=True)):
            one = launch.part([i])._replace(reads=[masked(launch, reads)])
            if update.by_rows:
                results, found = self._rows(update).run(one)
            else:
                found = find(one, self._sums_of) if before is None else before.of(i)
                results = self.lowered(update.parts[-1])(one.reads[0], found.rows[0])
            write(one, writes, results[:size])
            store_small(one, found)
            measured += [Measure(*results[size:])] if update.sums else []
        return measured

    @cached_property
    def _made(self) -> WeakKeyDictionary[Update, Any]:
        return WeakKeyDictionary()

    def group_sums(self, part: Update) -> GroupSums:
        """What sums up the runs of a reduction stage, cached."""
        if part not in self._made:
            self._made[part] = GroupSums(part)
        sums: GroupSums = self._made[part]
        return sums

    def _rows(self, update: Update) -> ReferenceRows:
        if update not in self._made:
            self._made[update] = ReferenceRows(update, CHUNK)
        rows: ReferenceRows = self._made[update]
        return rows

    def is_exact_on(self, device: torch.device) -> bool:
        """Returns True where it runs on the CPU: there each operation of PyTorch rounds once. Others are probed."""
        return device.type == "cpu" or narrows(device)

    def found(self) -> Iterator[Callable[[], torch.device]]:
        """The CPU, and a GPU if there is one."""
        yield lambda: torch.device("cpu")
        if torch.cuda.is_available():
            yield lambda: torch.device("cuda")


# Devices without float64 and int64


def on_host(backend: Backend, launches: Sequence[Launch]) -> Sequence[Measure]:
    """What `backend` makes of the launches on the CPU, written to their own tensors: all components are copied there.

    For a device that has no float64 or int64 of its own, in which roots, sums and random bits are computed here, and
    that narrows them without a word (`torch_neuron.narrows`): it would compute other words.
    """
    _warn_of_host(launches[0].reads[0][0].device)
    here = [_moved(launch) for launch in launches]
    measures = backend.run(here) or ()
    for launch, own in zip(launches, here, strict=True):
        for written, computed in zip(launch.writes, own.writes, strict=True):
            for old, new in zip(written, computed, strict=True):
                old.copy_(new)
        for states, found in zip(launch.small, own.small, strict=True):
            for name, state in states.items():
                state.copy_(found[name])
    return measures


def _moved(launch: Launch) -> Launch:
    """The launch with all its tensors on the CPU; what is read and written is one tensor there too."""
    copies: dict[int, Tensor] = {}

    def here(x: Tensor) -> Tensor:
        return copies.setdefault(id(x), x.detach().cpu())

    reads, writes = ([[here(x) for x in row] for row in rows] for rows in (launch.reads, launch.writes))
    small = [{name: here(state) for name, state in states.items()} for states in launch.small]
    finite = None if launch.finite is None else launch.finite.cpu()
    return launch._replace(reads=reads, writes=writes, small=small, finite=finite, kept=None)


@cache
def _warn_of_host(device: torch.device) -> None:
    warn_user(
        f"what runs on the reference backend is computed on the CPU, and copied there and back: {device} takes float64 "
        "for fp32 and int64 for int32, and would compute other words. It is slow: prefer what backend='auto' has a "
        "kernel for (docs/trn2.md)",
        ComputedOnHost,
    )


BACKEND = Reference()
