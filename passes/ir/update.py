"""The forms of an update: `Captured`, of which a `Recording` has one step; and `Update`, in explicit-rounding form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.reductions import ENDINGS, NUMBER, OF_TENSOR, extent_of
from collage_neuron.passes.ir.scalars import Scalar, ScalarProgram
from collage_neuron.passes.ir.stage import BETWEEN, ELEMENTWISE, JOINED, NUMBERS, REDUCTION, Stage

if TYPE_CHECKING:
    from collage_neuron.numerics.formats import Format


NEAR = 0.5
"""From which magnitude on a factor counts as near 1."""


# Equal by identity: backends keep what they compile by the object, and `pipeline.rewrite` makes one of equal updates.
@dataclass(frozen=True, eq=False)
class Update:
    """An update in explicit-rounding form: what every backend lowers."""

    stages: tuple[Stage, ...]
    """Its stages, in order; values between them are fp32. `sums`, `counts` and `wanted` are results of the last."""
    inputs: tuple[str, ...]
    """Keys of the components it reads: `param`, `grad`, `exp_avg`, ..., `param_lo`, ... ."""
    outputs: tuple[str, ...]
    """Keys of the components it returns: all but `grad`, and that too if the step writes to the gradient."""
    scalars: ScalarProgram
    """How the scalar vector is computed from the slots of a step."""
    formats: Mapping[str, Format]
    """Storage format of the parameter and of each state."""
    wanted: tuple[str, ...] = ()
    """Fp32 values that it returns after the outputs, as they are before any is stored: for the pass `instrument`."""
    sums: tuple[str, ...] = ()
    """Sums over all elements that it returns after the outputs: what `instrument` made of `wanted`."""
    counts: tuple[str, ...] = ()
    """Numbers of elements that it returns after those."""
    draws: bool = False
    """True if it draws random bits (`Randomness`): its graphs read, after their inputs, each element's `index`."""
    stored: bool = True
    """False between the passes `expand` and `store`: outputs are values then, or the words of one, not components."""
    small: Mapping[str, str] = field(default_factory=dict)
    """States in fp32 without a value for each element: the name of the stages' number that each becomes."""
    reads_small: tuple[str, ...] = ()
    """Those of which it reads the value before the step, as a number by the name of the state."""
    extents: Mapping[str, str] = field(default_factory=dict)
    """Of states of rows and columns, and of numbers of the stages that are such: the extent. Others are one number."""
    seen_as: tuple[int, ...] | None = None
    """The shape in which it sees the parameter and its components (`Captured.seen_as`): that of those in a launch."""
    decisive: tuple[Scalar, ...] = ()
    """Factors of the parameter on which its form depends: x * s is computed as x + x * (s - 1) only near 1."""
    far: frozenset[Scalar] = frozenset()
    """Those for which it has the other form."""

    def far_in(self, slots: Sequence[float]) -> frozenset[Scalar]:
        """The factors that are nearer to 0 than to 1, given the slots of a step: `far` has to be these."""
        return frozenset(s for s in self.decisive if abs(s.value(slots)) < NEAR)

    @classmethod
    def elementwise(
        cls,
        body: fx.Graph,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        scalars: ScalarProgram,
        formats: Mapping[str, Format],
        small: Sequence[str] = (),
        **others: Any,
    ) -> Update:
        """The update of one elementwise stage, which does it all; `others` are further fields.

        With reductions in it, or states of one number, the stage is a joined one; new values of the states `small` are
        among its results after `outputs`.
        """
        read = tuple(others.get("reads_small", ()))
        joins = small or read or any(node.target in OF_TENSOR or node.target in ENDINGS for node in body.nodes)
        stage = Stage(JOINED if joins else ELEMENTWISE, body, inputs, outputs, tuple(small), read)
        return cls((stage,), inputs, outputs, scalars, formats, small={name: name for name in small}, **others)

    def with_body(self, body: fx.Graph, **others: Any) -> Update:
        """The same with another graph for its only stage; `others` are fields that change with it."""
        stage = replace(self.only_stage, body=body, outputs=others.get("outputs", self.outputs))
        return replace(self, stages=(stage,), **others)

    @cached_property
    def of_states(self) -> tuple[str, ...]:
        """Keys of the components that are in states: all but the parameter itself and its gradient."""
        return tuple(key for key in dict.fromkeys((*self.inputs, *self.outputs)) if key not in ("param", "grad"))

    @property
    def layouts(self) -> frozenset[str]:
        """How the words of its components lie in memory: a backend runs it only if it knows all of them."""
        return frozenset(c.layout for fmt in self.formats.values() for c in fmt.components)

    @cached_property
    def blocks(self) -> dict[str, int]:
        """The components whose words are shared by blocks of elements, by key, and the sizes of their blocks."""
        return {
            key: c.block
            for name, fmt in self.formats.items()
            for key, c in zip(fmt.keys(name), fmt.components, strict=True)
            if c.block
        }

    @property
    def is_cut(self) -> bool:
        """Returns True if its last stage is elementwise, and all before it give numbers: what `cut` makes."""
        *before, last = [stage.kind for stage in self.stages] or [""]
        # Stages meet in numbers alone: none reads a component that another one has stored.
        read = {key for stage in self.stages for key in stage.inputs if before}
        return last == ELEMENTWISE and {REDUCTION, NUMBERS, BETWEEN}.issuperset(before) and read.issubset(self.inputs)

    @cached_property
    def by_rows(self) -> bool:
        """Returns True if it has reductions over rows or columns, or states of such: rows are worked on one by one."""
        return any(extent != NUMBER for extent in self.extents.values()) or any(
            node.target in ENDINGS for stage in self.stages for node in stage.body.nodes
        )

    @cached_property
    def between(self) -> tuple[tuple[object, ...], ...]:
        """What it needs of other processes that have parts of its parameters, in order: how, and of which group."""
        return tuple(node.args[1:] for stage in self.stages if stage.kind == BETWEEN for node in stage.results)

    @cached_property
    def is_staged(self) -> bool:
        """Returns True if numbers have to be found for each parameter before the last stage, or stored after it."""
        return len(self.stages) > 1 or bool(self.small or self.reads_small)

    @cached_property
    def parts(self) -> tuple[Update, ...]:
        """Its stages as updates of one stage each: what a backend compiles. Of an elementwise update, itself."""
        if not self.is_staged:
            return (self,)
        *before, last = self.stages
        # Only the last stage stores, measures, and draws random bits.
        others = [replace(self, stages=(s,), inputs=s.inputs, outputs=(), **_NOTHING_MORE) for s in before]
        return (*others, replace(self, stages=(last,), **_NOTHING_SMALL))

    @property
    def only_stage(self) -> Stage:
        """The stage of an update that has one, if that computes something of each element; else UnsupportedUpdate."""
        if [stage.kind for stage in self.stages] not in ([ELEMENTWISE], [JOINED], [REDUCTION]):
            kinds = ", ".join(stage.kind for stage in self.stages)
            raise UnsupportedUpdate(f"the update has the stages {kinds}; only one elementwise stage can be run here")
        return self.stages[0]

    @property
    def graph(self) -> fx.GraphModule:
        """That of `only_stage`: `forward(*inputs, *scalars) -> tuple of outputs`, with `index` between if it draws."""
        return self.only_stage.graph


_NOTHING_SMALL: Mapping[str, Any] = {"small": {}, "reads_small": ()}
_NOTHING_MORE: Mapping[str, Any] = {"wanted": (), "sums": (), "counts": (), "draws": False, **_NOTHING_SMALL}


@dataclass(frozen=True)
class Captured:
    """The update of one parameter: functional, on fp32 values, with every number a slot."""

    graph: fx.Graph
    """Placeholders `param`, `grad`, the states, s0, s1, ...; returns the new values by name."""
    states: tuple[str, ...]
    """Names of the parameter-shaped states that the update leaves behind."""
    fresh: Mapping[str, float]
    """Value each state is filled with before the first step, for states the recorded step created."""
    text: str
    """The graph as Python: equal for equal updates."""
    clears_gradient: bool = False
    """True if the step sets `p.grad = None`. If it writes to the gradient instead, the graph returns a `grad`."""
    reduces: bool = False
    """True if an element depends on others of its parameter: a part of it must not be updated alone."""
    small: tuple[str, ...] = ()
    """Names of the states that the update leaves behind and that have no value for each element: of one number (0-d
    tensors), of rows, of columns."""
    axes: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    """Of those with dimensions, by name: for each the dimension of the parameter along which it runs, counted from the
    last one, which is -1; None for a dimension of one element."""

    seen_as: tuple[int, ...] | None = None
    """The shape in which the graph sees the parameter, its gradient and its states, if not in their own: then all of
    them have to be contiguous. Rows and columns are those of this shape."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The states with a value for each element, by name, whose own shape is not the parameter's, and these shapes."""

    def shape_of(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a state, for a parameter of that shape."""
        if name in self.states:
            return self.shapes.get(name, tuple(shape))
        sizes = self.seen_as or shape
        return tuple(1 if a is None else sizes[a] for a in self.axes.get(name, ()))

    def may_be_of(self, shape: Sequence[int]) -> bool:
        """Returns True if a parameter of that shape has all dimensions along which states run."""
        along = [a for axes in self.axes.values() for a in axes if a is not None]
        return -min(along, default=0) <= len(self.seen_as or shape)

    def extent_of(self, name: str) -> str:
        """The extent of a state of `small` (`numerics.reductions`)."""
        # Extents know matrices, rows and columns: all dimensions before the last two count as that of matrices.
        along = {max(a + 3, 0) for a in self.axes.get(name, ()) if a is not None}
        return extent_of(along | {0} if along else along)


@dataclass(frozen=True)
class Recording:
    """One recorded step: the update, its numbers, and the host scalars after the step."""

    captured: Captured
    slots: list[float]
    """The numbers; where parameters of a job have numbers of their own, those of the first."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """Host scalars of the parameter's state after the step (`step`, ...)."""
    by_shape: bool = False
    """True if parameters of other shapes may have other updates."""
    following: Recording | None = None
    """The step after, if this one makes a state of the gradient and does not show what becomes of it."""
    kind: Any = None
    """The calls of the step that was recorded (`trace.step_kinds.StepKind`); with their numbers it is validated."""
    numbers: Sequence[float] = ()
    followed: Any = None
    """What computes the numbers of later steps like it (`trace.recorded_classes.Followed`), if that is known."""
    rows: Sequence[list[float]] = ()
    """The slots of each parameter of a job, in its order, where they have numbers of their own."""

    def of(self, places: Sequence[int]) -> Recording:
        """That of some parameters of a job, by their places there."""
        if not self.rows:
            return self
        rows = [self.rows[i] for i in places]
        return replace(self, slots=rows[0], rows=rows if len(rows) > 1 else ())
