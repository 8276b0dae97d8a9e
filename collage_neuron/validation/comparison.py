"""Compares the result of a compiled step on a sample with that of the user's own step in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.errors import TranslationError
from collage_neuron.numerics.eft import block_max
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.rounding import SMALL, leading, rounding
from collage_neuron.states import word_encoding
from collage_neuron.states.sharding import local
from collage_neuron.validation.sample import Expected, Sample

if TYPE_CHECKING:
    from collage_neuron.validation.perturbed_replay import InFp32

MOVES, FAR = 2.0**-14, 2.0**-4
"""Smallest relative change per step, and smallest eventual change, of a state that counts as moving in fp32."""
LARGE = 2.0**127
"""Beyond this a value may round to infinity."""


@dataclass
class Found:
    """The results of both steps for a sample."""

    base: type[Optimizer]
    optimizer: Optimizer
    param: torch.nn.Parameter
    taken: Sample
    before: Mapping[str, Sequence[Tensor]]
    """The components of each value before the step."""
    wanted: Expected
    twin: InFp32
    steps: int

    def compare(self) -> tuple[int, int]:
        """Raises if the results differ; returns the number of values compared, and the number left out."""
        if self.taken.job.settings.nonfinite == "skip" and not bool(self.taken.grad.isfinite().all()):
            for name, components in self.before.items():
                now = self.taken.components(name)
                if not all(map(_same_bits, components, now)):
                    self._fail(f"{name} changes in a step that is skipped because a gradient is not finite")
            return 0, 0
        counts = [self._compare_values(name, fmt) for name, fmt in self.taken.formats.items()]
        return sum(n for n, _ in counts), sum(n for _, n in counts)

    def _compare_values(self, name: str, fmt: Format) -> tuple[int, int]:
        components = self.taken.components(name)
        ours, theirs = word_encoding.decode(fmt, components, name).float(), self.wanted.values[name]
        size = torch.maximum(ours.abs(), theirs.abs())
        bound = self.wanted.bounds[name] + rounding(fmt, size)
        overflowed, lost = self.wanted.overflowed, self._lost()
        if name in self.taken.small:  # it depends on many elements
            overflowed, lost = overflowed.any(), lost.any()
        else:  # a state may have its elements in another shape
            overflowed, lost = overflowed.reshape(ours.shape), lost.reshape(ours.shape)
        left_out = self.wanted.unsure[name] | overflowed | (theirs.abs() >= LARGE)
        left_out = left_out | self._spoiled(name, fmt, ours)
        finite = ours.isfinite() & theirs.isfinite()
        # A value that was infinite before is not compared: its result (inf - x * x) depends on fused operations.
        one_alone = (ours.isfinite() != theirs.isfinite()) & ~(lost & theirs.isfinite())
        wrong = ~left_out & torch.where(finite, (ours - theirs).abs() > bound, one_alone)
        if wrong.any():
            i = int(wrong.reshape(-1).to(torch.int8).argmax())
            self._fail_at(name, i, ours, theirs, bound, int(wrong.sum()))
        lead = leading(fmt) if len(fmt.components) > 1 else None
        if lead is not None:
            off = (components[0].float() - ours).abs() > lead * ours.abs() + SMALL
            off &= finite & (ours.abs() < LARGE)
            if off.any():
                i = int(off.reshape(-1).to(torch.int8).argmax())
                first, value = (float(x.reshape(-1)[i]) for x in (components[0], ours))
                self._fail(f"the first word of {name}{self._place(i)} is {first:.9g}, and its value is {value:.9g}")
        return int((~left_out).sum()), int(left_out.sum())

    def still(self, name: str, fmt: Format) -> tuple[int, int]:
        """How many elements of a state fp32 moves and are far from their target, and how many of them stay."""
        old, now = (
            word_encoding.decode(fmt, c, name).float() for c in (self.before[name], self.taken.components(name))
        )
        change = self.wanted.values[name] - old
        moves = (change.abs() > MOVES * old.abs()) & (old != 0) & change.isfinite()
        if not (moves & (now == old)).any():
            return 0, 0
        # An average moves toward its target by the same fraction of the distance each time: two steps give the target.
        again = self.twin.after(2)[name] - self.wanted.values[name]
        distance = change.square() / (change - again).abs()
        moves &= ~(distance < FAR * old.abs())
        return int(moves.sum()), int((moves & (now == old)).sum())

    def _lost(self) -> Tensor:
        """The mask of elements whose value before the step, or whose gradient, is not finite."""
        lost = ~self.taken.grad.isfinite()
        for name, components in self.before.items():
            for component in word_encoding.of_each(self.taken.formats[name], components):
                missing = ~component.float().isfinite()  # PyTorch does not ask an fp8 number
                lost = lost | (missing.any() if name in self.taken.small else missing.reshape(lost.shape))
        return lost

    def _spoiled(self, name: str, fmt: Format, ours: Tensor) -> Tensor:
        """The mask of elements in blocks with one that may not be finite: such a block holds nothing that is.

        These are blocks of the sample, whose elements lie far apart in the parameter.
        """
        blocks = [c.block for c in fmt.components if c.block]
        if not blocks:
            return torch.zeros(ours.shape, dtype=torch.bool, device="cpu")
        doubtful = self.wanted.overflowed | (self.wanted.unsure[name] & ~ours.isfinite())
        largest: Tensor = block_max(torch.where(doubtful, torch.inf, self.wanted.values[name]), blocks[0])
        return ~(largest < LARGE)

    def _fail_at(self, name: str, i: int, ours: Tensor, theirs: Tensor, bound: Tensor, count: int) -> None:
        x, y, b = (float(t.reshape(-1)[i]) for t in (ours, theirs, bound))
        place = "" if name in self.taken.small else self._place(i)
        self._fail(
            f"{name}{place} becomes {x:.9g}, and {y:.9g} by step() in fp32; rounding explains {b:.3g} "
            f"({count} of {ours.numel()} elements tried are further apart than that)"
        )

    def _place(self, i: int) -> str:
        """The indices of element `i` of the sample in the (local) parameter."""
        if self.taken.is_drawn:
            return f" of a parameter with drawn values (gradient {float(self.taken.grad.reshape(-1)[i]):.9g})"
        n, places = int(self.taken.plan.index.reshape(-1)[i]), []
        for d in reversed(local(self.param).shape):
            places.append(n % d)
            n //= d
        return str(list(reversed(places)))

    def _fail(self, what: str) -> None:
        groups = self.optimizer.param_groups
        i, j = next((i, j) for i, g in enumerate(groups) for j, q in enumerate(g["params"]) if q is self.param)
        raise TranslationError(
            f"step {self.steps} (since compiling or loading) of {self.base.__name__} was not taken, and nothing was "
            f"updated: the compiled update is not what its own step() does to param_groups[{i}]['params'][{j}] "
            f"(shape {list(self.param.shape)}): {what}. {self._reasons()}"
        )

    def _reasons(self) -> str:
        wrong = "he rewritten update is wrong, or the step depends on something that a recording does not see"
        report = "please report it with the optimizer's code"
        if (backend := self.taken.job.backend).domains:
            domains = backend.advised(backend.domains, self.param.device)
            return f"{domains}. If they are inside, t{wrong}: {report}"
        return (
            f'T{wrong}: {report}; to train without this check, compile with validate="off", or leave the optimizer '
            "uncompiled"
        )


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Returns True if all bits are equal. Words of blocks are expanded, so their strides are not those of bytes."""
    copies = (t.clone(memory_format=torch.contiguous_format) for t in (x, y))
    return torch.equal(*(t.view(torch.int8) if t.dim() else t for t in copies))
