"""The reference backend, which runs the explicit-rounding graph in PyTorch, operation by operation.

Every `round_to` is a real cast, so no rounding can be fused away: this backend is the oracle of the others, on any
device. It is itself checked against exact rationals and float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.errors import ComputedOnHost, warn_user
from collage_neuron.numerics.block_formats import BLOCK, first_of_each, spread
from collage_neuron.numerics.formats import BY_ELEMENT
from collage_neuron.numerics.reductions import (
    DOWN,
    ENDINGS,
    RUN,
    RUNS,
    down_columns,
    groups_of,
    run_sums,
    terms_of,
    view_of,
)
from collage_neuron.passes.backends import protocol, staged
from collage_neuron.passes.backends.protocol import ByParameter, Found, Launch, Lowered, Measure
from collage_neuron.passes.backends.torch_neuron import narrows
from collage_neuron.passes.ir.stage import Stage, rearranged
from collage_neuron.passes.ir.update import Update

T = TypeVar("T")

CHUNK = 1 << 16
"""Elements that the CPU updates at a time, so that the next operation finds the last result in the cache."""
assert CHUNK % (RUN * RUNS) == 0  # no group of runs is in two pieces


class Piece(NamedTuple):
    """Some consecutive elements of a parameter: where rows count, whole rows of several matrices, or of one."""

    first: int
    """The number of the first element."""
    components: Sequence[Tensor]
    values: Sequence[Tensor] = ()
    """Those of its rows, columns and matrices that are read."""
    is_next: bool = False
    """True if it continues the matrix of the piece before."""


def elements_of(components: Sequence[Tensor], length: int, block: int) -> Iterator[Piece]:
    """Pieces on the CPU of some rows of `length` elements, or of whole blocks of one; elsewhere all in one."""
    first, start = components[0], 0
    if first.device.type != "cpu" or first.numel() <= CHUNK:
        yield Piece(0, components)
        return
    height, most = max(CHUNK // length, 1), max(CHUNK // block, 1) * block
    for group in zip(*(c.detach().reshape(-1, length).split(height) for c in components), strict=True):
        for piece in zip(*(c.split(most, dim=1) for c in group), strict=True):
            yield Piece(start, piece)
            start += piece[0].numel()


def rows_of(components: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[Piece]:
    """Pieces of about `CHUNK` elements on the CPU; one of several of the same matrix has whole runs of rows."""
    most = CHUNK if components[0].device.type == "cpu" else max(components[0].numel(), 1)
    matrices, rows, columns = view = view_of(components[0].shape)
    shaped = [c.detach().reshape(view) for c in components]
    size = rows * columns
    several = max(most // max(size, 1), 1)
    # Sums of columns are added in runs of 64 rows, none of which may be in two pieces.
    height = max(rows, 1) if size <= most else max(most // columns // DOWN, 1) * DOWN
    for b in range(0, max(matrices, 1), several):
        for r in range(0, max(rows, 1), height):
            at = slice(b, b + several), slice(r, r + height)
            own = [v if not v.dim() else v[at[0]] if v.shape[1] == 1 else v[at] for v in values]
            yield Piece(b * size + r * columns, [c[at] for c in shaped], own, r > 0)


def numbers(like: Tensor, first: int) -> Tensor:
    """The indices of the elements of `like` in row-major order, from `first`, as int32 (modulo 2**32)."""
    # Counted in int64, since a parameter may have more elements than int32 counts; the conversion wraps.
    every = torch.arange(first, first + like.numel(), dtype=torch.int64, device=like.device)
    return every.to(torch.int32).view(like.shape)


def operands_of(stage: Stage) -> Callable[..., Sequence[Tensor]]:
    """Computes what the results of a reduction add up, from what its body is given."""
    body = rearranged(stage.body, (), (node.all_input_nodes[0] for node in stage.results))
    return fx.GraphModule(torch.nn.Module(), body).forward


class GroupSums:
    """Sums groups of runs of a reduction's operands (`numerics.reductions`), piece by piece on the CPU."""

    def __init__(self, part: Update) -> None:
        (stage,) = part.stages
        self._reductions, self._forward = staged.reductions_of(stage), operands_of(stage)
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


class RowSums:
    """Sums the runs of a reduction's operands over rows or columns (`staged.SumRuns`), some rows at a time."""

    def __init__(self, part: Update) -> None:
        (self._stage,) = part.stages
        self._results, self._forward = staged.results_of(self._stage), operands_of(self._stage)

    def __call__(self, components: Sequence[Tensor], scalars: Tensor, values: staged.Values) -> list[Tensor]:
        """For each result the sums of the runs of its terms."""
        pieces = list(rows_of(components, [values[name] for name in self._stage.numbers]))
        found = [self._of_piece(piece, scalars) for piece in pieces]
        return [_one_after_another(runs, [piece.is_next for piece in pieces]) for runs in zip(*found, strict=True)]

    def _of_piece(self, piece: Piece, scalars: Tensor) -> list[Tensor]:
        operands = self._forward(*piece.components, *scalars.unbind(), *piece.values)
        return [_runs(r, x) for r, x in zip(self._results, operands, strict=True)]


def _runs(result: staged.Reduced, x: Tensor) -> Tensor:
    add: Callable[[Tensor], Tensor] = down_columns if result.by_columns else run_sums
    return add(terms_of(ENDINGS[result.operation], x))


def _one_after_another(pieces: Sequence[Tensor], are_next: Sequence[bool]) -> Tensor:
    """Results of pieces as one tensor: of rows of the same matrix one under another, of others one after another."""
    matrices: list[list[Tensor]] = []
    for piece, is_next in zip(pieces, are_next, strict=True):
        if not is_next:
            matrices.append([])
        matrices[-1].append(piece)
    return torch.cat([torch.cat(parts, dim=1) for parts in matrices])


class ReferenceUpdate:
    """Callable form of an elementwise stage on the reference backend."""

    def __init__(self, update: Update) -> None:
        self._forward = update.graph.forward
        self._draws = update.draws
        self._elementwise, self._sums = len(update.outputs + update.wanted), len(update.sums)
        self._reads = [update.blocks.get(key, 0) for key in update.inputs]
        self._writes = [update.blocks.get(key, 0) for key in update.outputs]

    def __call__(
        self, components: Sequence[Tensor], scalars: Tensor, values: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor]:
        """New components from the old ones and the fp32 scalar vector; words of blocks have a shape of their own.

        `values` are those of rows, columns and matrices that it reads; None if rows do not count. A measured update
        also returns its sums, added in float64, and its counts, in int64: a vector of each.
        """
        first = components[self._reads.index(0)]
        if values is not None:
            return self._in_pieces(rows_of(components, values), first.shape, scalars, by_rows=True)
        if not any(self._reads + self._writes):
            return self._in_pieces(elements_of(components, first.numel(), 1), first.shape, scalars)
        length, block = first.shape[-1], max(self._reads + self._writes)
        pieces = elements_of(_spread(components, self._reads, length), length, block)
        results = self._in_pieces(pieces, first.shape, scalars)
        stored = zip(results, self._writes, strict=False)
        return [*(first_of_each(r, k) if k else r for r, k in stored), *results[len(self._writes) :]]

    def _in_pieces(
        self, pieces: Iterable[Piece], shape: Sequence[int], scalars: Tensor, by_rows: bool = False
    ) -> Sequence[Tensor]:
        results = list(zip(*(self._run(piece, scalars) for piece in pieces), strict=True))
        size, middle = self._elementwise, self._elementwise + self._sums
        measured = [[torch.stack(of_pieces) for of_pieces in results[i:j]] for i, j in ((size, middle), (middle, None))]
        # One by one or side by side, torch adds in different orders.
        added = [torch.stack([x.sum(0) for x in xs]) if by_rows else torch.stack(xs, 1).sum(0) for xs in measured if xs]
        return [*(_whole(words, shape) for words in results[:size]), *added]

    def _run(self, piece: Piece, scalars: Tensor) -> Sequence[Tensor]:
        """The results for a piece of the parameter."""
        like, size = piece.components[0], self._elementwise
        index = [numbers(like, piece.first)] if self._draws else []
        found: Sequence[Tensor] = self._forward(*piece.components, *index, *scalars.unbind(), *piece.values)
        # An fp32 component that only moves (a state becomes another, or keeps the old parameter) comes back as itself:
        # the caller writes one result after the other, and must not find it overwritten.
        given = {id(c) for c in piece.components}
        results = [x.clone() if id(x) in given else x for x in found[:size]]
        return [*(x if x.shape == like.shape else x.expand(like.shape) for x in results), *found[size:]]


def _whole(words: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Results of pieces, one after another."""
    return words[0].reshape(shape) if len(words) == 1 else torch.cat([w.reshape(-1) for w in words]).view(*shape)


class Reference(ByParameter):
    """Runs the graph itself, on any device."""

    name = "reference"
    devices = protocol.EveryDevice()
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
        found = [staged.find(x, self._sums_of) if x.update.between and x.is_taken else None for x in launches]
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
            one = launch.part([i])._replace(reads=[launch.masked(reads)])
            if update.by_rows:
                results, found = self._by_rows(one)
            else:
                found = staged.find(one, self._sums_of) if before is None else before.of(i)
                results = self.lowered(update.parts[-1])(one.reads[0], found.rows[0])
            one.write(writes, results[:size])
            staged.store_small(one, found)
            measured += [Measure(*results[size:])] if update.sums else []
        return measured

    def _by_rows(self, one: Launch) -> tuple[Sequence[Tensor], Found]:
        """The results for the one parameter of a launch, and what the stages before the last have found."""
        (components,), last = one.reads, one.update.parts[-1]
        scalars = one.vector.to(components[0].device)

        def sums(part: Update, reads: Sequence[Sequence[Tensor]], known: staged.Values) -> Sequence[Tensor]:
            return self._of(part, RowSums)(reads[0], scalars, known)

        values, found = staged.find_by_rows(one, sums)
        return self._of(last, ReferenceUpdate)(components, scalars, [values[n] for n in last.stages[0].numbers]), found

    @cached_property
    def _made(self) -> WeakKeyDictionary[Update, Any]:
        return WeakKeyDictionary()

    def group_sums(self, part: Update) -> GroupSums:
        """What sums up the runs of a reduction stage, cached."""
        return self._of(part, GroupSums)

    def _of(self, part: Update, make: Callable[[Update], T]) -> T:
        if part not in self._made:
            self._made[part] = make(part)
        made: T = self._made[part]
        return made

    def is_exact_on(self, device: torch.device) -> bool:
        """Returns True where it runs on the CPU: there each operation of PyTorch rounds once. Others are probed."""
        return device.type == "cpu" or narrows(device)

    def found(self) -> Iterator[Callable[[], torch.device]]:
        """The CPU, and a GPU if there is one."""
        yield lambda: torch.device("cpu")
        if torch.cuda.is_available():
            yield lambda: torch.device("cuda")


# Devices without float64 and int64


def on_host(backend: protocol.Backend, launches: Sequence[Launch]) -> Sequence[Measure]:
    """Copies all components to the CPU, runs the launches on `backend` there, and copies the results back."""
    # Roots, sums and random bits are computed in float64 and int64. A device without these, which narrows them without
    # a word (`torch_neuron.narrows`), would compute other words.
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
