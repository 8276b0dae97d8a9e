"""Jobs: one run each; its record is kept as a JSON file, so an interrupted study can be resumed.

A run whose record has the same settings, sources and version of torch is not run again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import torch
from study.jobs import Record, Store, digest, rounded, versions
from tqdm import tqdm

from fp8.training import PACKAGE, Run, train

SEEDS = (0, 1, 2, 3, 4)
RATES = (1e-3, 2e-3, 5e-3)
FACTOR = 1e-4
DEPTHS = (2, 4, 8, 16, 32)
OUTLIERS = (64, 256, 1024)
SCALED = ("bf16", "amax", "propagated", "offsets")
SOURCES = ("benchmarks/fp8/training.py", "benchmarks/fp8/just_in_time.py", "examples/gpt.py", "examples/text_data.py")
PACKAGE_SOURCES = (
    *(f"collage_neuron/matmuls/{name}.py" for name in ("capture", "half", "pace", "scales", "written")),
    "passes/fp8_scaling/*.py",
)
"""What the numbers of a way of the package depend on beside `SOURCES`; its optimizer is the same in every way."""


def plan(quick: bool) -> Iterator[Run]:
    """The runs of the study, the ones that most depends on first: the ways that are compared, five seeds of each."""
    if quick:
        small = {"steps": 6, "batch": 2, "block": 8, "width": 32, "depth": 1}
        yield from (Run(way, **small) for way in (*SCALED, "unscaled", "frozen"))
        yield Run("propagated", outliers=64, **small)
        return
    yield from (Run(way, lr, seed) for seed in SEEDS for lr in RATES for way in SCALED)
    yield from _deep(DEPTHS, 0)
    yield from _outliers(0)
    for seed in SEEDS:
        yield from _controls(seed)
    for seed in SEEDS[1:3]:
        yield from _outliers(seed)
        yield from _deep(DEPTHS[:3], seed)


def _deep(depths: Sequence[int], seed: int) -> Iterator[Run]:
    yield from (Run(way, lr=1e-3, seed=seed, depth=depth, steps=200) for depth in depths for way in SCALED)


def _outliers(seed: int) -> Iterator[Run]:
    yield from (Run(way, seed=seed, outliers=k) for k in OUTLIERS for way in SCALED)


def _controls(seed: int) -> Iterator[Run]:
    """Gradients below the range of e5m2, fp8 without scales, and no training of the layers at all."""
    yield from (Run(way, seed=seed, factor=FACTOR) for way in ("bf16", "propagated", "offsets", "unscaled"))
    yield from (Run("unscaled", lr, seed) for lr in RATES)
    yield Run("frozen", seed=seed)


def path_of(run: Run) -> Path:
    """The file of a run, named after what differs from the usual one."""
    usual = Run(run.way)
    told = [f"{k}={v:g}" for k, v in asdict(run).items() if k != "way" and v != getattr(usual, k)]
    return Path(f"{'_'.join([run.way, *told])}.json")


def there(runs: Sequence[Run], store: Store) -> list[Record]:
    """The records of the runs that need not run."""
    return [record for run in runs if (record := store.read(path_of(run), identity(run))) is not None]


def run_all(runs: Sequence[Run], store: Store) -> None:
    """Runs what is missing, in order, on one thread; several processes may share a folder."""
    torch.set_num_threads(1)
    for run in tqdm(runs, unit="run", disable=None):
        if there([run], store):
            continue
        began = process_time()
        found = train(run)
        torch.compiler.reset()
        record = {**identity(run), **rounded({**found, "cpu_seconds": process_time() - began})}
        store.write(path_of(run), record)


def identity(run: Run) -> dict[str, Any]:
    """What must be equal for a record to stand for a run."""
    return {**asdict(run), "torch": versions()["torch"], "code": code(run.way in PACKAGE)}


@cache
def code(of_package: bool) -> str:
    """A digest of what the files compute that the numbers of a way depend on: comments and types do not count."""
    return digest(
        (*SOURCES, *(PACKAGE_SOURCES if of_package else ())),
        lambda path: ast.dump(Bare().visit(ast.parse(path.read_text()))).encode(),
    )


class Bare(ast.NodeTransformer):
    """Takes docstrings and the types of variables out of a program."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return node if node.value is None else ast.Assign([node.target], node.value)
