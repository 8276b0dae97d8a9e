"""Strategies, which map the parameter and each kind of optimizer state to a storage format. A strategy is data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal

import torch

from collage_neuron.numerics.formats import BUILT_IN, Format, format_named, reads_alike

ARITHMETICS = ("fp32", "bf16")
"""`fp32`: values stay fp32 between load and store. `bf16`: the paper's, every operation rounds to bf16."""


Role = Literal["slow", "sum", "signed", "idle", "decaying", "maximum", "average", "long", "counter"]
"""What an update shows of a state (passes/analysis/state_roles.py); of states that are not recognised, nothing.

`slow`: an average or maximum of what cannot be negative; `sum`: a sum of such values without decay (Adagrad's), of
which no rounding error is ever forgotten; `signed`: a slow state that may be negative, such as an average of the
parameter; `idle`: one that this update leaves as it is, or of which nothing is known, and which may be a copy of the
parameter; `decaying`: an average, as a step as written shows by its first value (`eager/moment_detection.py`), or an
idle one by which the update divides (Sophia's); `maximum`: one without decay of what cannot be negative (AMSGrad's),
which an error can only increase; `average`: a first moment, of which no error becomes larger on its way; `long`: one
that decays by less than a hundredth a step, so that a hundred errors or more are in it (AdEMAMix's second); `counter`:
a sum of whole numbers.
"""

NO_ROLES: Mapping[str, Role] = MappingProxyType({})


@dataclass(frozen=True)
class Strategy:
    """Format names by role."""

    name: str
    param: str
    state: str
    """Of first moments."""
    slow: str
    sum: str = ""
    """Empty for that of slow states."""
    signed: str = ""
    """Empty for that of slow states, or for that of the parameter if slow states have no signs."""
    counter: str = ""
    """Empty for that of slow states, or for fp32 if these are in codes."""
    other: str = ""
    """Of states that are not recognised: empty for that of first moments, if that has a number for each element."""

    def of(self, role: Role | None) -> str:
        """The name of the format of a state in a role."""
        either = self.slow if format_named(self.slow).signed else self.param
        other = self.other or (self.param if format_named(self.state).is_coded else self.state)
        # Drawn in each step, a maximum would climb: it is the largest of many roundings.
        largest = self.slow if other == self.param and format_named(self.slow).draw is None else other
        # A hundred errors of a byte each would be in it.
        long = self.state if format_named(self.state).bytes > 1 else other
        # Codes do not hold whole numbers.
        exact = "fp32" if format_named(self.slow).is_coded else self.slow
        by_role = {"slow": self.slow, "sum": self.sum or self.slow, "signed": self.signed or either,
                   "idle": self.signed or either, "decaying": either,
                   "maximum": largest, "average": self.state, "long": long,
                   "counter": self.counter or exact}  # fmt: skip
        return other if role is None else by_role[role]


def _split(name: str, param: str, state: str, slow: str, total: str = "") -> Strategy:
    """A strategy that keeps as the parameter what follows it (schedule-free's z), and what is not recognised."""
    return Strategy(name, param, state, slow, total, signed=param, other=param, counter="fp32")


STRATEGIES: dict[str, Strategy] = {
    s.name: s
    for s in (
        Strategy("bf16", "bf16", "bf16", "bf16"),  # option A of the paper
        Strategy("light", "bf16x2", "bf16", "bf16"),  # Collage-light
        Strategy("plus", "bf16x2", "bf16", "bf16x2"),  # Collage-plus
        Strategy("full", "bf16x2", "bf16x2", "bf16x2"),
        Strategy("fp32", "bf16+fp32", "fp32", "fp32"),  # option D: master weights
        Strategy("fp32_states", "bf16", "fp32", "fp32"),  # option D without master weights
        Strategy("stochastic", "bf16_stochastic", "bf16", "bf16"),  # what AWS recommends, in software
        Strategy("stochastic_states", "bf16_stochastic", "bf16_stochastic", "bf16_stochastic"),
        # The most accurate at their bytes: named by those of the parameter, of averages, and of slow states.
        _split("split444", "bf16+int16", "bf16+int16", "bf16+int16"),
        _split("split433", "bf16+int16", "bf16+int8", "bf16+int8", "bf16+int16"),
        _split("split423", "bf16+int16", "i16q8", "bf16+int8"),
        _split("split422", "bf16+int16", "i16q8", "u16q16"),
        _split("split323", "bf16+int8", "i16q8", "bf16+int8"),
        _split("split322", "bf16+int8", "i16q8", "u16q16"),
        _split("split412", "bf16+int16", "i8q8", "u16q16"),
        _split("split312", "bf16+int8", "i8q8", "u16q16"),
        _split("split311", "bf16+int8", "i8q8", "u8q16"),
    )
}
"""The named strategies; bytes per parameter with Adam and a bf16 gradient: 8, 10, 12, 14, 16, 12, 8, 8, 14, 12, 11, 10,
10, 9, 9, 8, 7."""

BY_ACCURACY = (
    "fp32", "split444", "split433", "split423", "split422", "split412", "full", "plus", "split323", "light",
    "split322", "split312", "split311", "stochastic", "bf16",
)  # fmt: skip
"""The strategies that `bytes=N` chooses from, the most accurate first, by their largest error as docs/accuracy.md has
it, fine-tuning included (`by_accuracy` in benchmarks/accuracy/front.py, which a test compares with this).

So those with four bytes of a parameter, which are right at every learning rate, come before those with three, some of
which are more accurate at 1e-4 and lose all steps of 1e-6. All that are chosen under arithmetic="bf16" are the paper's.
"""

DEFAULT = "split433"
"""The most accurate of 12 bytes: what `plus`, the paper's, loses at small learning rates is in docs/accuracy.md."""


def default_strategy(arithmetic: str) -> str:
    """The strategy where none is named: the paper's arithmetic has its two words of bf16, and knows no other words."""
    return "plus" if arithmetic == "bf16" else DEFAULT


def bytes_with_adam(strategy: str) -> int:
    """Bytes per parameter of a named strategy with Adam and a bf16 gradient."""
    own = STRATEGIES[strategy]
    return 2 + sum(format_named(name).bytes for name in (own.param, own.state, own.slow))


StrategyLike = str | Mapping[str, str]
"""A strategy's name, or a mapping from state name (`param`, `exp_avg`, ...) to format name.

`*` stands for all states that it does not name, `param` included; without `*` these are bf16.
"""


def check_strategy(strategy: object, arithmetic: str) -> None:
    """Raises ValueError if the two cannot work together, with alternatives; TypeError if it is not a strategy."""
    if not isinstance(strategy, (str, Mapping)):
        raise TypeError(
            f"strategy is {strategy!r}; give one of {', '.join(STRATEGIES)}, or a mapping from state name to format"
        )
    if isinstance(strategy, str):
        strategy_named(strategy)
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"unknown arithmetic {arithmetic!r}; choose one of {', '.join(ARITHMETICS)}")
    _check_param(strategy)
    formats = set(strategy.values()) if isinstance(strategy, Mapping) else _names(strategy_named(strategy))
    drawn = sorted(f for f in formats if format_named(f).draw)
    if arithmetic == "bf16" and drawn:
        raise ValueError(
            f"strategy {strategy!r} stores {drawn[0]}, and arithmetic='bf16' leaves its store nothing to round: "
            "every operation before it has rounded to nearest; use arithmetic='fp32' with it"
        )
    wide = sorted(f for f in formats if not _is_of_paper(format_named(f)))
    if arithmetic == "bf16" and wide:
        raise ValueError(
            f"strategy {strategy!r} stores {wide[0]}, which arithmetic='bf16' would round to bf16 at every "
            "operation; use arithmetic='fp32' with it, or one of the paper's strategies (strategy='plus')"
        )


def strategy_named(name: str) -> Strategy:
    """The strategy called `name`; ValueError with the known names otherwise."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; choose one of {', '.join(STRATEGIES)}, or give a mapping")
    return STRATEGIES[name]


def possible(strategy: str, arithmetic: str) -> bool:
    """Returns True if the strategy and the arithmetic can work together."""
    try:
        check_strategy(strategy, arithmetic)
    except ValueError:
        return False
    return True


def param_format(strategy: StrategyLike, dtype: torch.dtype) -> Format:
    """The format of parameters of this type, which depends on no role of a state."""
    return formats_for(strategy, (), NO_ROLES, dtype)["param"]


def _check_param(strategy: StrategyLike) -> None:
    """Raises ValueError unless the first component of `param` is bf16, since the model computes with it."""
    fmt = param_format(strategy, torch.bfloat16)
    if fmt.components[0].storage != "bf16":
        raise ValueError(
            f"strategy {strategy!r} stores `param` as {fmt.name}, which would make the model itself {fmt.name}; store "
            "it as bf16+fp32 (a master beside it), bf16x2 or bf16 (`*` counts for `param` too, unless it is named)"
        )
    if fmt.name not in BUILT_IN and not reads_alike(fmt):
        raise ValueError(
            f"strategy {strategy!r} stores `param` as {fmt.name}, whose first word is not the value rounded to bf16, "
            "and the model reads that word: store `param` in another format"
        )


def _is_of_paper(fmt: Format) -> bool:
    """Returns True if bf16 arithmetic can work with `fmt`: one bf16 number, or two."""
    return len(fmt.components) <= 2 and all(c.storage == "bf16" for c in fmt.components)


def _names(s: Strategy) -> set[str]:
    return {name for name in (s.param, s.state, s.slow, s.sum, s.signed, s.counter, s.other) if name}


def formats_for(
    strategy: StrategyLike, states: tuple[str, ...], roles: Mapping[str, Role], dtype: torch.dtype
) -> dict[str, Format]:
    """The storage format of the parameter (`param`) and of each state, by the roles of the states that have one.

    An fp32 parameter needs no compensation: all its states are stored in fp32, as in torch. What a mapping says counts
    whatever the role is: a negative number in a format without signs makes its block NaN. It may name states that this
    parameter does not have (`states/strategy_checks.py`).
    """
    names = ("param", *states)
    if dtype == torch.float32:
        return {name: format_named("fp32") for name in names}
    if isinstance(strategy, Mapping):
        return {name: format_named(strategy.get(name, strategy.get("*", "bf16"))) for name in names}
    s = strategy_named(strategy)
    return {"param": format_named(s.param)} | {name: format_named(s.of(roles.get(name))) for name in states}


def tells_roles(strategy: StrategyLike) -> bool:
    """Returns True if the strategy tells roles apart that depend on the numbers of a step."""
    return isinstance(strategy, str) and _tells_roles(strategy_named(strategy))


@cache
def _tells_roles(s: Strategy) -> bool:
    return any(len({s.of(role) for role in roles}) > 1 for roles in _BY_NUMBERS)


# Roles of which the numbers of a step determine one: of states that accumulate slowly, and of others.
_BY_NUMBERS: tuple[tuple[Role | None, ...], ...] = (
    ("slow", "sum", "signed", "idle", "counter"),
    (None, "maximum", "average", "long"),
)


def has_blocks(strategy: StrategyLike) -> bool:
    """Returns True if the strategy stores something in blocks, so that `formats_of_shape` depends on the shape."""
    return any(fmt.is_coded for fmt in _formats(strategy))


def has_integers(strategy: StrategyLike) -> bool:
    """Returns True if it stores words of integers, or draws: then steps compute with integers of 32 bits."""
    return any(fmt.draw or not all(c.type.is_floating for c in fmt.components) for fmt in _formats(strategy))


def _formats(strategy: StrategyLike) -> list[Format]:
    names = strategy.values() if isinstance(strategy, Mapping) else _names(strategy_named(strategy))
    return [format_named(name) for name in names]


def formats_of_shape(formats: Mapping[str, Format], dims: int) -> Mapping[str, Format]:
    """The formats for a parameter of `dims` dimensions: a 0-d one has no row of blocks, and has numbers, no codes."""
    if dims or not any(fmt.is_coded for fmt in formats.values()):
        return formats
    return {name: format_named("bf16+int16") if fmt.is_coded else fmt for name, fmt in formats.items()}
