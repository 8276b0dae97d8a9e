"""A rewritten forward or backward graph that is ready to run, in two forms: as it is, and measuring its operands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from collage_neuron.matmuls.scales import binades, size_of, worst
from collage_neuron.passes.fp8_scaling.plan import rewrite

if TYPE_CHECKING:
    from collage_neuron.matmuls.capture import Captured

ATTEMPTS = 4
"""How often a call is computed at most until scales fit; once for each operand, if these are more."""
UNSTEADY = 3
"""The number of measurements in a row that find an operand far off, after which no scale is kept for it."""


BINADES = 2.0
"""The drift from one measurement to the next above which the next one comes sooner."""


class Recalibration:
    """When one half of a graph measures its operands: at calls 1 to 4, 8, 16, ... and every `rescale`th.

    If `rescale` is even, every second time it is the call after: else batches that come in turns would never be
    measured but for one of them.

    After a drift beyond `BINADES` the next measurement comes after half as many calls. After a smaller one the distance
    doubles again, up to `rescale`. What was measured is read at the next call, when the device has computed it, so that
    a measurement does not make the host wait.

    Args:
        rescale: the largest number of calls between two measurements.
    """

    def __init__(self, rescale: int) -> None:
        self.rescale = rescale
        self._most = rescale + (rescale % 2 == 0)
        self.distance = self._most
        self.history: list[int] = [0]
        """The calls that measured, the last two."""
        self.begin = 0
        """The call from which 1, 2, 4, 8, ... are counted."""
        self._last: Tensor | None = None
        self._again: Tensor | None = None

    def due(self, call: int) -> bool:
        """Returns True if a call, counted from 1, is to measure."""
        n = call - self.begin
        early = n < self.rescale and (n & (n - 1) == 0 or n == 3)
        # Of batches that come in turns, an even distance would measure one alone.
        shift = call // self.rescale % 2 if self.rescale % 2 == 0 else 0
        return early or (call - shift) % self.rescale == 0 or call - self.history[-1] >= self.distance

    def is_first(self, call: int) -> bool:
        """Returns True for the first call, or the first after a restart."""
        return call - self.begin == 1

    def restart(self, call: int) -> None:
        """Makes a call due, and others after it, as if it were the first."""
        self.begin = call - 1
        self.distance = self._most

    def measured(self, call: int, seen: Tensor, again: Tensor) -> None:
        """Remembers what a call measured: float32[operands, 3], as `scaled_matmul.measure` gives it.

        Args:
            call: its number.
            seen: the measurement.
            again: True for operands that it says nothing of, so that the next call measures too.
        """
        self.history = [self.history[-1], call]
        self._last, self._again = seen, again

    def look_back(self) -> Tensor | None:
        """Sets the distance to the next measurement by what the last one said, and returns that, once."""
        seen, again = self._last, self._again
        self._last = self._again = None
        if seen is None or again is None:
            return None
        seen = seen.cpu()  # what is computed of it here is no program for the device
        since = self.history[-1] - self.history[0]
        if bool(again.cpu().any()):
            self.distance = 1
        else:
            self.distance = max(1, since // 2) if worst(seen) > BINADES else min(self._most, 2 * self.distance)
        return seen


class Half:
    """Called with a list of inputs, as torch's partitioned graphs are.

    Args:
        graph: the graph that this is a half of.
        module: the half before it is rewritten.
        rescale: the largest number of calls between two measurements; 0 for none.
        corrects: True for a graph without a backward half. Each measured call of it that finds scales off is computed
            again, and else only the first one, or the first after weights were written: its result is right then.
    """

    _boxed_call = True  # torch then gives the list itself, and frees what it holds

    def __init__(self, graph: Captured, module: GraphModule, rescale: int, corrects: bool = False) -> None:
        self.graph = graph
        self.source = module
        self.rescale = rescale
        self.corrects = corrects
        self.harmed = False
        """True if scales that the last measurement found to be off were those of results."""
        self.calls = 0
        self.measuring: GraphModule | None = None
        self.write()
        before = {name for half in graph.halves for name in half.plain.names}
        self.candidates = [name for name in self.plain.names if name not in before] if rescale else []
        """The operands that this half measures: the forward half has measured the others."""
        wanted = [n.name for n in graph.plan.tangents]
        holders = [n.name for n in module.graph.nodes if n.op == "placeholder"]
        self.tangents = [holders.index(name) for name in wanted if name in holders]
        self.assumed = bool(self.tangents)
        """True while the sizes of the gradients that come in are assumed to be 1."""
        self.powers: Tensor | None = None  # made at the first call: while torch traces, tensors are fake
        self.recalibration = Recalibration(rescale)
        self.jumps: dict[str, int] = {}
        """In how many measurements in a row an operand was far off."""

    def write(self) -> None:
        """Writes the graph anew, without a scale for operands that are unsteady."""
        self.plain = rewrite(self.source, unsteady=self.graph.unsteady)
        self.measuring = None

    @property
    def measured(self) -> list[str]:
        """The operands that this half measures: those that have a scale, and that the forward half does not measure."""
        return [name for name in self.candidates if name not in self.graph.unsteady]

    def load(self) -> None:
        """Takes the scales as they are now."""
        self.powers = self.graph.backend.scales.powers([self.graph.key(name) for name in self.plain.names])

    def look_back(self) -> bool:
        """Reads what the last call measured. Returns True if weights had drifted, which concerns other graphs."""
        seen = self.recalibration.look_back()
        if seen is None:
            return False
        names = self.measured
        if self.graph.backend.notice([self.graph.key(name) for name in names], seen, self.harmed):
            self.restart()  # an operand that became 0 hides those behind it: a first call looks until all fit
        weights = [i for i, name in enumerate(names) if name in self.graph.plan.weights]
        drifted = worst(seen[weights]) > BINADES
        self._count_jumps(names, (binades(seen) > BINADES).tolist())
        return drifted

    def _count_jumps(self, names: list[str], far: list[bool]) -> None:
        self.jumps = {name: self.jumps.get(name, 0) + 1 for name, is_far in zip(names, far, strict=True) if is_far}
        if unsteady := [name for name, n in self.jumps.items() if n >= UNSTEADY]:
            self.graph.take_largest(unsteady)

    def restart(self) -> None:
        """Makes the next call measure."""
        self.recalibration.restart(self.calls + 1)

    def __call__(self, args: list[Any]) -> Any:
        if not self.tangents:  # before a backward half, the device has not computed yet what the forward one measured
            self.graph.backend.look_back()
            self.graph.look_at_weights()
        self.graph.backend.calls += 1
        self.calls += 1
        if self.assumed:
            self._look_at(args)
        if self.powers is None:
            self.load()
        if not self.measured or not self.recalibration.due(self.calls):
            return self._run(self.plain.module, args)
        if self.measuring is None:
            self.measuring = rewrite(self.source, self.measured, self.graph.unsteady).module
        first = self.recalibration.is_first(self.calls)
        corrected = first or self.corrects
        self.harmed = not corrected or not (first or self.recalibration.history[-1] == self.calls - 1)
        return self._measure(args, max(ATTEMPTS, len(self.measured)) if corrected else 1)

    def _measure(self, args: list[Any], attempts: int) -> Any:
        """Runs and measures; of several attempts it makes as many as scales need to fit, and waits for the device."""
        assert self.measuring is not None
        state, first, names = torch.get_rng_state(), None, self.measured
        for left in reversed(range(attempts)):
            torch.set_rng_state(state)  # dropout may be on; a second attempt draws what the first one drew
            *results, seen = self._run(self.measuring, list(args) if left else args)
            first = seen if first is None else first
            if not left or not self.graph.correct(names, seen):
                break
            results.clear()  # before they are computed again
        args.clear()
        assert first is not None
        scales, keys = self.graph.backend.scales, [self.graph.key(name) for name in names]
        if (
            not self.corrects
        ):  # else `correct` has followed what was far off; scales of weights are those of training too
            scales.follow(keys, seen)
            self.graph.backend.reload()
        self.recalibration.measured(self.calls, first, scales.again(keys, seen))
        return results

    def _look_at(self, args: list[Any]) -> None:
        """Measures the gradients of the outputs, on which all others depend, unless they are zero or not finite."""
        sizes = [size_of(args[i]) for i in self.tangents]
        if any(s.log == math.inf or math.isnan(s.log) for s in sizes) or all(s.log == -math.inf for s in sizes):
            return
        self.assumed = not self.rescale and any(s.log == -math.inf for s in sizes)  # else a measurement will find them
        self.graph.assume(sizes)
        self.graph.backend.reload()
        self.recalibration.restart(self.calls)  # what was measured before were zeros, or not finite

    def _run(self, module: GraphModule, args: list[Any]) -> Any:
        given = [self.powers, *args]
        args.clear()
        return module.forward(*given)
