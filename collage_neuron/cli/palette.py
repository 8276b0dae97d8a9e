"""The colours of strategies, which are the same in every figure of the project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COLOURS: Mapping[str, str] = {
    "bf16": "#d55e00", "light": "#b07d00", "plus": "#0072b2", "full": "#008f68", "fp32": "#000000",
    "fp32_states": "#b8588c", "stochastic": "#3592c4", "stochastic_states": "#7d7d7d",
    "split444": "#332288", "split433": "#7b3294", "split423": "#117733", "split422": "#2f8f84",
    "split323": "#882255", "split322": "#aa4499", "split412": "#84842b", "split312": "#cc5566",
    "split311": "#7a2e12", "uncompiled": "#5b6b7a", "other": "#00818f",
}  # fmt: skip
"""On white paper. The last two are for what is no strategy: a model as its script made it, and variants."""

RESERVED = ("bf16", "plus", "split433", "fp32")
"""Nothing else is drawn in their colours."""


def assigned(strategies: Sequence[object]) -> list[str]:
    """A colour for each of several runs: its strategy's, or an unused one if another run has that."""
    names, spare = [], [name for name in COLOURS if name not in RESERVED and name not in strategies]
    for i, strategy in enumerate(strategies):
        # A second run of a strategy, or one of a mapping of formats, takes a colour that nobody else needs.
        own = isinstance(strategy, str) and strategy in COLOURS and strategy not in strategies[:i]
        names.append(str(strategy) if own else spare.pop(0) if spare else "other")
    return [COLOURS[name] for name in names]
