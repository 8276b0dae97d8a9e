"""Settings of a parameter group; they are stored in the group, so groups may differ and checkpoints carry them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from collage_neuron.numerics.formats import FORMATS_KEPT
from collage_neuron.numerics.strategies import DEFAULT, StrategyLike, check_strategy, default_strategy
from collage_neuron.passes.backends.registry import check_name

KEYS = (
    "collage_strategy", "collage_arithmetic", "collage_backend", "collage_nonfinite", "collage_seed",
    "collage_validate",
)  # fmt: skip
"""Keys of the settings in `param_groups`."""

DRAWN = "collage_drawn"
"""Key of the number of steps in which a group has drawn random bits; with the seed it determines the next ones."""

SKIPPED = "collage_skipped"
"""Key of the number of skipped steps (`nonfinite.skipped_steps`): a device tensor, but a number in checkpoints."""

UNSUPPORTED = "collage_unsupported"
"""Key of a setting that version 0.3.0 had: groups, checkpoints and pickles may have it, and it is dropped."""

OURS = (*KEYS, DRAWN, SKIPPED, FORMATS_KEPT, UNSUPPORTED)
"""Every key of ours in `param_groups`."""

CHOICES = ("pass", "skip")
"""`pass`: NaN and Inf propagate through the optimizer's own arithmetic. `skip`: see `skipped_steps`."""


@dataclass(frozen=True)
class Settings:
    """Strategy, arithmetic, backend, treatment of gradients that are not finite, seed, validation."""

    strategy: StrategyLike = DEFAULT
    arithmetic: str = "fp32"
    backend: str = "auto"
    nonfinite: str = "pass"
    seed: int = 0
    validate: str = "on"
    verbose: bool = True
    """Of an optimizer and its class, not of a group: True if its first step is reported (`first_step_report`)."""

    def __post_init__(self) -> None:
        check_strategy(self.strategy, self.arithmetic)
        check_name(self.backend)
        if self.nonfinite not in CHOICES:
            raise ValueError(f"unknown nonfinite {self.nonfinite!r}; choose one of {', '.join(CHOICES)}")
        if self.validate not in ("on", "off"):
            raise ValueError(f"unknown validate {self.validate!r}; choose on or off")
        if not isinstance(self.verbose, bool):
            raise ValueError(f"verbose is {self.verbose!r}; give True or False")
        seed: object = self.seed  # a user's: anything
        if not (isinstance(seed, int) and 0 <= seed < 2**32):
            raise ValueError(f"seed is {self.seed!r}; give a whole number of 32 bits, from 0 to {2**32 - 1}")

    def __hash__(self) -> int:
        # Without the strategy, which may be a dict. Every step asks, for each group.
        return hash((self.arithmetic, self.backend, self.nonfinite, self.seed, self.validate))

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Settings:
        """The settings of a group, with defaults for missing ones. Raises ValueError if they cannot work together."""
        values = [group.get(key, default) for key, default in _DEFAULTS.items()]
        if KEYS[0] not in group:
            values[0] = default_strategy(values[1])
        if not isinstance(values[0], str):  # a mapping: it has no hash, or may change
            return cls(*values)
        try:
            return _checked(*values)
        except TypeError:  # one of them has no hash, and cannot work
            return cls(*values)

    def as_group(self) -> dict[str, Any]:
        """The settings as entries of a parameter group."""
        values = (self.strategy, self.arithmetic, self.backend, self.nonfinite, self.seed, self.validate)
        return dict(zip(KEYS, values, strict=True))


_DEFAULTS = Settings().as_group()


@lru_cache(typed=True)  # a step asks for each group; True and 1 are equal, and only one of them may be a setting
def _checked(*values: Any) -> Settings:
    return Settings(*values)


def filled(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The group with `defaults` for what it does not name; the default strategy is that of its arithmetic."""
    both = {**defaults, **group}
    if KEYS[0] not in group and both.get(KEYS[0]) == DEFAULT:  # the group's arithmetic may not be that of `defaults`
        both[KEYS[0]] = default_strategy(both[KEYS[1]])
    return both


class GroupNumbers:
    """The settings of a group that a class reads: numbers; and all else, as a key that is equal if only they differ."""

    def __init__(self, group: Mapping[str, Any], names: Collection[str]) -> None:
        self.numbers: list[float] = []
        self.key: tuple[Any, ...] | None = None
        """None if there are settings that are not numbers and texts, or tuples and lists of these."""
        told: list[Any] = []
        for name in names:
            value: Any = group.get(name)
            if (kind := type(value)) is float:  # those that most are come first
                self.numbers.append(value)
                told.append(float)
            else:
                told.append(value if kind is bool or value is None else self._told(value))
        self.key = None if _OTHER in told else tuple(told)

    def _told(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, float) or is_tensor_number(value):  # a number of NumPy's is a float
            self.numbers.append(value)
            return kind, getattr(value, "dtype", None)
        if kind in (tuple, list):
            parts = tuple(map(self._told, value))
            return _OTHER if _OTHER in parts else (kind, parts)
        return (kind, value) if kind in _CONSTANT else _OTHER


def is_tensor_number(value: Any) -> bool:
    """Returns True for a rate or a beta that is a tensor: a number on the host that may be another one in each step."""
    return type(value) is torch.Tensor and not value.dim() and value.is_cpu and value.is_floating_point()


_OTHER = object()  # equals nothing that a setting can be
_CONSTANT = (type(None), bool, int, str)
