"""The native backend: all updates of a step as machine code, in place, in one pass over memory, on torch's threads.

Updates with reductions need a pass for each reduction stage before (`reduction_kernels`).

A parameter, or a whole step, for which there is no such code is updated by the reference backend: tensors that share
memory with one another, that are written and have elements which share memory, of a subclass with operations of its
own, or whose update has an operation or a dtype without a rule.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from collage_neuron import torch_privates
from collage_neuron.numerics.reductions import RUNS, folded_over
from collage_neuron.passes.backends.native.driver import JOB
from collage_neuron.passes.backends.native.jobs import Place, Step, lay_out
from collage_neuron.passes.backends.native.kernel import Kernels
from collage_neuron.passes.backends.native.machine import Machine, Target, Team, loaded_libgomp, missing_here
from collage_neuron.passes.backends.native.memory import in_memory
from collage_neuron.passes.backends.native.reduction_kernels import runs_of, write_runs
from collage_neuron.passes.backends.native.reductions import nothing_of, run_by_rows
from collage_neuron.passes.backends.protocol import Backend, Found, Launch, Measure
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE
from collage_neuron.passes.backends.staged import find, store_small

ALONE = 1 << 15
"""Elements up to which one thread is faster than several, which have to be woken."""


class Engine:
    """Machine code and the threads that run it."""

    def __init__(self, target: Target | None = None) -> None:
        path = loaded_libgomp()
        if path is None:
            raise ValueError("no libgomp is loaded")
        self.team = Team(path)
        self.machine = Machine(self.team.symbols(), target)
        self.kernels = Kernels(self.machine)
        self._nothing = torch.zeros(1, 0, self.machine.target.width, dtype=torch.float64, device="cpu")
        self._share = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(self.machine.share)

    def run(self, step: Step) -> Tensor:
        """Runs the jobs of a step; the measurements: one row for each thread, a vector for each measure."""
        threads = self.team.threads() if step.elements > ALONE else 1
        stride = step.measures * self.machine.target.width
        measures = self._nothing
        if step.measures:
            # A row for each thread: none adds to what another one writes.
            measures = torch.zeros(threads, step.measures, self.machine.target.width, dtype=torch.float64, device="cpu")
        jobs = len(step.jobs) // len(JOB)
        context = array("q", [jobs, step.work, measures.data_ptr(), stride, step.jobs.buffer_info()[0]])
        if threads == 1:
            self._share(context.buffer_info()[0], 0, 1)
        else:
            self.team.run(self.machine.team, context.buffer_info()[0], threads)
        return measures


class Native(Backend):
    """Runs updates on the CPU."""

    name = "native"
    devices = ("cpu",)
    takes_rows = True
    measures = True
    draws = True
    reduces = True
    joins = True
    sees_as = True
    layouts = REFERENCE.layouts
    counts_first = True

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._lock = threading.Lock()

    @property
    def engine(self) -> Engine:
        """The machine code of this process, and its threads."""
        with self._lock:  # one for all threads: the code of another one would be freed while it runs
            self._engine = self._engine or Engine()  # made when it is first needed, not when this file is imported
            return self._engine

    def missing(self) -> str | None:
        """Why there is no native code in this process; None if there is."""
        if loaded_libgomp() is None:
            return "torch has not loaded libgomp, on whose threads the code would run"
        return missing_here()

    @cached_property
    def _missing(self) -> str | None:
        return self.missing()

    def suits(self, device: torch.device) -> bool:
        """Returns True for the CPU, if this process can make code for it."""
        return device.type == "cpu" and self._missing is None

    def prepare(self, device: torch.device) -> None:
        """Raises ValueError if there is no native code here."""
        super().prepare(device)
        if self._missing is not None:
            raise ValueError(f"backend='native' cannot run here: {self._missing}; use backend='auto'")

    def found(self) -> Iterator[Callable[[], torch.device]]:
        """The CPU, if this process can make code for it."""
        if self._missing is None:
            yield lambda: torch.device("cpu")

    def run(self, launches: Sequence[Launch]) -> Sequence[Measure]:
        """Runs all launches as one piece of work, and what there is no code for on the reference backend."""
        if not any(x.update.is_staged for x in launches):
            return self._run_last(launches, launches, [None] * len(launches))
        if any(x.update.by_rows for x in launches):
            # One launch after another, in several passes each: an error in a later one comes after others have written.
            with _counted_first(launches):
                return [measure for x in launches for measure in self._run_alone(x)]
        before = self._found(launches)
        last = [_last_stage(x, found) for x, found in zip(launches, before, strict=True)]
        return self._run_last(launches, last, before)

    def _run_last(
        self, given: Sequence[Launch], launches: Sequence[Launch], before: Sequence[Found | None]
    ) -> Sequence[Measure]:
        """Runs the last stages of launches, for which the others have found what is `before` them."""
        engine = self.engine
        step = lay_out(launches, engine.kernels)
        if step is None:
            with _counted_first(given):
                return REFERENCE.run_found(given, before)
        measured: dict[Place, Measure] = {}
        if step.left:  # first what may raise, so that an error leaves the rest of the step undone
            with _counted_first(launches):
                alone = ((at, launches[at[0]].part([at[1]])) for at in step.left)
                measured = {at: measure for at, one in alone for measure in REFERENCE.run([one])}
        # Counted before it is done: after an interrupt (Ctrl-C) in between, the versions say that a step was begun.
        changed, step.changed = step.changed, []  # a later step may be laid out as this one is
        torch.autograd.graph.increment_version(list(chain.from_iterable(changed)))
        totals = engine.run(step)
        step.put_back()
        for launch, found in zip(given, before, strict=True):
            if found is not None:
                store_small(launch, found)
        measuring = [(i, j) for i, x in enumerate(launches) if x.update.sums for j in range(len(x.reads))]
        measured |= step.measures_of(launches, totals) if measuring else {}
        return [measured[key] if key in measured else nothing_of(launches[key[0]]) for key in measuring]

    def _run_alone(self, launch: Launch) -> Sequence[Measure]:
        by_rows = launch.update.by_rows
        return run_by_rows(launch, self.engine.kernels, self.engine.run) if by_rows else self.run([launch])

    def _found(self, launches: Sequence[Launch]) -> list[Found | None]:
        """What the stages before the last one find; None if there are none, and of a launch that is skipped."""
        # For all launches before anything is written: parameters that share memory can still be left to the reference.
        return [find(x, self._sum_groups) if x.update.is_staged and x.reads and x.is_taken else None for x in launches]

    def _sum_groups(self, launch: Launch, scalars: Tensor) -> Sequence[Sequence[Tensor]]:
        """The sums of groups for all parameters, those with equal dtypes at once; some are left to the reference."""
        kept = {} if launch.kept is None else launch.kept
        alike: dict[tuple[torch.dtype, ...], list[int]] = kept.get(_alike) or kept.setdefault(_alike, _alike(launch))
        found: dict[int, Sequence[Tensor]] = {}
        results = len(launch.update.only_stage.reduced)
        for dtypes, numbers in alike.items():
            compiled = self.engine.kernels.compiled(write_runs, launch.update, dtypes) if dtypes else None
            if compiled is None:
                sums = REFERENCE.group_sums(launch.update)
                found |= {i: sums(launch.reads[i], scalars[i]) for i in numbers}
                continue
            step, runs, counts = runs_of(compiled, launch, scalars, numbers)
            self.engine.run(step)
            each = folded_over(runs.view(-1, RUNS), 1).reshape(-1).split(counts)
            found |= {i: each[k * results : (k + 1) * results] for k, i in enumerate(numbers)}
        return [found[i] for i in range(len(launch.reads))]


def _alike(launch: Launch) -> dict[tuple[torch.dtype, ...], list[int]]:
    """The numbers of parameters by the dtypes of what is read of them; without dtypes what the reference has to add."""
    alike: dict[tuple[torch.dtype, ...], list[int]] = {}
    for i, reads in enumerate(launch.reads):
        is_plain = in_memory(reads) and len({*map(Tensor.numel, reads)}) == 1
        alike.setdefault(tuple(t.dtype for t in reads) if is_plain else (), []).append(i)
    return alike


def _last_stage(launch: Launch, found: Found | None) -> Launch:
    """A launch; if it has several stages, the last one, with the numbers that were found for each parameter."""
    if not launch.update.is_staged or not launch.reads:
        return launch
    vector = launch.vector if found is None else found.rows  # of what is skipped it is not read
    last = launch.update.parts[-1]
    return launch._replace(update=last, vector=vector, kept=launch.kept_of(last), small=())


@contextmanager
def _counted_first(launches: Sequence[Launch]) -> Iterator[None]:
    """A context around the reference's steps: if it ends with an error after a write, everything counts as written."""
    tensors = [t for launch in launches for row in launch.writes for t in row]
    before = list(map(torch_privates.version, tensors))
    try:
        yield
    except BaseException:
        if list(map(torch_privates.version, tensors)) != before:
            torch.autograd.graph.increment_version(tensors)
        raise


BACKEND = Native()
