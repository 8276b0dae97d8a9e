"""Updates that measure themselves, and what they should measure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch_cases
from exact import on_reference
from planned import capture
from torch import Tensor
from updates import OPTIMIZERS, rewritten

from collage_neuron.numerics.strategies import formats_for
from collage_neuron.passes.analysis.state_roles import roles_of, structure
from collage_neuron.passes.ir.update import Recording, Update
from collage_neuron.passes.ir.verify import verify
from collage_neuron.passes.pipeline import rewrite
from collage_neuron.states import word_encoding
from collage_neuron.states.visible_states import ParamShaped

U = 2.0**-24
"""What one rounding to fp32 may change, relatively."""


DRAWING = [1, 2, 3, 0]
"""Seed, step, parameter and first element, for what is stored by chance."""


class Updates(NamedTuple):
    """One step's update: as it measures itself, and as it returns what it wants, element by element."""

    measured: Update
    recorded: Update
    scalars: Tensor


def updates_of(recording: Recording, strategy: str, arithmetic: str) -> Updates:
    captured = recording.captured
    slow = structure(captured.graph).slow
    formats = formats_for(strategy, captured.states, roles_of(captured, recording.slots), torch.bfloat16)
    recorded = rewritten(captured, formats, arithmetic, {"param", *slow})
    measured = rewrite(captured, formats, arithmetic, frozenset({"param", *slow}))
    verify(recorded)
    return Updates(
        measured, recorded, torch.tensor(measured.scalars.run(recording.slots, DRAWING), dtype=torch.float32)
    )


# Sums and counts in float64, from what was recorded ------------------------------------------------------------------


class Numbers(NamedTuple):
    """Sums, the sums of their terms' magnitudes, and counts, by name."""

    sums: dict[str, float]
    magnitudes: dict[str, float]
    counts: dict[str, int]


def direct(update: Update, old: dict[str, Tensor], new: dict[str, Tensor], wanted: dict[str, Tensor]) -> Numbers:
    """What `update` should measure, written out in float64 from its definition."""
    terms: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for name, fmt in update.formats.items():
        after = word_encoding.decode(fmt, [new[key] for key in fmt.keys(name)]).double()
        high_after = new[name].double()
        if len(fmt.components) > 1 and not fmt.is_coded:
            terms[f"low {name}"] = (after - high_after) ** 2
        if name not in wanted or any(key not in old for key in fmt.keys(name)):
            continue
        before = word_encoding.decode(fmt, [old[key] for key in fmt.keys(name)]).double()
        if name != "param":
            masks[f"falling {name}"] = wanted[name].double() < before
            masks[f"stalled {name}"] = (wanted[name].double() < before) & (after == before)
            continue
        raw = wanted["param"].double()
        masks["zero"], terms["raw"] = raw == 0, raw * raw
        effects = {"pair": after - before, "high": high_after - old["param"].double()}
        for which in effects if len(fmt.components) > 1 else ["pair"]:
            terms[which], terms[f"{which}*raw"] = effects[which] ** 2, effects[which] * raw
            masks[f"lost {which}"] = (raw != 0) & (effects[which] == 0)
    return Numbers(
        {k: float(t.sum()) for k, t in terms.items()},
        {k: float(t.abs().sum()) for k, t in terms.items()},
        {k: int(m.sum()) for k, m in masks.items()},
    )


def measured_by(update: Update, results: Sequence[Tensor]) -> tuple[dict[str, float], dict[str, int]]:
    sums, counts = results[len(update.outputs) :]
    return (dict(zip(update.sums, sums.tolist(), strict=True)), dict(zip(update.counts, counts.tolist(), strict=True)))


TERM = 3.001 * U
"""A term is a product of two differences: three roundings. The reference adds in float64, which counts for nothing."""


UNDERFLOW = 2.0**-120
"""For all terms below 2**-126 together, which have fewer digits."""


def check_on_reference(u: Updates, inputs: Sequence[Tensor]) -> Numbers:
    results = on_reference(u.measured, inputs, u.scalars)
    recorded = on_reference(u.recorded, inputs, u.scalars)
    size = len(u.measured.outputs)
    assert all(map(torch.equal, results[:size], recorded[:size]))  # measuring changes nothing
    old = dict(zip(u.measured.inputs, inputs, strict=True))
    new = dict(zip(u.measured.outputs, results, strict=False))
    expected = direct(u.measured, old, new, dict(zip(u.recorded.wanted, recorded[size:], strict=True)))
    sums, counts = measured_by(u.measured, results)
    assert counts == expected.counts
    assert sums.keys() == expected.sums.keys()
    for name, value in sums.items():
        assert abs(value - expected.sums[name]) <= TERM * expected.magnitudes[name] + UNDERFLOW, name
    return expected


CASES = {k: c for k, c in torch_cases.CASES.items() if not k.endswith(("foreach", "fused", "capturable", "tensors"))}


# What is wanted, against float64 and against the paper ---------------------------------------------------------------


@cache
def hundredth_step(name: str) -> Recording:
    make, states = OPTIMIZERS[name]
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = make([p])
    step = {"step": torch.tensor(99.0)} if "exp_avg" in states else {}
    return capture(type(optimizer), optimizer, optimizer.param_groups[0], p, {s: ParamShaped(p) for s in states} | step)


def updates(name: str, strategy: str, arithmetic: str) -> Updates:
    return updates_of(hundredth_step(name), strategy, arithmetic)
