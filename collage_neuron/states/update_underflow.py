"""Warns of steps, and of decays of weights, that the format of the parameters loses (`numerics/underflow.py`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.fx as fx
from torch.optim import Optimizer

from collage_neuron.errors import warn_user
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.rounding import digits
from collage_neuron.numerics.strategies import DEFAULT, bytes_with_adam, param_format
from collage_neuron.numerics.underflow import LOST, Pace, Scale, cheapest, is_short, lost
from collage_neuron.passes.analysis.state_roles import decays, denominators
from collage_neuron.passes.ir.recording import Recording
from collage_neuron.settings import Settings
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import local

WARNED = "_collage_warned"
"""The attribute of a compiled class with the optimizers of it that were warned of, by what they were warned of."""

STEPS, DECAY = "small steps", "small decay"
"""What a group is warned of, once of each."""

RATES = ("lr", "initial_lr", "max_lr")
"""Where a group and its schedulers keep learning rates: the largest counts."""


class SmallSteps(UserWarning):
    """Steps, or the decay of weights, are so small that the format of the parameters loses a part of each."""


@dataclass(frozen=True)
class Group:
    """A group of an optimizer, which is warned of once: of its steps, and of its decay."""

    optimizer: Optimizer
    index: int
    settings: Settings
    cls: type
    """The compiled class of the optimizer, which may not have it yet."""

    @property
    def format(self) -> Format:
        """The format of its bf16 parameters."""
        return param_format(self.settings.strategy, torch.bfloat16)

    def check(self, params: Sequence[torch.Tensor], recording: Recording) -> None:
        """Warns if its steps or its decay are too small for the format of `params`.

        The steps of an update that divides by a root or takes a sign (Adam, Lion) have the size of the learning rate;
        of others they are measured (`validation/arrived.py`). What a scheduler that warms up has set first does not
        count.
        """
        open_ = [what for what in (STEPS, DECAY) if not self.is_warned(what)]
        if not is_short(self.format) or not open_:
            return
        group, sizes = self.optimizer.param_groups[self.index], _sizes(params)
        largest = rate_of(group)
        scale = Scale(
            largest if _is_normalized(recording.captured.graph) else 0.0,
            max(sizes.values(), default=0.0),
            _decay(recording, rate_of(group, ("lr",)), largest),
        )
        lost = {STEPS: scale.lost(self.format) > LOST, DECAY: scale.loses_decay(self.format)}
        if lacking := {what for what in open_ if lost[what]}:
            self.warn(lacking, _sentence(lacking, self.format, scale, sizes), scale)

    def follow_schedule(self, rate: float, params: Sequence[torch.Tensor], recording: Recording) -> None:
        """Adds up what a schedule loses whenever it changes the rate; warns where it lowers it too far.

        Rates that rise do not warn: warming up is short.
        """
        fmt, book = self.format, bookkeeping(self.optimizer)
        if not is_short(fmt) or self.is_warned(STEPS) or not _is_normalized(recording.captured.graph):
            return
        if self.index not in book.paces:
            size = max(_sizes(params).values(), default=0.0)
            book.paces[self.index] = Pace(size, rate, rate_of(self.optimizer.param_groups[self.index]), book.steps)
            return
        pace, falls = book.paces[self.index], rate < book.paces[self.index].rate
        pace.advance(rate, book.steps, 2.0 ** -digits(fmt) * pace.size)
        if falls and pace.share() > LOST:
            said = (
                f"keeps parameters as {fmt.name}, which rounds weights of {pace.size:.2g} by up to "
                f"{2.0 ** -digits(fmt) * pace.size:.2g}, and the schedule has lowered the learning rate from "
                f"{pace.largest:.2g} to {rate:.2g}: about {pace.share():.1g} of the way so far is lost, and more of "
                "each further step"
            )
            self.warn({STEPS}, said, Scale(rate, pace.size, 0.0))

    def is_measured(self, fmt: Format, graph: fx.Graph) -> bool:
        """Returns True if `check` cannot know its steps, and it is still to be warned of if they are small."""
        told = bookkeeping(self.optimizer).told
        return is_short(fmt) and _once(self.index, STEPS) not in told and not _is_normalized(graph)

    def warn_measured(self, fmt: Format, arrived: float) -> None:
        """Warns that only the share `arrived` of its steps reaches the parameters."""
        if not self.is_warned(STEPS):
            said = (
                f"keeps parameters as {fmt.name}, and {max(arrived, 0.0):.0%} of the steps that were looked at arrived "
                "there: they are too small beside the rounding of the weights, which is "
                f"{2.0 ** -digits(fmt):.2g} of each"
            )
            self.warn({STEPS}, said, None)

    def is_warned(self, what: str) -> bool:
        """Returns True if it was warned of, or another optimizer of its class, of which there may be hundreds.

        Optimizers of one parameter each, which step in the hooks of its gradient, are alike: one warning speaks for
        all.
        """
        by_another = any(other is not self.optimizer for other in _warned(self.cls, what))
        return by_another or _once(self.index, what) in bookkeeping(self.optimizer).told

    def warn(self, lacking: Collection[str], said: str, scale: Scale | None) -> None:
        """Warns of what it is `lacking`, with a remedy for that scale."""
        for what in lacking:
            bookkeeping(self.optimizer).told.add(_once(self.index, what))
            _warned(self.cls, what).add(self.optimizer)
        size = bytes_with_adam(DEFAULT)
        remedy = f"The default, {DEFAULT!r} ({size} bytes per parameter with Adam), loses what fp32 loses"
        name = cheapest(scale) if scale is not None else DEFAULT
        if name is not None and name != DEFAULT:
            remedy = f"strategy={name!r} ({bytes_with_adam(name)} bytes per parameter with Adam) keeps them. {remedy}"
        arithmetic = self.settings.arithmetic
        under = f"; it needs arithmetic='fp32', and this is {arithmetic!r}" if arithmetic != "fp32" else ""
        warn_user(
            f"param_groups[{self.index}]: strategy={self.settings.strategy!r} {said}. {remedy}{under}. If this is "
            "intended, filter this warning (collage_neuron.SmallSteps)",
            SmallSteps,
        )


def rate_of(group: Mapping[str, Any], keys: Sequence[str] = RATES) -> float:
    """The largest learning rate that a group has under `keys`; 0.0 if it has none."""
    return max((float(group[key]) for key in keys if isinstance(group.get(key), (int, float, torch.Tensor))), default=0)


def _once(index: int, what: str) -> str:
    return f"{what} {index}"


def _warned(cls: type, what: str) -> WeakSet[Optimizer]:
    """The living optimizers of a compiled class that were warned of it."""
    warned: dict[str, WeakSet[Optimizer]] = getattr(cls, WARNED)
    return warned.setdefault(what, WeakSet())


def _is_normalized(graph: fx.Graph) -> bool:
    return bool(denominators(graph)) or any("sign" in str(node.target) for node in graph.nodes)


def _decay(recording: Recording, rate: float, largest: float) -> float:
    """The decay of the parameter when its group reaches the largest rate, with which it grows."""
    decay = decays(recording.captured.graph, recording.slots).get("param", 0.0)
    return decay * largest / rate if rate > 0 else decay


def _sentence(lacking: Collection[str], fmt: Format, scale: Scale, sizes: Mapping[torch.Tensor, float]) -> str:
    parts = []
    if STEPS in lacking:
        coarse = [p for p, size in sizes.items() if lost(scale.rate, 2.0 ** -digits(fmt) * size) > LOST]
        worst = max(coarse, key=lambda p: sizes[p])
        parts.append(
            f"rounds weights of {scale.size:.2g} (the root mean square of a parameter) by up to "
            f"{2.0 ** -digits(fmt) * scale.size:.2g}, and the learning rate is {scale.rate:.2g}: about "
            f"{scale.lost(fmt):.1g} of the way of {len(coarse)} of its {len(sizes)} parameters is lost (the worst has "
            f"shape {list(worst.shape)})"
        )
    if DECAY in lacking:
        parts.append(
            f"cannot hold a decay of {scale.decay:.2g} a step (learning rate times weight decay), which is less than "
            f"the rounding of a weight, {2.0 ** -digits(fmt):.2g} of it: where gradients are zero (unused rows of an "
            "embedding, idle experts, masks), most of the decay is lost"
        )
    return f"keeps parameters as {fmt.name}, which " + "; it ".join(parts)


def _sizes(params: Sequence[torch.Tensor]) -> dict[torch.Tensor, float]:
    """The root mean square of each parameter that is looked at, in one transfer; 0.0 if it is not finite.

    On a lazy device, from which each is fetched, vectors (gains near 1) and the smallest matrix are looked at.
    """
    matrices = sorted((p for p in params if _is_lazy(p) and p.dim() > 1), key=torch.numel)
    left_out = set(map(id, matrices[1:]))
    looked_at = [p for p in params if id(p) not in left_out and not p.is_meta and local(p.detach()).numel()]
    if not looked_at:
        return {}
    parts = (local(p.detach()) for p in looked_at)
    # To the host, since a lazy device would compile a program for each shape.
    squares = [(x.cpu() if _is_lazy(x) else x).float().square().mean() for x in parts]
    sizes = torch.stack([x.to(squares[0].device) for x in squares]).sqrt().tolist()
    return {p: size if math.isfinite(size) else 0.0 for p, size in zip(looked_at, sizes, strict=True)}


def _is_lazy(p: torch.Tensor) -> bool:
    return p.device.type in ("xla", "neuron")
