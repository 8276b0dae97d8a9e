"""What a strategy says of states, compared with those of an update: names that it has not, and formats too narrow.

A name in a mapping that no parameter has a state of is a spelling mistake. Optimizers that run Muon and Adam in one
step have states that only some parameters have: one mapping names them all.

`plus` gives two words to states that are recognised to accumulate slowly (`passes/analysis/state_roles.py`). First
moments lose little in bf16. Any other state of which the parameter's update takes a root, or by which it divides, may
be a second moment that was not recognised: it would stand still, and the step could be wrong by any factor.

A mapping is the user's choice, and only one kind is warned of: codes with signs have a code for 0, which is what they
make of numbers that are small beside the largest of their block. Where the update divides by them, that is a division
by 0: AdamW with second moments in fp16 ends three times its whole way off (docs/development/fp8.md, `rows`).

A second moment in one word of 8 digits (`light`) decreases by less than half an ulp where its decay is below 2**-8 a
step, and what is rounded to nearest then never does: after a burst of gradients, steps stay too short. Strategies that
keep no more of the parameter than one rounded word (`bf16`) lose more than that by choice, and are not warned of.

Steps, and decays of weights, that the format of the parameters loses are warned of too (`numerics/underflow.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.fx as fx
from torch.optim import Optimizer

from collage_neuron.errors import warn_user
from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.numerics.strategies import DEFAULT, STRATEGIES, StrategyLike, bytes_with_adam, param_format
from collage_neuron.numerics.underflow import LOST, Pace, Scale, cheapest, digits, is_short, lost
from collage_neuron.passes.analysis.state_roles import decays, structure
from collage_neuron.passes.ir.update import Recording
from collage_neuron.settings import Settings
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import local

Shown = Iterable[tuple[dict[str, Any], Collection[str]]]
"""Groups, each with the names of states of an update, or of a parameter, of it."""


def check_names_as_written(optimizer: Optimizer, shown: Mapping[torch.Tensor, Collection[str]]) -> None:
    """Checks a step as written before its results are stored; `shown` are the states of each parameter after it.

    Warns instead if there are parameters that have had no gradient so far, and may have such a state later.

    Raises:
        ValueError: a mapping names a state that no parameter of the groups with that mapping has.
    """
    strategies = [Settings.of(group).strategy for group in optimizer.param_groups]
    of_groups = ((group, shown.get(p, ())) for group in optimizer.param_groups for p in group["params"])
    for names, params, text in _misspelt(optimizer, strategies, of_groups):
        if not any(p.requires_grad and p.grad is None and not shown[p] for p in params):
            raise ValueError(text)
        if any(p.grad is not None for p in params):
            said = f"{text}. Some parameters had no gradient so far: if none of them has it, it is misspelt"
            warn_user(said)
            bookkeeping(optimizer).named.add(names)


def check_names(optimizer: Optimizer, strategies: Sequence[StrategyLike], shown: Shown, in_step: bool = True) -> None:
    """Checks the strategies of the groups, each mapping once, against the states of updates, with their groups.

    In a step parameters without a gradient may have other states, and nothing is said yet.

    Raises:
        ValueError: a mapping names a state that no parameter of the groups with that mapping has.
    """
    for _, params, text in _misspelt(optimizer, strategies, shown):
        if not (in_step and any(p.requires_grad and p.grad is None for p in params)):
            raise ValueError(text)


def _misspelt(
    optimizer: Optimizer, strategies: Sequence[StrategyLike], shown: Shown
) -> Iterator[tuple[frozenset[str], list[torch.Tensor], str]]:
    """The names in mappings that are not all states, the parameters that have this mapping, and what is wrong.

    Each mapping whose names are states is noted, and not looked at again.
    """
    by_names: dict[frozenset[str], list[dict[str, Any]]] = {}
    for group, strategy in zip(optimizer.param_groups, strategies, strict=True):
        if isinstance(strategy, Mapping) and group["params"]:
            by_names.setdefault(frozenset(strategy.keys() - {"param", "*"}), []).append(group)
    known = bookkeeping(optimizer).named
    there = list(shown) if by_names else []
    for names, groups in by_names.items():
        if not names or names in known:
            continue
        ids = set(map(id, groups))
        states = dict.fromkeys(name for group, own in there if id(group) in ids for name in own)
        if names <= states.keys():
            known.add(names)
            continue
        first, every = min(names.difference(states)), ", ".join(["param", *states])
        text = f"the strategy names {first!r}; this update has {every} (and `*`: the rest)"
        yield names, [p for group in groups for p in group["params"]], text


# --- states in too few bits -------------------------------------------------------------------------------------------


class ImpreciseState(UserWarning):
    """A state by which the update divides is kept in bf16 and may stand still; the message names it and the remedy."""


def imprecise_states(graph: fx.Graph, settings: Settings, dtype: torch.dtype) -> frozenset[str]:
    """Names of the states of a captured update to which a strategy gives fewer bits than they may need.

    Strategies that store all states alike are never reported: they are the user's choice.
    """
    if dtype == torch.float32:
        return frozenset()
    if not isinstance(settings.strategy, str):
        names, others = structure(graph).denominators, settings.strategy.get("*", "bf16")
        formats = {name: format_named(settings.strategy.get(name, others)) for name in names}
        # With signs, numbers that are small beside their neighbours become 0.
        return frozenset(name for name, fmt in formats.items() if fmt.is_coded and fmt.signed)
    strategy = STRATEGIES[settings.strategy]
    if format_named(strategy.slow).bytes <= format_named(strategy.state).bytes:
        return frozenset()
    return structure(graph).lossy_denominators


def warn_imprecise(
    base: type[Optimizer], optimizer: Optimizer, graph: fx.Graph, settings: Settings, formats: Mapping[str, Format]
) -> None:
    """Warns of the imprecise states of an update of bf16 parameters, of each once in the life of an optimizer."""
    warned = bookkeeping(optimizer).told
    imprecise = imprecise_states(graph, settings, torch.bfloat16) & formats.keys()  # others are one number, in fp32
    new = sorted(name for name in imprecise - warned if formats[name].name != "fp32")
    if new:
        warned.update(new)
        warn_user(_imprecise_sentence(base, new, graph, settings, formats), ImpreciseState)


def warn_stuck(
    base: type[Optimizer], optimizer: Optimizer, recording: Recording, settings: Settings, formats: Mapping[str, Format]
) -> None:
    """Warns of averages of magnitudes that cannot decrease in their formats, of each once for an optimizer."""
    compensated = len(formats["param"].components) > 1 or formats["param"].draw is not None
    stuck = _stuck(recording, formats) if compensated else {}
    warned = bookkeeping(optimizer).told
    new = sorted(name for name in stuck if f"stuck {name}" not in warned)
    if new:
        warned.update(f"stuck {name}" for name in new)
        warn_user(
            f"{base.__name__}: strategy={settings.strategy!r} keeps {', '.join(f'state[p][{n!r}]' for n in new)} in "
            f"{formats[new[0]].name}, where it cannot decrease: its decay of {stuck[new[0]]:.2g} a step is less than "
            "half an ulp, and is rounded away. After some steps with larger gradients it stays as large as it was, and "
            "all later steps are too short (docs/strategies.md has an example). Use strategy='plus', which keeps it as "
            "a pair, or 'split323', which needs the bytes of 'light'; if gradients have no bursts, filter this warning "
            "(collage_neuron.ImpreciseState)",
            ImpreciseState,
        )


def _stuck(recording: Recording, formats: Mapping[str, Format]) -> dict[str, float]:
    """The decays of the averages of magnitudes that are rounded to nearest, and which half an ulp is larger than."""
    graph = recording.captured.graph
    words = [n for n in structure(graph).slow if n in formats and formats[n].draw is None and not formats[n].is_coded]
    narrow = [n for n in words if digits(formats[n]) <= digits(format_named("bf16"))]
    decay_of = decays(graph, recording.slots) if narrow else {}
    return {n: decay_of[n] for n in narrow if n in decay_of and decay_of[n] < 2.0 ** -digits(formats[n])}


def _imprecise_sentence(
    base: type[Optimizer], names: Sequence[str], graph: fx.Graph, settings: Settings, formats: Mapping[str, Format]
) -> str:
    which = ", ".join(f"state[p][{name!r}]" for name in names)
    if not isinstance(settings.strategy, str):
        return (
            f"{base.__name__}: the strategy keeps {which} in {formats[names[0]].name}, and the update divides by it or "
            "takes its root: what is small beside the largest number of its block becomes 0 there, and steps of that "
            "element far too long. Use a format without signs, which has no 0 ('u16q16', 'u8q16'), or one with a "
            "number for each element ('bf16+int8'); if that cannot happen here, filter this warning "
            "(collage_neuron.ImpreciseState)"
        )
    wide = format_named(STRATEGIES[str(settings.strategy)].slow).name
    mapping = {"param": formats["param"].name} | dict.fromkeys(sorted({*structure(graph).slow, *names}), wide)
    return (
        f"{base.__name__}: strategy={settings.strategy!r} keeps {which} in {formats[names[0]].name}, and the update "
        "divides by it or takes its root. It adds to itself in a way that is not recognised as a second moment; if it "
        "is one, with a decay near 1, what is less than 2**-9 of it is lost in every step, and it stands still. Use "
        f"strategy='full', or strategy={mapping!r}; if one word is enough for it, filter this warning "
        "(collage_neuron.ImpreciseState)"
    )


# --- steps and decays that are lost -----------------------------------------------------------------------------------


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
    return bool(structure(graph).denominators) or any("sign" in str(node.target) for node in graph.nodes)


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
