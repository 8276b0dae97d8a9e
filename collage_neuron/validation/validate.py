"""Translation validation: checks the rewritten update against the optimizer's own `step()` before a step.

At steps 1, 2, 4, 8, ... and whenever the update was not validated before, a sample of a parameter of every job is
stepped twice: by the rewritten update, and by the step's own calls on fp32 copies. If the results differ by more than
the formats and the arithmetic round, the step is not taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import TranslationError
from collage_neuron.numerics.eft import block_max
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.underflow import SMALL, leading, rounding
from collage_neuron.runtime import nonfinite
from collage_neuron.states import word_encoding
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import gradient, local
from collage_neuron.validation import arrived, sample
from collage_neuron.validation.perturbed_replay import NoSample, expected
from collage_neuron.validation.sample import Expected, Sample

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job
    from collage_neuron.trace.replay_validation import Calls

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
        places = torch.unravel_index(self.taken.plan.index.reshape(-1)[i], local(self.param).shape)
        return str([int(n) for n in places])

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
    # Words of blocks are expanded, and a view as bytes needs strides of its own.
    copies = (t.clone(memory_format=torch.contiguous_format) for t in (x, y))
    return torch.equal(*(t.view(torch.int8) if t.dim() else t for t in copies))


# When, and of what

T = TypeVar("T")
Take = Callable[[Optimizer, list["Job"], Tensor | None], Any]
"""A function that runs jobs of an optimizer as the step does, including the stores, if all gradients are finite."""

JOBS, GROUPS = 2, 8
"""The number of jobs of one group with the same update that are validated at a time; of groups with the same one."""


@dataclass
class History:
    """The history of validation of an optimizer."""

    steps: int = 0
    due: int = 1
    """The next step that is to be validated."""
    known: set[Any] = field(default_factory=set)
    """Recorded updates that were validated, with their backends; a copy validates its own."""
    compared: int = 0
    left_out: int = 0
    """Numbers of values that were compared, and of values whose result depends on rounding (`Expected.unsure`)."""
    not_covered: int = 0
    """Number of jobs for which no sample could be made."""

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out updates, which are objects of this process: a copy of the optimizer validates its first step."""
        return {**vars(self), "known": set()}


def history_of(optimizer: Optimizer) -> History:
    """The history of `optimizer`; an empty one if it has none yet."""
    ours = bookkeeping(optimizer)
    if ours.validated is None:
        ours.validated = History()
    found: History = ours.validated
    return found


def check(
    base: type[Optimizer],
    optimizer: Optimizer,
    jobs: Sequence[Job],
    take: Take,
    again: Callable[[Job], Calls],
    known: set[Any] | None = None,
) -> None:
    """Validates the step that `jobs` are about to take, if that is due, or one of their updates is not `known`.

    These are those of the optimizer's history, unless others are given.

    Raises:
        TranslationError: a value is further off than rounding explains; nothing has been changed.
    """
    history = history_of(optimizer)
    steps, known = history.steps + 1, history.known if known is None else known
    is_new = not known.issuperset(map(_launched_by, jobs))
    if (is_new or is_due(steps)) and all(map(_may_be_run, {p.device for job in jobs for p in job.params})):
        for job in list(chosen(jobs, steps, lambda job: _launched_by(job) not in known)):
            validate_job(base, optimizer, job, take, again(job), steps)
        known.update(map(_launched_by, jobs))
    history.steps = steps
    if steps >= history.due:
        history.due = steps + 1 if is_due(steps + 1) else 1 << steps.bit_length()


def _may_be_run(device: torch.device) -> bool:
    """Returns False where every result is zero, and where torch_xla runs nothing (`torch_xla.compile`'s full graph)."""
    if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY"):
        return False
    return device.type != "xla" or torch_privates.may_run_on_xla()


_launched_by = attrgetter("update", "backend")


def is_due(steps: int) -> bool:
    """Returns True at steps 1, 2, 4, 8, ..."""
    return steps & (steps - 1) == 0


def _key(job: Job) -> Any:
    return (
        job.recording.captured.text,
        str(job.update.formats.keys()),
        job.backend.name,
        job.params[0].dtype,
        type(job.params[0]),
    )


def chosen(jobs: Sequence[Job], steps: int, is_new: Callable[[Job], bool]) -> Iterator[Job]:
    """The jobs to validate in a step: if it is due, or they are new, a few of those alike, different ones each time."""
    due, turn = is_due(steps), steps.bit_length()
    alike: dict[Any, dict[int, list[Job]]] = {}
    for job in jobs:
        on = job.settings.validate == "on" and any(p.numel() for p in job.params)
        if on and (due or is_new(job)):
            alike.setdefault((_key(job), job.settings), {}).setdefault(id(job.group), []).append(job)
    for of_groups in alike.values():
        for of_one_group in _in_turn([*of_groups.values()], GROUPS, turn):
            yield from _in_turn(of_one_group, JOBS, turn)


def _in_turn(items: Sequence[T], most: int, turn: int) -> Sequence[T]:
    """At most so many of the items; over the turns all of them."""
    first = turn * (most if len(items) > most else 1) % len(items)
    return [*items[first:], *items[:first]][:most]


def validate_job(base: type[Optimizer], optimizer: Optimizer, job: Job, take: Take, again: Calls, steps: int) -> None:
    """Compares what a job does to a sample of one of its parameters with the same step, taken `again` in fp32."""
    history = history_of(optimizer)
    params = [p for p in job.params if p.numel()]
    p = params[steps.bit_length() % len(params)]
    job = job.of_param(p)
    taken = _sample(optimizer, job, p, steps, again)
    if taken is None:
        history.not_covered += 1
        return
    if not taken.grad.numel():  # a shard without elements
        return
    twin = again.in_fp32(p, taken, torch.Generator().manual_seed(steps))
    try:
        wanted = expected(twin)
    except NoSample:
        history.not_covered += 1
        return
    before = {name: taken.components(name) for name in taken.formats}
    skips = job.settings.nonfinite == "skip"
    with job.backend.apart():
        take(taken.optimizer, [taken.job], nonfinite.all_finite([taken.param]) if skips else None)
        sample.fetch(taken)
    found = Found(base, optimizer, p, taken, before, wanted, steps)
    compared, left_out = found.compare()
    if compared:
        arrived.look(found, job)
    history.compared, history.left_out = history.compared + compared, history.left_out + left_out


def _sample(optimizer: Optimizer, job: Job, p: torch.nn.Parameter, steps: int, again: Calls) -> Sample | None:
    turn = steps.bit_length()
    if p.device.type in sample.DEVICES:
        planned = again.plan(job, p, torch.arange(sample.SIZE, dtype=torch.int64, device="cpu"))
        of_steps = partial(again.states, job, p)
        return None if planned is None else sample.draw(optimizer, job, p, planned, turn, of_steps)
    grad = gradient(p).detach()  # under tensor parallelism all processes add it up, with elements or without
    planned = again.plan(job, p, sample.spread(grad, turn))
    return None if planned is None else sample.take(optimizer, job, p, grad, planned)
