"""The documented hardware figures of each generation, as data: clocks, memories, cycles of each instruction.

Sources, in the documentation of the AWS Neuron SDK: [A2], [A3], [A4] the NKI architecture guides of Trainium 1, 2 and
3; [ISA] the reference of `nki.isa` up to SDK 2.26, the last to give cycles; [BW] the NKI DMA bandwidth guide; [HW] the
hardware pages. A figure marked [inferred] is not published; its comment says from what it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PARTITIONS = 128
CORES = 2
"""The most physical cores in a logical one (LNC), from trn2 on."""
ENGINES = ("vector", "scalar", "gpsimd")


@dataclass(frozen=True, eq=False)
class Generation:
    """One generation of NeuronCores."""

    target: str
    core: int
    """NeuronCore version."""
    clock: dict[str, float]
    """GHz, by engine."""
    sbuf: int
    """Bytes per partition."""
    bandwidth: float
    """GB/s between HBM and SBUF, of one NeuronCore: the smaller of its DMA engines' and its share of the HBM's."""
    shared_ports: bool
    """True if Vector and GpSimd take turns on SBUF, and Vector and Scalar on PSUM."""
    cores: int = CORES
    """The most physical cores in a logical one."""
    adds_bias: frozenset[str] = frozenset({"copy", "exp", "sign", "abs"})
    """Functions of which ScalarE is taken to add the bias. Where copy is not among them, relu stands for it."""
    instructions: int = 45_000
    """The most instructions of a step's kernel that bodies of several tiles may make of it (`bodies.py`): what a
    compiler takes for more is not known, and unrolled kernels took it hours (aws-neuron-sdk#1374)."""


TARGETS = {
    g.target: g
    for g in (
        # [A2] engines, SBUF, ports; [BW] 272 GB/s of DMA; [HW] HBM 820 GB/s for 2 cores
        # aws-neuron-sdk#1296: of copy the bias is dropped; relu adds it, and exp does in AWS's attention kernels
        Generation(
            "trn1",
            2,
            {"vector": 1.12, "scalar": 1.4, "gpsimd": 1.4},
            192 << 10,
            272,
            shared_ports=True,
            cores=1,
            adds_bias=frozenset({"relu", "exp"}),
        ),
        # [A3]; [BW] 368 GB/s of DMA; [HW] HBM 2.9 TB/s for 8 cores, 362 GB/s each
        Generation("trn2", 3, {"vector": 0.96, "scalar": 1.2, "gpsimd": 1.2}, 224 << 10, 362, shared_ports=False),
        # [A4]; [BW] 528 GB/s of DMA; [HW] HBM 4.9 TB/s for 8 cores, 612 GB/s each
        Generation("trn3", 4, {"vector": 1.2, "scalar": 1.2, "gpsimd": 1.2}, 256 << 10, 528, shared_ports=False),
    )
}

PSUM_BANKS = 8
PSUM_BANK = 2 << 10
"""Bytes per partition of each bank [A2]: 512 fp32. Two engines cannot access one bank at the same time [A3]."""


ADDRESSED = 1 << 32
"""Bytes of a tensor in HBM that are addressed: offsets in bytes have 32 bits."""

TABLE_LOAD = 1283.0
"""Nanoseconds ScalarE takes to load the table of a function (`phases`). [inferred] Nothing is documented; published
profiles of trn2 kernels show 1283 ns each time the function changes."""


class Access(NamedTuple):
    """The memory and the dtype of an operand or a result of an instruction."""

    dtype: str
    space: str
    """`sbuf` or `psum`."""


class Shape(NamedTuple):
    """The properties of an instruction on which its cost depends."""

    op: str
    inputs: tuple[Access, ...]
    output: Access
    block: bool = False
    """True if it has one element for each block of elements: fewer than an instruction takes to start."""

    @property
    def narrow(self) -> bool:
        """True if all operands and the result are bf16."""
        return all(a.dtype == "bfloat16" for a in (*self.inputs, self.output))

    @property
    def fast(self) -> bool:
        """True if all operands and the result are bf16 numbers in SBUF: what the fast modes are documented for."""
        in_sbuf = all(a.space == "sbuf" for a in (*self.inputs, self.output))
        return self.narrow and in_sbuf and not self.op.startswith("bitwise")

    @property
    def split(self) -> bool:
        """True if one of two inputs is in PSUM and the other in SBUF."""
        return {a.space for a in self.inputs} == {"psum", "sbuf"}


class Cost(NamedTuple):
    """Engine cycles for one column (one element of each of 128 partitions), under a condition."""

    kind: str
    engine: str
    cores: Sequence[int]
    cycles: float
    source: str
    when: Callable[[Shape], bool] = lambda shape: True
    start: int = 0
    """Start-up cycles per instruction; the 64 of other instructions are hidden behind their 128 columns or more."""

    def time(self, g: Generation, columns: int, block: bool = False) -> float:
        """Nanoseconds per column of an instruction on `columns` columns, or on the blocks of so many columns."""
        cycles = LEAST_CYCLES / columns if block else self.cycles
        return (cycles + self.start / columns) / g.clock[self.engine]


LEAST_CYCLES = 64
"""What an instruction on few columns takes ([ISA], MIN_II): 16 or fewer where it has one element a block."""

_ALL, _V3 = (2, 3, 4), (3, 4)
_QUICK = ("add", "subtract", "multiply")
_GPSIMD_START = 150  # [ISA] what its instructions with a figure (iota, affine_select) need to start

COSTS: tuple[Cost, ...] = (
    Cost("tensor_tensor", "vector", _V3, 0.5, "[A3] twice v2", lambda s: s.fast and s.op in _QUICK),
    Cost("tensor_tensor", "vector", _ALL, 1, "[ISA] all bf16, in SBUF", lambda s: s.fast and s.op in _QUICK),
    Cost("tensor_tensor", "vector", _V3, 1, "[A3] twice v2", lambda s: s.fast),
    Cost("tensor_tensor", "vector", _ALL, 1, "[ISA] one input in PSUM", lambda s: s.split),
    Cost("tensor_tensor", "vector", _ALL, 2, "[ISA]"),
    Cost("scalar_tensor_tensor", "vector", _ALL, 2, "[ISA]"),
    Cost("tensor_scalar", "vector", _V3, 0.25, "[A3] four times v2", lambda s: s.fast),
    Cost("tensor_scalar", "vector", _V3, 0.5, "[A3] twice v2", lambda s: s.narrow),
    Cost("tensor_scalar", "vector", _ALL, 1, "[ISA]"),
    Cost("tensor_copy", "vector", _V3, 0.25, "[A3] four times v2", lambda s: s.fast),
    Cost("tensor_copy", "vector", _V3, 0.5, "[A3] twice v2", lambda s: s.narrow),
    Cost("tensor_copy", "vector", _ALL, 1, "[ISA]"),
    Cost("tensor_copy_predicated", "vector", _ALL, 2, "[ISA]"),
    Cost("reciprocal", "vector", _ALL, 8, "[ISA]"),
    Cost("tensor_reduce", "vector", _ALL, 1, "[ISA]"),
    Cost("memset", "vector", _ALL, 1, "[ISA]"),
    # [A4] says four numbers a cycle; of the generations before nothing is published.
    Cost("rng", "vector", (4,), 0.25, "[A4]"),
    Cost("rng", "vector", _ALL, 1, "[inferred] as memset"),
    Cost("activation", "scalar", _ALL, 1, "[ISA]"),
    # [A2]: a GpSimd processor reads 32 bits of each of its partitions a cycle: two operands, two cycles.
    Cost("tensor_tensor", "gpsimd", _ALL, 16, "[inferred] a guess", lambda s: s.op == "power", _GPSIMD_START),
    Cost("tensor_tensor", "gpsimd", _ALL, 2, "[inferred] from its port to SBUF", start=_GPSIMD_START),
    Cost("tensor_copy", "gpsimd", _ALL, 1, "[inferred] from its port to SBUF", start=_GPSIMD_START),
    Cost("memset", "gpsimd", _ALL, 1, "[inferred] from its port to SBUF", start=_GPSIMD_START),
)
"""The first that fits holds. Where a generation's guide is silent, the figure of the one before it: [A3] says what got
faster than v2, and fp32 is not among it (its table of widths, 256 elements a cycle, might halve some of these)."""


def cost_of(kind: str, engine: str, shape: Shape, g: Generation) -> Cost:
    """The cost of an instruction on a generation."""
    return next(c for c in COSTS if (c.kind, c.engine) == (kind, engine) and g.core in c.cores and c.when(shape))


PSUM_WRITERS = ("tensor_tensor", "tensor_copy", "activation")
"""Instructions of which the documentation of v2 ([ISA]) says that their result may be in PSUM."""


def is_legal(kind: str, engine: str, shape: Shape, g: Generation) -> bool:
    """Returns True if an engine can, and should, run an instruction with its operands in their memories."""
    spaces = [a.space for a in shape.inputs]
    if shape.output.space == "psum" and g.core == 2 and kind not in PSUM_WRITERS:
        return False
    # ScalarE's square is listed among the functions that it approximates; a product of two tiles rounds once.
    if engine == "scalar" and shape.op == "square":
        return False
    if engine == "gpsimd":
        # GpSimd does not reach PSUM. Where it takes turns with Vector on SBUF it would only hold that up, so there it
        # runs what no other engine has.
        return "psum" not in (*spaces, shape.output.space) and (not g.shared_ports or shape.op == "power")
    # An instruction reads at most one tile from PSUM ([ISA]).
    return spaces.count("psum") < 2


def times_of(kind: str, engine: str, shape: Shape, g: Generation, columns: int) -> tuple[tuple[str, float], ...]:
    """Nanoseconds per column that an instruction on so many columns occupies its engine, and a port of it.

    Such a port is one that the engine shares with another.
    """
    time = cost_of(kind, engine, shape, g).time(g, columns, shape.block)
    spaces = {a.space for a in (*shape.inputs, shape.output)} if g.shared_ports else set()
    psum = ["psum port"] * ("psum" in spaces and engine in ("vector", "scalar"))
    sbuf = ["sbuf port"] * ("sbuf" in spaces and engine in ("vector", "gpsimd"))
    return tuple((resource, time) for resource in (engine, *psum, *sbuf))
