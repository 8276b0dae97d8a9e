"""Measures the 17 optimizers that language models are trained with: how each runs, its errors and bytes.

    python docs/measure_optimizers.py               # ten minutes: measures all, stores them, prints the table
    python docs/measure_optimizers.py --show        # prints the table as it is stored
    python docs/measure_optimizers.py Muon SOAP     # measures these, and keeps what is stored of the others

Written to docs/coverage/optimizers.json; `docs/make_coverage.py` puts the table on the page.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import torch
from language_cases import CASES, Case, how, trained
from oracles import one_thread
from torch import Tensor

import collage_neuron

RECORDS = Path(__file__).parent / "coverage" / "optimizers.json"
STEPS = 300
STRATEGIES = ("plus", "full", "split433", "split444", "fp32")
NEAR = 10.0
"""An optimizer is right if a strategy of at most `full`'s bytes is within so many times of its own fp32."""
CANDIDATES = ("full", "split433", "split444")

HEAD = (
    "optimizer", "from", "runs", "why not compiled", "bf16", *(f"`{s}`" for s in STRATEGIES[:-1]), "own fp32",
    "best / fp32",
)  # fmt: skip


def measure(case: Case, steps: int = STEPS) -> dict[str, Any]:
    """The record of a case: ||theta - reference|| / ||reference - start||, and bytes per parameter.

    Where fp32 is the reference, its own error is that of a run in fp32 whose gradients differ by a rounding to fp32.
    """
    start = _whole(trained(case, torch.float64, 0)[1])
    plain = {t: trained(case, t, steps) for t in (torch.bfloat16, torch.float32)}
    exact = _whole(trained(case, case.reference, steps)[1])
    travelled = (exact - start).norm()

    def error(found: Sequence[Tensor]) -> float:
        return float((_whole(found) - exact).norm() / travelled)

    record: dict[str, Any] = {
        "bf16": [error(plain[torch.bfloat16][1]), _bytes(plain[torch.bfloat16][0])],
        "own fp32": [
            error(trained(case, torch.float32, steps, nudged=case.reference is torch.float32)[1]),
            _bytes(plain[torch.float32][0]),
        ],
    }
    for strategy in STRATEGIES:
        optimizer, found = trained(case, torch.bfloat16, steps, strategy)
        record[strategy] = [error(found), collage_neuron.bytes_per_parameter(optimizer)]
        record["runs"] = how(optimizer)
    record["same bits"] = all(map(torch.equal, found, plain[torch.float32][1]))
    return record


def _whole(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.detach().double().reshape(-1) for x in values])


def _bytes(optimizer: Any) -> float:
    """Bytes per parameter of an optimizer as it is, gradient included."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [x for x in _tensors([dict(optimizer.state), [p.grad for p in params]]) if x.dim()]
    return float((sum(x.nbytes for x in tensors) + sum(p.nbytes for p in params)) / sum(p.numel() for p in params))


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    inner = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return [t for y in inner for t in _tensors(y)]


def best(record: Mapping[str, Any]) -> tuple[str, float]:
    """The strategy of CANDIDATES that is nearest to the reference, and its error over that of plain fp32."""
    name = min(CANDIDATES, key=lambda s: record[s][0])
    return name, record[name][0] / record["own fp32"][0]


def is_right(record: Mapping[str, Any]) -> bool:
    """Returns True if the best strategy is near fp32; as written it must equal fp32 where all is stored in fp32."""
    return best(record)[1] <= NEAR and (record["same bits"] or record["runs"] != "as written")


def rows(records: Mapping[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    found = []
    for name, case in CASES.items():
        record = records[name]
        cells = [_cell(record[key]) for key in ("bf16", *STRATEGIES[:-1], "own fp32")]
        strategy, ratio = best(record)
        shown = f"{name} \\*" if case.reference is torch.float32 else name
        source = f"{case.package} {record['version']}".strip()
        found.append([shown, source, record["runs"], case.reason, *cells, f"{ratio:.1f} (`{strategy}`)"])
    return found


def _cell(measured: Sequence[float]) -> str:
    return f"{measured[0]:.1e} ({measured[1]:.3g})"


def stored() -> dict[str, Any]:
    """The records by name of the optimizer."""
    records: dict[str, Any] = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    return records


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Measures, stores and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *CASES], help="optimizers to measure; default: all")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    logging.getLogger("collage_neuron").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    records = stored()
    for name in () if arguments.show else arguments.names or CASES:
        with one_thread():
            records[name] = measure(CASES[name]) | {"version": _version(CASES[name].package)}
        RECORDS.write_text(json.dumps({n: records[n] for n in CASES if n in records}, indent=1) + "\n")
        print(name, json.dumps(records[name]), flush=True)
    for row in (HEAD, *rows(records)):
        print(" | ".join(row))
    print(sum(map(is_right, records.values())), "of", len(CASES), "right")


if __name__ == "__main__":
    main()
