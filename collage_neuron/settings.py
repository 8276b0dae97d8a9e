"""Settings of a parameter group: they live in the group, so that groups may differ and checkpoints carry them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collage_neuron.passes.pipeline import check_backend
from collage_neuron.strategies import DEFAULT, StrategyLike, check_strategy

KEYS = ("collage_strategy", "collage_arithmetic", "collage_backend")
"""Keys of the settings in `param_groups`."""


@dataclass(frozen=True)
class Settings:
    """Strategy, arithmetic and backend of a parameter group."""

    strategy: StrategyLike = DEFAULT
    arithmetic: str = "fp32"
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_strategy(self.strategy, self.arithmetic)
        check_backend(self.backend)

    def __hash__(self) -> int:
        return hash(repr(self))  # a strategy may be a dict

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Settings:
        """The settings of a group; the defaults where it has none. ValueError if they cannot work."""
        return cls(*(group.get(key, default) for key, default in zip(KEYS, cls._defaults(), strict=True)))

    @classmethod
    def _defaults(cls) -> tuple[Any, ...]:
        return (DEFAULT, "fp32", "auto")

    def as_group(self) -> dict[str, Any]:
        """The settings as entries of a parameter group."""
        return dict(zip(KEYS, (self.strategy, self.arithmetic, self.backend), strict=True))
