"""The colours of strategies, which are the same in every figure of the project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COLOURS: Mapping[str, tuple[str, str]] = {
    "bf16": ("#d55e00", "#ff8f45"),
    "light": ("#b07d00", "#f2b632"),
    "plus": ("#0072b2", "#5cb8f0"),
    "full": ("#008f68", "#3dd6a8"),
    "fp32": ("#000000", "#f2f2f2"),
    "fp32_states": ("#b8588c", "#f09acf"),
    "stochastic": ("#3592c4", "#a5dcff"),
    "stochastic_states": ("#7d7d7d", "#a0a0a0"),
    "split444": ("#332288", "#9188bf"),
    "split433": ("#7b3294", "#c993e0"),
    "split423": ("#117733", "#54b070"),
    "split422": ("#2f8f84", "#63c3b8"),
    "split323": ("#882255", "#ba7f9c"),
    "split322": ("#aa4499", "#c075b4"),
    "split412": ("#84842b", "#bdbd60"),
    "split312": ("#cc5566", "#e98090"),
    "split311": ("#7a2e12", "#b28676"),
    "uncompiled": ("#5b6b7a", "#84909b"),
    "other": ("#00818f", "#4fc3cf"),
}
"""On white and on dark paper. The last two are for what is no strategy: a model as its script made it, and variants."""

RESERVED = ("bf16", "plus", "split433", "fp32")
"""Nothing else is drawn in their colours."""


def colour(name: str) -> str:
    """The colour of a strategy on white paper."""
    return COLOURS[name][0]


def assigned(strategies: Sequence[object]) -> list[str]:
    """An entry of the palette for each of several runs: its strategy's, or an unused one if another run has that."""
    names, spare = [], [name for name in COLOURS if name not in RESERVED and name not in strategies]
    for i, strategy in enumerate(strategies):
        # A second run of a strategy, or one of a mapping of formats, takes a colour that nobody else needs.
        own = isinstance(strategy, str) and strategy in COLOURS and strategy not in strategies[:i]
        names.append(str(strategy) if own else spare.pop(0) if spare else "other")
    return names


def css() -> str:
    """The palette as properties of a page, `--of-plus` and so on, for both schemes."""
    light, dark = ("".join(f"--of-{name}:{pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
