"""The pass `instrument`: adds sums and counts to an update that measure how much of it arrives in the stored values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.fx as fx

from collage_neuron.numerics.eft import Value, narrow, widen
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.reductions import count, total
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.rewrite.graph_writer import Writer


@dataclass(frozen=True)
class Instrument:
    """Replaces what an update wants by sums and counts of what its stores made of that.

    Given: an update that also returns the raw update `mul_1`, which it adds to `param`, here stored as bf16x2::

        mul_1 = mul(widen_2, c0)
        add_1 = add(add, mul_1)
        return (narrow, narrow_1, mul_1) as (param, param_lo, wanted param)

    Result: the same, and what has arrived of `mul_1`. Of all that is measured, `pair*raw` and `lost pair`::

        ne = ne(mul_1, 0.0)
        add_2 = add(widen_3, widen_4)
        add_3 = add(widen_5, widen_6)
        sub_1 = sub(add_2, add_3)
        mul_4 = mul(sub_1, mul_1)
        eq_1 = eq(sub_1, 0.0)
        logical_and = logical_and(ne, eq_1)
        total_2 = total(mul_4)
        count_1 = count(logical_and)

    What each is called and means:

    ===================  ==============================================================================================
    `raw`                sum of squares of the raw update: what the update adds to the parameter, before it is added
    `pair`, `high`       the same of the effective update, new value minus old, of all components, of the first alone
    `pair*raw`           sum of products of effective and raw update
    `zero`               elements whose raw update is 0
    `lost pair`          elements whose raw update is not 0 and whose effective update is
    `low NAME`           sum of squares of what the first component of a value leaves to the others, after the update
    `falling NAME`       elements of a state that should become smaller
    `stalled NAME`       elements of a state that should become smaller, and stay as they are stored
    ===================  ==============================================================================================

    `high`, `high*raw` and `lost high` are left out where a value has one component: they are those of the pair. Values
    are compared and subtracted as their format decodes them, in fp32.
    """

    name: ClassVar[str] = "instrument"

    def __call__(self, update: Update) -> Update:
        """`update` with its wanted values replaced by the sums and counts in the table above."""
        writer, results = Writer.after(update)
        writer.begin("what has arrived")
        old = writer.inputs
        new = {key: writer.proxy(_unstored(x.node)) for key, x in zip(update.outputs, results, strict=False)}
        outputs = len(new) + len(update.small)  # what is stored; of parameters and states, and of those of one number
        wanted = dict(zip(update.wanted, results[outputs:], strict=True))
        changes = {
            name: Change(fmt, [new[key] for key in fmt.keys(name)], [old[key] for key in fmt.keys(name) if key in old])
            for name, fmt in update.formats.items()
        }
        measures = measures_of(changes, wanted)
        writer.begin("sums and counts")
        added_up = [total(x) for x in measures.sums.values()] + [count(mask) for mask in measures.counts.values()]
        return update.with_body(
            writer.finish([*results[:outputs], *added_up]),
            wanted=(), sums=tuple(measures.sums), counts=tuple(measures.counts),
        )  # fmt: skip


class Measures(NamedTuple):
    """What is added up and what is counted, by name: a value and a mask for each element."""

    sums: dict[str, Value]
    counts: dict[str, Value]

    def square(self, name: str, x: Value) -> None:
        """Sums the squares of `x`."""
        self.sums[name] = x * x


class Change(NamedTuple):
    """A value's format, and its components after and before the update; none before it, if there was no value."""

    fmt: Format
    new: list[Value]
    old: list[Value]

    @property
    def effects(self) -> dict[str, Value]:
        """Measures the change of the value, and that of its first component alone if there are others."""
        pair = {"pair": self.fmt.decode(self.new) - self.fmt.decode(self.old)}
        return (
            pair
            if len(self.new) == 1 or self.fmt.is_coded
            else pair | {"high": widen(self.new[0]) - widen(self.old[0])}
        )


def measures_of(changes: Mapping[str, Change], wanted: Mapping[str, Value]) -> Measures:
    """What is measured of the changes of a parameter and its states: in a graph, or with tensors.

    `wanted` has the raw update (`param`), and what a state would be if its format kept every number.
    """
    measures = Measures({}, {})
    for name, change in changes.items():
        # A state that this step makes has no value before it, with which the new one could be compared.
        if name in wanted and change.old:
            (_of_param if name == "param" else _of_state)(measures, name, change, wanted[name])
        if len(change.new) > 1 and not change.fmt.is_coded:
            measures.square(f"low {name}", change.fmt.decode(change.new) - widen(change.new[0]))
    return measures


def _of_param(measures: Measures, name: str, change: Change, raw: Value) -> None:
    pushed = raw != 0.0
    measures.square("raw", raw)
    measures.counts["zero"] = raw == 0.0
    for which, effective in change.effects.items():
        measures.square(which, effective)
        measures.sums[f"{which}*raw"] = effective * raw
        measures.counts[f"lost {which}"] = torch.logical_and(pushed, effective == 0.0)


def _of_state(measures: Measures, name: str, change: Change, wanted: Value) -> None:
    old, new = change.fmt.decode(change.old), change.fmt.decode(change.new)
    falling = wanted < old
    measures.counts[f"falling {name}"] = falling
    measures.counts[f"stalled {name}"] = torch.logical_and(falling, new == old)


def _unstored(node: fx.Node) -> fx.Node:
    """The fp32 value of a stored component; the operand of a `narrow` already is a number of the format."""
    value = node.args[0] if node.target is narrow else node
    assert isinstance(value, fx.Node)
    return value
