"""What arrives of a step as written: its results beside what their words hold, as the monitor counts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collage_neuron.numerics.reductions import count, total
from collage_neuron.passes.rewrite.instrument import Change, measures_of
from collage_neuron.runtime.step_call import Measured
from collage_neuron.states import word_encoding
from collage_neuron.states.sharding import local

if TYPE_CHECKING:
    from collage_neuron.eager.commit import Stored, Storing


class Changing(NamedTuple):
    """A parameter that a step is about to change."""

    param: Any
    stored: list[Stored]
    before: Mapping[str, list[torch.Tensor]]
    """The words of the parameter and of the states that there were before, which are written over."""
    results: Mapping[str, torch.Tensor]
    number: Any

    def measured(self) -> Measured:
        """Its measurements, once the results are written."""
        changes = {}
        for name, fmt, stored, owner, *_ in self.stored:
            before = word_encoding.of_each(fmt, self.before[name]) if name in self.before else []
            changes[name] = Change(
                fmt, word_encoding.of_each(fmt, [local(x.detach()) for x in (owner, *stored[1:])]), before
            )
        # A stochastic store follows on average: what it leaves out in one step is not lost.
        wanted = {s.name: self.results[s.name] for s in self.stored if s.format.draw is None}
        # The raw update is the difference of the fp32 values: what adding it to the fp32 value loses, nobody sees.
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
    for p, _ in storing.presentation.groups.values():
        stored = [s for s in storing.stored[id(p)] if storing.is_written(s)]
        if any(s.name == "param" for s in stored):
            before = {s.name: _before(s) for s in stored if s.before is not None}
            results = {s.name: local(s.value.detach()).float() for s in stored}
            number = dict.get(storing.optimizer.state, p, {}).get("step")
            found.append(Changing(p, stored, before, results, number))
    return found


def _before(one: Stored) -> list[torch.Tensor]:
    """The words of a value before a step, in the format that it has afterwards."""
    assert one.before is not None
    fmt, before = one.before.fmt, [word.clone() for word in one.before.words()]
    return (
        before
        if fmt is one.format
        else word_encoding.encode(one.format, one.name, word_encoding.decode(fmt, before, one.name))
    )
