"""What the first line of a log says about the model; `explain.about` says the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import torch


def about_run(models: Sequence[torch.nn.Module], modules: Collection[str]) -> dict[str, Any]:
    """The day, the model, and what modules are whose names are numbers.

    Args:
        models: the models whose parameters are measured, as far as they are known.
        modules: the names under which modules are logged.
    """
    kinds = {name: type(module).__name__ for model in models for name, module in model.named_modules()}
    numbers = sorted(name for name in modules if name.rpartition(".")[2].isdigit())
    return {
        "date": f"{datetime.now():%Y-%m-%d}",
        **({"model": ", ".join(dict.fromkeys(type(model).__name__ for model in models))} if models else {}),
        **({"module_kinds": {name: _kind(name, kinds) for name in numbers}} if numbers else {}),
    }


def _kind(name: str, kinds: Mapping[str, str]) -> str:
    """The class of a module; of a parameter without a name, its place, which `Monitor` writes as `GROUP.INDEX`."""
    if name in kinds:
        return kinds[name]
    group, _, index = name.partition(".")
    return f"parameter {index} of group {group}" if index else "parameter"
