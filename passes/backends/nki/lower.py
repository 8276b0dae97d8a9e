"""Lowers an update in explicit-rounding form to the text of an NKI kernel for Trainium.

A `round_to(x, "bf16")` becomes the bf16 destination tile of the instruction that computes x: engines compute in fp32
and round once, when they write. No instruction combines two operations with a rounding between them. So a kernel
computes the graph bit for bit, except for what Trainium only approximates: division, square root, exp and log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.numerics.eft import widen
from collage_neuron.numerics.formats import BY_ELEMENT, FORMATS
from collage_neuron.numerics.reductions import NUMBER
from collage_neuron.passes.backends.nki.chunk_sums import reduction_of
from collage_neuron.passes.backends.nki.dialects import DIALECTS
from collage_neuron.passes.backends.nki.docstring import MEASURES, Argument, Design, estimate
from collage_neuron.passes.backends.nki.domains import DOMAINS
from collage_neuron.passes.backends.nki.emit import text_of
from collage_neuron.passes.backends.nki.hardware import PARTITIONS, TARGETS, Generation
from collage_neuron.passes.backends.nki.ir import Column, Program
from collage_neuron.passes.backends.nki.legalize import programs_of, storage_of
from collage_neuron.passes.backends.nki.schedule import assign
from collage_neuron.passes.backends.nki.tiling import Cut, cut_of, parts_of, tiling_of
from collage_neuron.passes.backends.protocol import AUTO
from collage_neuron.passes.ir.stage import ELEMENTWISE, NUMBERS, REDUCTION, Stage, rearranged
from collage_neuron.passes.ir.update import Update

LAYOUTS = frozenset({BY_ELEMENT, f"block:{BLOCK}"})
"""How words may lie in memory."""


@dataclass(frozen=True, eq=False)
class Kernel(Design):
    """A kernel, and how to call it.

    Call it as `module.<name>(*arguments, scalars, seed, *cut_arguments(total, cut))`. All arguments are HBM tensors of
    one (arbitrary) number of elements, in any shape: they are addressed as they lie in memory. Those in `written` are
    updated in place and returned, in this order. `scalars` comes after them, and only if there are `columns`:
    `scalar_input` makes it from the update's scalar vector. `seed` is [1, cores] int32, and only there if the plan
    `draws`: `words.seed_of` makes it. The last arguments are ints: the number of elements, and how they are cut
    into lines. If the plan `has_blocks`, arguments of blocks have one element for each block of each row. In the newer
    dialect `module.<name>[2](...)` runs it on the two cores of a logical one.
    """

    @cached_property
    def source(self) -> str:
        """The module with the function of its name, as Python."""
        return text_of(self)

    @property
    def target(self) -> str:
        """The generation of Trainium."""
        return self.generation.target

    @property
    def finds(self) -> bool:
        """Returns True if it reads numbers that earlier stages find: its scalar input is one for each parameter."""
        return any(c.is_found for c in self.plan.columns)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Keys of the components that the kernel returns."""
        return tuple(a.key for a in self.arguments if a.written)

    def cut(self, shape: Sequence[int]) -> Cut:
        """How to cut the tensors of a parameter of this shape, which has elements: the arguments at the end."""
        return cut_of(math.prod(shape), self.tiling, shape[-1] if self.plan.has_blocks else 0, self.cost.ratio)

    def cut_arguments(self, total: int, cut: Cut) -> tuple[int, ...]:
        """The last arguments, for tensors of `total` elements."""
        return DIALECTS[self.dialect].cut_arguments(cut, total)

    def totals(self, shape: Sequence[int], cut: Cut) -> int:
        """The elements of `measures` for a parameter of this shape, cut so: some for each chunk of each line."""
        chunks = (p.tiles * p.lines * p.strips * (p.columns // p.width) for p in parts_of(math.prod(shape), cut))
        return len(self.plan.program.measures) * sum(chunks)

    def in_dialect(self, dialect: str) -> Kernel:
        """The same instructions in another dialect; ValueError if it has no such target."""
        _generation(self.target, dialect)
        return replace(self, dialect=dialect)

    def may_clamp(self, vector: torch.Tensor) -> bool:
        """Returns True if the numbers of the step do not keep all divisors inside the documented domain."""
        low, _ = DOMAINS["reciprocal"]
        # To read what earlier stages find would wait for the device: such a number may be anything.
        if any(isinstance(d, Column) and d.is_found for d in self.plan.program.divisors):
            return True
        entries = _entries(vector)
        divisors = (d.value(entries) if isinstance(d, Column) else d for d in self.plan.program.divisors)
        return any(float(d) < low for d in divisors)  # type: ignore[arg-type]  # numbers

    def scalar_input(self, vector: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The `[128, K]` fp32 tensor of a step, on the CPU, from the update's 1-D fp32 scalar vector.

        `rows` are, for an update with earlier stages, the vector and the numbers that these have found, a row for each
        parameter, on any device. Then the result is `[parameters, 128, K]`, and there.

        Raises:
            ValueError: a number is negative although the kernel relies on its sign.
        """
        entries = _entries(vector)
        for i in sorted(self.plan.program.nonnegative):
            if float(entries[i]) < 0:
                raise ValueError(
                    f"scalar c{i} is {float(entries[i])}, but the kernel {self.name} divides by a number made of it "
                    "and was generated for positive divisors; use backend='xla'"
                )
        if rows is None:
            # A number in each partition: the compiler's verifier rejects an operand of one element for 128 partitions.
            return torch.stack([c.value(entries) for c in self.plan.columns]).expand(PARTITIONS, -1).contiguous()
        # What the host knows goes to the device at once; what stages have found is there already.
        given = [c.value(entries) for c in self.plan.columns if not c.is_found]
        known = torch.stack(given or [torch.zeros((), dtype=torch.float32, device="cpu")])
        known_rows, found = iter(known.to(rows.device).expand(len(rows), -1).unbind(1)), rows.unbind(1)
        columns = [c.value(found).expand(len(rows)) if c.is_found else next(known_rows) for c in self.plan.columns]
        return torch.stack(columns, dim=1)[:, None, :].expand(-1, PARTITIONS, -1).contiguous()


def _entries(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return vector.detach().to("cpu", torch.float32).unbind()


def lower_to_nki(
    update: Update,
    target: str = "trn1",
    dialect: str = "nki",
    *,
    grad: str = "bf16",
    components: Mapping[str, str] | None = None,
    name: str = "collage_update",
    title: str = "",
) -> Kernel:
    """The kernel of `update` for `target` (trn1, trn2, trn3) in `dialect` (nki; beta1, for trn1).

    Of an update in stages it takes one of `parts`: the last one, or a reduction, whose kernel only writes `measures`.

    `grad` is the storage type of the gradient ("bf16" or "fp32"), `components` that of components for which the
    update's formats give none.

    Raises:
        ValueError: there is no such target or dialect.
        UnsupportedUpdate: an operation has no instruction, or nothing is left to do.
        OutOfMemory: the update needs more tiles than fit on chip.
    """
    g = _generation(target, dialect)
    if reason := _reason_against(update):
        raise UnsupportedUpdate(reason)
    storage = storage_of(update, grad) | dict(components or {})
    program, plain = _programs_of(update, storage)
    if not program.roots:
        raise UnsupportedUpdate("the update stores nothing but what it loaded: there is no kernel to generate")
    # First without a monitor: measuring must not change by which instructions anything is stored.
    plan = assign(plain, g)
    if program is not plain:
        plan = assign(program, g, plan)
    tiling = tiling_of(plan, g)
    scalars = [f"{form}({str(value).removeprefix('(').removesuffix(')')})" for form, value in update.scalars.entries]
    scalars += [f"{name} of the stages before" for name in update.only_stage.numbers]
    measures = (*(f"sum of {s}" for s in update.sums), *(f"number of {c}" for c in update.counts))
    measures = measures or _described(program)
    title = title or ("Sums over a parameter." if program.sums else "One optimizer step, fused.")
    arguments, cost = _arguments(update, program), estimate(plan, tiling, g)
    return Kernel(name, title, arguments, scalars, plan, tiling, cost, g, measures, dialect)


def _programs_of(update: Update, storage: Mapping[str, str]) -> tuple[Program, Program]:
    """The program of a stage, and the part of it that does not measure: of a reduction all of it."""
    if update.only_stage.kind == REDUCTION:
        return (program := reduction_of(update, storage)), program
    return programs_of(update, storage)


def _described(program: Program) -> tuple[str, ...]:
    """What the measures of a reduction are: of each sum its unit, twice the inverse, and its totals."""
    what: dict[int, str] = {}
    for k, pieces in enumerate(program.sums):
        what |= {pieces.unit: "unit of the elements", pieces.inverse: "2 / unit"}
        what |= {index: f"sum {k}, in units: times {factor:g}" for index, factor in pieces.totals}
    return tuple(what[k] for k in range(len(program.measures)))


def reason_against(update: Update) -> str | None:
    """Why no kernels can be generated for `update`, if it is of a kind that none do yet; else None."""
    if update.blocks and (update.by_rows or update.seen_as is not None):
        what = "beside sums of rows or columns" if update.by_rows else "of parameters seen in another shape"
        return f"kernels for NKI do not keep words of blocks {what} yet{AUTO}"
    if not update.is_staged:
        return _reason_against(update)
    if not update.is_cut:
        kinds = ", ".join(stage.kind for stage in update.stages)
        return f"kernels for NKI run one elementwise stage, after some that find numbers; this update has {kinds}"
    parts = (part for part in update.parts if part.stages[0].kind != NUMBERS)
    reasons = (_reason_against(p) or _missing(p) for p in (map(elements_of, parts) if update.by_rows else parts))
    return next(filter(None, reasons), None)


def _missing(update: Update) -> str | None:
    """What a stage of several needs and no instruction does: asked before a step, which then runs as written."""
    try:
        _programs_of(update, storage_of(update, "bf16"))
    except UnsupportedUpdate as error:
        return str(error)
    return None


def _reason_against(update: Update) -> str | None:
    """Why no kernel can be generated for one stage."""
    kinds = [stage.kind for stage in update.stages]
    if kinds not in ([ELEMENTWISE], [REDUCTION]) or update.by_rows:
        return f"a kernel for NKI is one elementwise stage, or a reduction to numbers; this is {', '.join(kinds)}"
    if other := sorted(update.layouts - LAYOUTS):
        return (
            f"kernels for NKI do not lay words out as {', '.join(other)} yet; use backend='xla', or a format whose "
            f"words are {' or '.join(sorted(LAYOUTS))}"
        )
    return None


def _generation(target: str, dialect: str) -> Generation:
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}; choose one of {', '.join(TARGETS)}")
    if dialect not in DIALECTS:
        raise ValueError(f"unknown dialect {dialect!r}; choose one of {', '.join(DIALECTS)}")
    if dialect == "beta1" and target != "trn1":
        raise ValueError(
            f"dialect 'beta1' is for trn1, whose last supported SDKs have no other; use 'nki' for {target}"
        )
    return TARGETS[target]


def _arguments(update: Update, program: Program) -> tuple[Argument, ...]:
    """The components that the kernel uses: those that the update reads, in order, then those that it only writes."""
    dtypes = {k: v.dtype for k, v in program.stores.items()} | {v.name: v.dtype for v in program.loads}
    loaded = {v.name for v in program.loads}
    keys = dict.fromkeys([*update.inputs, *update.outputs])
    blocks = update.blocks
    components = [Argument(k, dtypes[k], k in loaded, k in program.stores, k in blocks) for k in keys if k in dtypes]
    return (*components, *[Argument(MEASURES, "float32", False, True)] * bool(program.measures))


# Updates by rows

OPERAND = "operand"
"""What the elements that a reduction adds up are called, with a number."""


@cache
def elements_of(part: Update) -> Update:
    """A reduction or the last stage of an update by rows (`Update.parts`), with values of rows among its inputs.

    A kernel loads what has a value for each element. So a value of each row, column or matrix that a stage reads
    becomes an operand with one for each element: fp32, 4 bytes more to load, and to write before that. Of a reduction
    the elements that it adds up are stored as they are (`chunk_totals.py` adds them up), in fp32 too, each once:
    `operands_of` has which result adds up which.

    Given (a second moment of rows)::

        stage 0, reduction:    grad -> reduced0                        (the means of the rows of squares)
        stage 1, numbers:      exp_avg_sq_row, reduced0 -> number0
        stage 2, elementwise:  param, grad, number0 -> param

    Result::

        elementwise:  grad -> operand0                                 (its squares)
        elementwise:  param, grad, number0 -> param                    (number0 is an input)
    """
    (stage,) = part.stages
    results, outputs = stage.results, part.outputs
    if stage.kind == REDUCTION:
        added = zip(operands_of(stage), _added(stage), strict=True)
        stored = {key: node for key, node in added if direct(node) is None}
        results, outputs = tuple(stored.values()), tuple(stored)
    spread = tuple(name for name in stage.numbers if part.extents.get(name, NUMBER) != NUMBER)
    numbers = tuple(name for name in stage.numbers if name not in spread)
    inputs = (*stage.inputs, *spread)
    others = (str(n.target) for n in stage.body.nodes if n.op == "placeholder" and n.target not in (*inputs, *numbers))
    body = rearranged(stage.body, (*inputs, *others, *numbers), results)
    new = Stage(ELEMENTWISE, body, inputs, outputs, numbers=numbers)
    formats = {**part.formats, **dict.fromkeys(spread, FORMATS["fp32"])}
    return replace(
        part, stages=(new,), inputs=inputs, outputs=outputs, formats=formats, extents={}, small={}, reads_small=()
    )


def operands_of(stage: Stage) -> list[str]:
    """For each result of a reduction the key of what it adds up: an output of `elements_of`, or a component."""
    added = _added(stage)
    numbers = list(dict.fromkeys(added))
    return [direct(node) or f"{OPERAND}{numbers.index(node)}" for node in added]


def direct(node: fx.Node) -> str | None:
    """The component that a node is, if it is one: no kernel is needed to store it."""
    while node.target is widen:
        (node,) = node.all_input_nodes
    return str(node.target) if node.op == "placeholder" else None


def _added(stage: Stage) -> list[fx.Node]:
    return [result.all_input_nodes[0] for result in stage.results]
