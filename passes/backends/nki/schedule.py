"""Scheduling: chooses the instruction and the engine for each value, and SBUF or PSUM for its tile.

It minimizes the time of the busiest resource: an engine, or a port that two engines share. Vector reads one operand of
a sum twice as fast from PSUM, Scalar has its own port to SBUF, GpSimd can add; a plain transcription uses little of
that. The search is simulated annealing with fixed seeds, so an update always gives the same kernel.

Before that, values are grouped by the function table that the Scalar engine must hold to compute them. It evaluates
sqrt, reciprocal, exp and log from tables, and loading one takes as long as an instruction on hundreds of columns. So a
kernel passes over a tile once for each such function (a phase): all chunks up to the square root, then all chunks from
the reciprocal on. Values that cross phases are stored for the whole tile. To have few of them, a value is computed in
the latest possible phase.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from collage_neuron.passes.backends.nki import hardware
from collage_neuron.passes.backends.nki.hardware import Access, Generation, Shape
from collage_neuron.passes.backends.nki.ir import HALVES, IN_PLACE, Column, Instruction, Program, Value, View
from collage_neuron.passes.backends.nki.select import choices

CHUNK, COLUMNS = 512, 2048
"""Columns of an instruction and of a DMA tile that the search assumes: a PSUM tile is one bank, of 512 fp32."""

PSUM_TILES = hardware.PSUM_BANKS // 2
"""PSUM tiles that may be alive at once, with two chunks in flight."""

STARTS, STEPS, HOT, COLD = 4, 5_000, 1.0, 0.01
"""Number of searches, changes per search, and the first and last temperature (nanoseconds per column)."""


STEEP = 32
"""The norm of the times of all resources that the search minimizes: a smaller one prefers less work in all to a less
busy busiest resource, a larger one has no slope. Of 8, 16 and 32 the last gave the best kernels."""


TABLES = frozenset({"sqrt", "reciprocal", "exp", "log"})
"""Functions with their own table; copy, square, abs and sign are assumed to be in every one."""


def in_phases(values: Sequence[Value], stores: Collection[Value]) -> dict[Value, int]:
    """The phase of each of `values` (operands first), in the order in which to compute them."""
    users = {v: [u for u in values if v in u.tiles()] for v in values}
    final = _final(values, set(stores), users)
    phase = _late(values, _early(values), users, final)
    order = sorted(values, key=lambda v: phase[v])
    # What is only stored comes as early in its phase as it can, so that fewer tiles are alive at once.
    return {v: phase[v] for v in _stored_early(order, phase, final)}


def _early(values: Sequence[Value]) -> dict[Value, int]:
    """The first phase in which each value can be computed."""
    function, phase = dict[int, str](), dict[Value, int]()
    for value in values:
        first = max((phase[x] for x in value.tiles() if x in phase), default=0)
        if value.op in TABLES:
            # ScalarE holds one table at a time, so a phase has one function, and another one waits for a later phase.
            while function.setdefault(first, value.op) != value.op:
                first += 1
        phase[value] = first
    return phase


def _late(
    values: Sequence[Value], early: Mapping[Value, int], users: Mapping[Value, list[Value]], final: Collection[Value]
) -> dict[Value, int]:
    """The phase in which each value is needed; for functions, and for values that are only stored, the first one."""
    phase = dict(early)
    for value in reversed(values):
        needed = [phase[u] for u in users[value] if u not in final]
        # A function stays where its table is loaded; all else moves to its first reader, so fewer tiles cross phases.
        if needed and value.op not in TABLES:
            phase[value] = min(needed)
    for value in values:
        if value in final:
            phase[value] = max((phase[x] for x in value.tiles() if x in phase), default=0)
    return phase


def _final(values: Sequence[Value], stores: Collection[Value], users: Mapping[Value, list[Value]]) -> set[Value]:
    """Stored values that are read only by other stored values."""
    final = set[Value]()
    for value in reversed(values):
        final |= {value} if value in stores and final.issuperset(users[value]) else set()
    return final


def _stored_early(order: Sequence[Value], phase: Mapping[Value, int], final: Collection[Value]) -> list[Value]:
    done: list[Value] = []
    waiting = [v for v in order if v in final]
    for value in order:
        for v in (value, *waiting):
            ready = all(x.op == "load" or x in done for x in v.tiles()) and phase[v] == phase[value]
            if v not in done and (v is value or ready):
                done.append(v)
    return done


@dataclass(frozen=True)
class Plan:
    """A program with its instructions, in order, and the set of tiles in PSUM."""

    program: Program
    steps: tuple[tuple[Value, Instruction], ...]
    in_psum: frozenset[Value]

    def phase(self, number: int) -> list[tuple[Value, Instruction]]:
        """The steps of one phase."""
        return [step for step in self.steps if self.program.phases[step[0]] == number]

    @property
    def crossing(self) -> tuple[Value, ...]:
        """The values that are computed in one phase and read in another."""
        phases = self.program.phases
        read = ((x, v) for v, i in self.steps for x in i.reads() if x in phases)
        return tuple(dict.fromkeys(x for x, v in read if phases[x] < phases[v]))

    @property
    def has_blocks(self) -> bool:
        """Returns True if blocks of elements share words, so that the length of rows counts."""
        return any(v.block for v in (*self.program.loads, *self.program.values))

    @property
    def draws(self) -> bool:
        """Returns True if it draws random bits, so that the kernel takes a seed."""
        return any(i.kind == "rng" for _, i in self.steps)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the kernel's scalar input, in the order of their first use."""
        operands = (x for _, instruction in self.steps for _, x in instruction.fields)
        return tuple(dict.fromkeys(x for x in operands if isinstance(x, Column)))


def assign(program: Program, g: Generation, like: Plan | None = None) -> Plan:
    """The best plan that was found for `program`: the one with the least time of the busiest resource."""
    # What `like` computes keeps its instructions, so that its bits stay the same however a device approximates.
    search = _Search(program, g, dict(like.steps) if like else {})
    found = min((search.run(seed) for seed in range(STARTS)), key=lambda state: state.merit)
    steps, in_psum = search.result(found)
    return Plan(program, steps, in_psum)


def table_loads(program: Program) -> int:
    """Number of function tables that ScalarE loads per DMA tile: one per phase if there are two phases or more."""
    phases = max(program.phases.values(), default=0) + 1
    return phases if phases > 1 else 0


def shape_of(value: Value, instruction: Instruction, in_psum: Iterable[Value]) -> Shape:
    """The `Shape` of `instruction`, which computes `value`: the properties on which its cost depends."""

    def access(x: Value | View) -> Access:
        return Access(x.dtype, "psum" if isinstance(x, Value) and x in in_psum else "sbuf")

    output = View(value, HALVES[value.op]) if value.op in HALVES else value
    small = value.is_small and instruction.kind != "tensor_reduce"
    return Shape(instruction["op"] or "", tuple(map(access, instruction.operands())), access(output), small)


class _Option:
    """An instruction that can compute a value; sets of values are ints with one bit per value."""

    def __init__(
        self, value: Value, instruction: Instruction, program: Program, bits: Mapping[Value, int], g: Generation
    ) -> None:
        self.value, self.instruction, self.g = value, instruction, g
        kept = (value.args[IN_PLACE[value.op]],) if value.op in IN_PLACE else ()
        read = [x for x in (*instruction.reads(), *kept) if isinstance(x, Value)]
        self.reads = _union(bits.get(x, 0) for x in read)
        self.touches = self.reads | bits[value]
        self._crossing = _union(bits[x] for x in read if x in bits and program.phases[x] < program.phases[value])
        self._bits = bits
        self._times: dict[int, tuple[tuple[str, float], ...] | None] = {}

    def times(self, psum: int) -> tuple[tuple[str, float], ...] | None:
        """Nanoseconds per column on each resource, with the tiles of `psum` in PSUM; None if that is not legal."""
        # Only its own tiles decide what an instruction costs: the search asks for few different sets of these.
        key = psum & self.touches
        if key not in self._times:
            shape, i = shape_of(self.value, self.instruction, _members(key, self._bits)), self.instruction
            is_legal = hardware.is_legal(i.kind, i.engine, shape, self.g) and not key & self._crossing
            self._times[key] = hardware.times_of(i.kind, i.engine, shape, self.g, CHUNK) if is_legal else None
        return self._times[key]


def _union(sets: Iterable[int]) -> int:
    return reduce(operator.or_, sets, 0)


def _members(psum: int, bits: Mapping[Value, int]) -> frozenset[Value]:
    return frozenset(v for v, bit in bits.items() if bit & psum)


class _State(NamedTuple):
    """The option chosen for each value, and the set of values in PSUM."""

    merit: float
    picked: tuple[int, ...]
    psum: int


class _Search:
    """The search for the best state of a program."""

    def __init__(self, program: Program, g: Generation, fixed: Mapping[Value, Instruction]) -> None:
        self.values = program.values
        self.bits = {v: 1 << i for i, v in enumerate(self.values)}
        options = {v: (fixed[v],) if v in fixed else ways for v, ways in choices(program, g).items()}
        self.options = [[_Option(v, o, program, self.bits, g) for o in options[v]] for v in self.values]
        self.stored = _union(self.bits.get(v, 0) for v in program.roots)
        self.fixed = {"scalar": table_loads(program) * hardware.TABLE_LOAD / COLUMNS}
        self.picked, self.psum = [0] * len(self.values), 0
        kept = [v.args[IN_PLACE[v.op]] for v in self.values if v.op in IN_PLACE]
        # A DMA does not reach PSUM ([ISA] dma_copy), so tiles that are stored stay in SBUF.
        held = [*program.roots, *kept, *(v for v in self.values if v.op in (*IN_PLACE, *HALVES, "fill"))]
        # Whether a tile in PSUM can be seen as integers is not documented.
        held += [x for v in self.values if any(o.bits for o in options[v]) for x in (v, *v.tiles())]
        held += [a.tile for v in self.values for a in v.args if isinstance(a, View)]
        held += [v for v in self.values if v.is_small]
        self.moves = [(i, k) for i, o in enumerate(self.options) for k in range(len(o)) if len(o) > 1]
        self.moves += [(i, -1) for i, v in enumerate(self.values) if v.dtype == "float32" and v not in held]
        """Changes: another option for a value, or (-1) the other memory for its tile."""

    def run(self, seed: int) -> _State:
        """Anneals from the plain transcription; returns the best state found."""
        rng = random.Random(seed)
        self.picked, self.psum = [0] * len(self.values), 0
        merit = self.merit()
        best = _State(merit, tuple(self.picked), self.psum)
        for step in range(STEPS if self.moves else 0):
            temperature = HOT * (COLD / HOT) ** (step / STEPS)
            before = (list(self.picked), self.psum)
            for _ in range(rng.choice((1, 1, 2, 3))):  # several at once leave minima that no single change does
                value, option = rng.choice(self.moves)
                if option < 0:
                    self.psum ^= 1 << value
                else:
                    self.picked[value] = option
            new = self.merit()
            if new <= merit or rng.random() < math.exp((merit - new) / temperature):
                merit = new
            else:
                self.picked, self.psum = before
            if merit < best.merit:
                best = _State(merit, tuple(self.picked), self.psum)
        return best

    def merit(self) -> float:
        """The objective: close to the time of the busiest resource, but with a slope where that is flat."""
        needed, alive, count = self.stored, 0, 0
        loads = dict(self.fixed)
        # From the last value back: one that an instruction includes, and that nothing else reads, is not computed.
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
        slope = sum((t / high) ** STEEP for t in loads.values()) if high else 0.0
        # The small terms break ties: less work in all, then fewer instructions.
        merit = high * float(slope ** (1 / STEEP)) + 1e-3 * sum(loads.values()) + 1e-3 * count
        return round(merit, 6)  # rounded, so that the last bits of a machine's floats do not change the search

    def result(self, state: _State) -> tuple[tuple[tuple[Value, Instruction], ...], frozenset[Value]]:
        """The instructions on which the stores depend, in order, and the tiles in PSUM."""
        needed, steps = self.stored, []
        for i in range(len(self.values) - 1, -1, -1):
            if needed >> i & 1:
                option = self.options[i][state.picked[i]]
                needed |= option.reads
                steps.append((option.value, option.instruction))
        return tuple(steps[::-1]), _members(needed & state.psum, self.bits)
