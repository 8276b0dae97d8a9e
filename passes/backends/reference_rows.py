"""The reference backend for updates with reductions over rows or columns: some rows at a time on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.numerics.matrix_sums import DOWN, ENDINGS, down_columns, view_of
from collage_neuron.numerics.tensor_sums import run_sums, terms_of
from collage_neuron.passes.backends.by_rows import Reduced, Values, find, results_of
from collage_neuron.passes.backends.inline import inlined
from collage_neuron.passes.backends.protocol import Found, Launch
from collage_neuron.passes.ir.stage import REDUCTION, Stage
from collage_neuron.passes.ir.update import Update


class Piece(NamedTuple):
    """Some whole rows of a parameter: of several matrices, or of one."""

    first: int
    """The number of the first element."""
    is_next: bool
    """True if it continues the matrix of the piece before."""
    components: Sequence[Tensor]
    values: Sequence[Tensor]


def pieces_of(components: Sequence[Tensor], values: Sequence[Tensor], most: int) -> Iterator[Piece]:
    """Pieces of about `most` elements on the CPU; one of several of the same matrix has whole runs of rows."""
    most = most if components[0].device.type == "cpu" else max(components[0].numel(), 1)
    matrices, rows, columns = view = view_of(components[0].shape)
    shaped = [c.detach().reshape(view) for c in components]
    size = rows * columns
    several = max(most // max(size, 1), 1)
    height = max(rows, 1) if size <= most else max(most // columns // DOWN, 1) * DOWN
    for b in range(0, max(matrices, 1), several):
        for r in range(0, max(rows, 1), height):
            at = slice(b, b + several), slice(r, r + height)
            own = [v if not v.dim() else v[at[0]] if v.shape[1] == 1 else v[at] for v in values]
            yield Piece(b * size + r * columns, r > 0, [c[at] for c in shaped], own)


def operands_of(stage: Stage) -> Callable[..., Sequence[Tensor]]:
    """Computes what the results of a reduction add up, from what its body is given."""
    body = fx.Graph()
    results: Any = body.graph_copy(stage.body, {})
    body.output(tuple(node.args[0] for node in results))
    return inlined(fx.GraphModule(torch.nn.Module(), body)).forward


def _joined(pieces: Sequence[Tensor], are_next: Sequence[bool]) -> Tensor:
    """Results of pieces as one tensor: of rows of the same matrix one under another, of others one after another."""
    matrices: list[list[Tensor]] = []
    for piece, is_next in zip(pieces, are_next, strict=True):
        if not is_next:
            matrices.append([])
        matrices[-1].append(piece)
    return torch.cat([torch.cat(parts, dim=1) for parts in matrices])


class RowSums:
    """Sums the runs of a reduction's operands (`by_rows.SumRuns`)."""

    def __init__(self, part: Update, most: int) -> None:
        (stage,) = part.stages
        self._results, self._most, self._stage = results_of(stage), most, stage
        self._forward = operands_of(stage)

    def __call__(self, components: Sequence[Tensor], scalars: Tensor, values: Values) -> list[Tensor]:
        """For each result the sums of the runs of its terms."""
        read = [values[name] for name in self._stage.numbers]
        pieces = list(pieces_of(components, read, self._most))
        found = [self._of_piece(piece, scalars) for piece in pieces]
        return [_joined(runs, [piece.is_next for piece in pieces]) for runs in zip(*found, strict=True)]

    def _of_piece(self, piece: Piece, scalars: Tensor) -> list[Tensor]:
        operands = self._forward(*piece.components, *scalars.unbind(), *piece.values)
        return [_runs(r, x) for r, x in zip(self._results, operands, strict=True)]


def _runs(result: Reduced, x: Tensor) -> Tensor:
    add: Callable[[Tensor], Tensor] = down_columns if result.by_columns else run_sums
    return add(terms_of(ENDINGS[result.operation], x))


class ReferenceRows:
    """Callable form of such an update on the reference backend."""

    def __init__(self, update: Update, most: int) -> None:
        self._update, self._most, last = update, most, update.parts[-1]
        self.sums = {part: RowSums(part, most) for part in update.parts if part.stages[0].kind == REDUCTION}
        self._forward = inlined(last.graph).forward
        self._stored, self._numbers = len(update.outputs), last.stages[0].numbers

    def run(self, launch: Launch) -> tuple[Sequence[Tensor], Found]:
        """The results for the one parameter of a launch, and what the stages before the last have found.

        Sums and counts are vectors.
        """
        (components,), scalars = launch.reads, launch.vector.to(launch.reads[0][0].device)
        values, found = find(launch, lambda part, read, known: self.sums[part](read[0], scalars, known))
        read = [values[name] for name in self._numbers]
        pieces = [self._of_piece(x, scalars) for x in pieces_of(components, read, self._most)]
        results = list(zip(*pieces, strict=True))
        shape = components[0].shape
        stored = [torch.cat([x.reshape(-1) for x in of_one]).view(shape) for of_one in results[: self._stored]]
        measured, middle = [torch.stack(x).sum(0) for x in results[self._stored :]], len(self._update.sums)
        parts = measured[:middle], measured[middle:]
        return [*stored, *(torch.stack([*x]) for x in parts if middle)], found

    def _of_piece(self, piece: Piece, scalars: Tensor) -> Sequence[Tensor]:
        like = piece.components[0]
        index = [numbers(like, piece.first)] if self._update.draws else []
        found: Sequence[Tensor] = self._forward(*piece.components, *index, *scalars.unbind(), *piece.values)
        return [x.expand(like.shape) if i < self._stored else x for i, x in enumerate(found)]


def numbers(like: Tensor, first: int) -> Tensor:
    """The indices of the elements of `like` in row-major order, from `first`, as int32 (modulo 2**32)."""
    every = torch.arange(first, first + like.numel(), dtype=torch.int64, device=like.device)
    return every.to(torch.int32).view(like.shape)
