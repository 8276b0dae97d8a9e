"""What arrives of a step on fp32 copies: its results beside what their words hold, as the monitor counts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collage_neuron.numerics.reductions import count, total
from collage_neuron.passes.rewrite.instrument import Change, measures_of
from collage_neuron.runtime.measured import Measured
from collage_neuron.states import kept_formats, words
from collage_neuron.states.store import is_stored, kept_format

if TYPE_CHECKING:
    from collage_neuron.twins.stored import Stored, Storing


class Changing(NamedTuple):
    """A parameter that a step is about to change."""

    param: Any
    stored: list[Stored]
    before: Mapping[str, list[torch.Tensor]]
    """The words of the parameter and of the states that there were before, which are written over."""
    results: Mapping[str, torch.Tensor]
    number: Any

    def measured(self) -> Measured:
        """Its measurements, once the results are written.

        The raw update is the fp32 difference of the copies: what adding it to the fp32 value loses, nobody sees.
        """
        changes = {}
        for name, fmt, stored in self.stored:
            before = words.of_each(fmt, self.before[name]) if name in self.before else []
            changes[name] = Change(fmt, words.of_each(fmt, stored), before)
        wanted = {s.name: self.results[s.name] for s in self.stored if s.format.draw is None}
        wanted["param"] = self.results["param"] - changes["param"].fmt.decoder("param")(changes["param"].old)
        found = measures_of(changes, wanted)
        return Measured(
            self.param,
            (tuple(found.sums), tuple(found.counts)),
            torch.stack([total(x) for x in found.sums.values()]),
            torch.stack([count(mask) for mask in found.counts.values()]),
            self.number,
        )


def changes_of(storing: Storing) -> list[Changing]:
    """The parameters that `storing` is about to write, with copies of the words that it writes over."""
    found = []
    for p, stored in storing.stored.items():
        left, given = storing.left[p], {"param", *storing.copies.given.get(p, {})}
        if any(s.name == "param" for s in stored):
            before = {s.name: _before(storing, p, s) for s in stored if s.name in given}
            found.append(Changing(p, stored, before, left.values, left.state.get("step")))
    return found


def _before(storing: Storing, p: torch.Tensor, one: Stored) -> list[torch.Tensor]:
    """The words of a value before a step, in the format that it has afterwards."""
    original = storing.copies.original
    state, record = original.state.get(p, {}), kept_formats.of(original, p)
    fmt, kept = kept_format(p, state, one.name, record), {**state, "param": p.detach()}
    before = [kept[key].clone() for key in fmt.keys(one.name)]
    if is_stored(p, state, one.name, one.format, record):
        return before
    return words.encode(one.format, one.name, words.decode(fmt, before, one.name))
