"""Assignment: which instruction computes each value, on which engine, and whether its tile lies in SBUF or PSUM.

The figure of merit is the time of the busiest resource: an engine, or a port that two engines share. Vector reads one
operand of a sum twice as fast from PSUM, Scalar has its own port to SBUF, GpSimd can add: a plain transcription uses
little of that. The search is simulated annealing with a fixed seed: an update always gives the same kernel.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from collage_neuron.passes.nki.engines import PSUM_BANKS, Access, Generation, Shape, cost_of, is_legal, resources
from collage_neuron.passes.nki.ir import Column, Instruction, Program, Value
from collage_neuron.passes.nki.select import choices

COLUMNS = 512
"""Columns of the instructions that the search imagines: a PSUM tile is one bank, of 512 fp32."""

PSUM_TILES = PSUM_BANKS // 2
"""PSUM tiles that may be alive at once, two chunks being in flight."""

STEPS, HOT, COLD = 12_000, 1.0, 0.01
"""Changes that are tried, and the temperature (nanoseconds a column) of the first and the last."""


@dataclass(frozen=True)
class Plan:
    """A program with its instructions, in order, and the tiles that lie in PSUM."""

    program: Program
    steps: tuple[tuple[Value, Instruction], ...]
    in_psum: frozenset[Value]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the kernel's scalar input, in the order of their first use."""
        operands = (x for _, instruction in self.steps for _, x in instruction.fields)
        return tuple(dict.fromkeys(x for x in operands if isinstance(x, Column)))


def assign(program: Program, g: Generation) -> Plan:
    """The instructions that compute `program` with the least time of the busiest resource that was found."""
    search = _Search(program, g)
    search.run()
    steps, in_psum = search.result()
    return Plan(program, steps, in_psum)


def shape_of(value: Value, instruction: Instruction, in_psum: Iterable[Value]) -> Shape:
    """What the cost of `instruction`, which computes `value`, depends on."""

    def access(x: Value) -> Access:
        return Access(x.dtype, "psum" if x in in_psum else "sbuf")

    return Shape(instruction["op"] or "", tuple(map(access, instruction.reads())), access(value))


class _Option:
    """An instruction that can compute a value; sets of values are ints, a bit for each."""

    def __init__(self, value: Value, instruction: Instruction, bits: Mapping[Value, int], g: Generation) -> None:
        self.value, self.instruction, self.g = value, instruction, g
        kept = (value.args[2],) if value.op == "select" else ()
        read = [x for x in (*instruction.reads(), *kept) if isinstance(x, Value)]
        self.reads = _union(bits.get(x, 0) for x in read)
        self.touches = self.reads | bits[value]
        self._bits = bits
        self._times: dict[int, tuple[tuple[str, float], ...] | None] = {}

    def times(self, psum: int) -> tuple[tuple[str, float], ...] | None:
        """Nanoseconds a column on each resource, with the tiles of `psum` in PSUM; None if that is not legal."""
        key = psum & self.touches
        if key not in self._times:
            self._times[key] = self._compute(key)
        return self._times[key]

    def _compute(self, psum: int) -> tuple[tuple[str, float], ...] | None:
        in_psum = {v for v, bit in self._bits.items() if bit & psum}
        shape, i = shape_of(self.value, self.instruction, in_psum), self.instruction
        if not is_legal(i.engine, shape, self.g):
            return None
        time = cost_of(i.kind, i.engine, shape, self.g).time(self.g, COLUMNS)
        return tuple((r, time) for r in resources(i.engine, shape, self.g))


def _union(sets: Iterable[int]) -> int:
    result = 0
    for s in sets:
        result |= s
    return result


class _Search:
    """The state of a search: which option each value has, and which values are in PSUM."""

    def __init__(self, program: Program, g: Generation) -> None:
        self.values = program.values
        bits = {v: 1 << i for i, v in enumerate(self.values)}
        options = choices(program)
        self.options = [[_Option(v, o, bits, g) for o in options[v]] for v in self.values]
        stored = list(program.stores.values())
        self.stored = _union(bits.get(v, 0) for v in stored)
        self.picked = [0] * len(self.values)
        self.psum = 0
        movable = [v for v in self.values if v.dtype == "float32" and v.op not in ("select", "fill")]
        kept = [v.args[2] for v in self.values if v.op == "select"]
        self.moves = [(i, k) for i, o in enumerate(self.options) for k in range(len(o)) if len(o) > 1]
        self.moves += [(self.values.index(v), -1) for v in movable if v not in stored and v not in kept]

    def run(self) -> None:
        """Anneals, and keeps the best state seen."""
        rng = random.Random(0)
        merit = best = self.merit()
        found = (list(self.picked), self.psum)
        for step in range(STEPS if self.moves else 0):
            temperature = HOT * (COLD / HOT) ** (step / STEPS)
            before = (list(self.picked), self.psum)
            for _ in range(rng.choice((1, 1, 2, 3))):
                self.apply(*rng.choice(self.moves))
            new = self.merit()
            if new <= merit or rng.random() < math.exp((merit - new) / temperature):
                merit = new
            else:
                self.picked, self.psum = before
            if merit < best:
                best, found = merit, (list(self.picked), self.psum)
        self.picked, self.psum = found

    def apply(self, value: int, option: int) -> None:
        """One change: another option, or (-1) the tile to the other memory."""
        if option < 0:
            self.psum ^= 1 << value
        else:
            self.picked[value] = option

    def merit(self) -> float:
        """What the search makes small: near the time of the busiest resource, with a slope where that is flat."""
        needed, alive, count = self.stored, 0, 0
        loads: dict[str, float] = {}
        for i in range(len(self.values) - 1, -1, -1):
            if not needed >> i & 1:
                continue
            option = self.options[i][self.picked[i]]
            times = option.times(self.psum)
            alive |= option.touches & self.psum
            if times is None or alive.bit_count() > PSUM_TILES:
                return math.inf
            needed |= option.reads
            alive &= ~(1 << i)
            count += 1
            for resource, time in times:
                loads[resource] = loads.get(resource, 0.0) + time
        high = max(loads.values(), default=0.0)
        slope = sum((t / high) ** 8 for t in loads.values()) if high else 0.0
        return float(high * slope**0.125 + 1e-3 * sum(loads.values()) + 1e-3 * count)

    def result(self) -> tuple[tuple[tuple[Value, Instruction], ...], frozenset[Value]]:
        """The instructions that what is stored needs, in order, and the tiles in PSUM."""
        needed, steps = self.stored, []
        for i in range(len(self.values) - 1, -1, -1):
            if needed >> i & 1:
                option = self.options[i][self.picked[i]]
                needed |= option.reads
                steps.append((option.value, option.instruction))
        in_psum = frozenset(v for i, v in enumerate(self.values) if needed & self.psum & 1 << i)
        return tuple(steps[::-1]), in_psum
