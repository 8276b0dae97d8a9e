"""Tries every optimizer of packages that the tests do not install: how each runs, and whether it is that of fp32.

    pip install heavyball==3.2.1 timm==1.0.31
    python docs/measure_packages.py heavyball timm.optim    # a minute; stores and prints
    python docs/measure_packages.py                         # prints what is stored

Written to docs/coverage/packages.json; `docs/make_coverage.py` puts it on the page. Each optimizer takes STEPS steps
with its own defaults under the strategy `fp32`, beside the same in plain fp32. As written the parameters must be equal
bit for bit; compiled ones may differ by the rounding of their operations: by how much of the largest
weight is stored.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import torch
from as_written import run, values
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states.bookkeeping import bookkeeping

RECORDS = Path(__file__).parent / "coverage" / "packages.json"
STEPS = 5
WAYS = ("compiled", "as written", "rejected", "not tried", "wrong")
REASONS = {
    "share memory": "holds views of its parameters",
    "in bf16 beside fp32": "makes a state in bf16 beside fp32",
    "does not require grad": "differentiates again",
    "required positional argument": "is a base class",
    "has no attribute": "wraps another optimizer",
    "sequence element": "splits parameters between optimizers",
}
"""Parts of messages, and what the page says of them."""
SHAPES = ((8, 12), (6, 4), (16,))


def params_of(dtype: torch.dtype, only_matrices: bool) -> list[Parameter]:
    """Parameters that are bf16 numbers."""
    g = torch.Generator().manual_seed(0)
    shapes = [shape for shape in SHAPES if len(shape) == 2 or not only_matrices]
    return [Parameter((0.3 * torch.randn(shape, generator=g)).bfloat16().to(dtype)) for shape in shapes]


def made(cls: Any, params: list[Parameter]) -> Any:
    """The optimizer with its own defaults, of which `foreach` is off; in training mode."""
    torch.manual_seed(0)  # some draw matrices when they are made
    options = inspect.signature(cls).parameters
    needs_rate = "lr" in options and not isinstance(options["lr"].default, (int, float))
    optimizer = cls(params, **({"lr": 1e-3} if needs_rate else {}))
    if hasattr(optimizer, "train"):
        optimizer.train()
    for group in optimizer.param_groups:
        group.update({k: False for k in ("foreach", "fused", "capturable") if k in group})
    return optimizer


def tried(cls: Any) -> dict[str, Any]:
    """How the optimizer runs, or why it does not."""
    plain, only_matrices = None, False
    for only_matrices in (False, True):
        plain = params_of(torch.float32, only_matrices)
        try:
            run(made(cls, plain), STEPS)
        except Exception as error:  # whatever another package raises without what it needs
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        break
    else:
        return {"runs": "not tried", "reason": reason}
    params = params_of(torch.bfloat16, only_matrices)
    try:
        optimizer = collage_neuron.compile(made(cls, params), strategy="fp32")
        run(optimizer, STEPS)
    except UnsupportedUpdate as error:
        return {"runs": "rejected", "reason": str(error)}
    found = values(optimizer, params)
    off = max(float((x - y).abs().max()) for x, y in zip(found, plain, strict=True))
    largest = max(float(y.abs().max()) for y in plain)
    if why := bookkeeping(optimizer).as_written:
        equal = all(map(torch.equal, found, plain))
        return {"runs": WAYS[1] if equal else "wrong", "reason": why.partition(";")[0]}
    return {"runs": "compiled", "off": off / largest}


def short(record: dict[str, Any]) -> str:
    """The reason in a few words."""
    reason = record.get("reason", "")
    return next((words for part, words in REASONS.items() if part in reason), reason)


def classes(module: str) -> dict[str, type[Optimizer]]:
    """The optimizers that a module exports, by name."""
    found = importlib.import_module(module)
    if module == "heavyball":  # eager: the same operations, without a compiler that may skip roundings
        utils: Any = importlib.import_module("heavyball.utils")
        utils.compile_mode = None
    exported = vars(found).items()
    return {k: v for k, v in sorted(exported) if inspect.isclass(v) and issubclass(v, Optimizer) and v is not Optimizer}


def stored() -> dict[str, Any]:
    """The records by package and optimizer."""
    records: dict[str, Any] = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    return records


def main() -> None:
    """Tries the optimizers of the modules that are named; prints all records."""
    logging.getLogger("collage_neuron").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    records = stored()
    for module in sys.argv[1:]:
        package = module.partition(".")[0]
        found = {name: tried(cls) for name, cls in classes(module).items()}
        records[package] = {"version": version(package), "optimizers": found}
    if sys.argv[1:]:
        RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    for package, record in records.items():
        for name, one in record["optimizers"].items():
            print(package, record["version"], name, one["runs"], one.get("off", ""), one.get("reason", "")[:160])


if __name__ == "__main__":
    main()
