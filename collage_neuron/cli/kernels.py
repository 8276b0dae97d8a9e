"""`python -m collage_neuron kernels`: lists and writes kernels of common optimizers; estimates what steps cost."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from collage_neuron.api import compile
from collage_neuron.cli import kernel_costs
from collage_neuron.numerics.strategies import DEFAULT, STRATEGIES, StrategyLike
from collage_neuron.optimizer.compiled import base_of
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.ir.printer import format_graph
from collage_neuron.passes.ir.update import Update
from collage_neuron.runtime import step_plan
from collage_neuron.trace import dry_run

Params = list[torch.nn.Parameter]


class Lion(Optimizer):
    """Lion, written as a user would: the sign of an average of gradients (Chen et al., 2023, algorithm 2)."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes none
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(torch.sign(m * beta1 + p.grad * (1 - beta1)), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Entry(NamedTuple):
    """A kernel: an optimizer, and how it is compiled."""

    make: Callable[[Params], Optimizer]
    strategy: StrategyLike
    arithmetic: str = "fp32"


def adamw(ps: Params) -> Optimizer:
    """AdamW with decay, so that its kernel has that too."""
    return AdamW(ps, weight_decay=0.1)


KERNELS: Mapping[str, Entry] = {
    "adamw_light": Entry(adamw, "light"),
    "adamw_plus": Entry(adamw, "plus"),
    "adamw_full": Entry(adamw, "full"),
    "adamw_split433": Entry(adamw, "split433"),
    "adamw_plus_bf16": Entry(adamw, "plus", "bf16"),
    "adam_plus": Entry(Adam, "plus"),
    "sgd_momentum_light": Entry(lambda ps: SGD(ps, lr=1e-2, momentum=0.9, weight_decay=1e-4), "light"),
    "lion_light": Entry(Lion, "light"),
}
"""By the name of the file and of its function."""

FOLDERS = {"trn1": ("trn1", "nki"), "trn1_beta1": ("trn1", "beta1"), "trn2": ("trn2", "nki"), "trn3": ("trn3", "nki")}
"""Folder -> target and dialect."""


@cache
def job(name: str) -> step_plan.Job:
    """The plan of the second step of an entry's optimizer: the captured and the rewritten update."""
    return job_of(KERNELS[name])


def job_of(entry: Entry, measured: bool = False) -> step_plan.Job:
    """The same of another entry, or of a step that a monitor measures."""
    made = entry.make([_parameter()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of formats and settings, which are for those who train
        optimizer = compile(made, strategy=entry.strategy, arithmetic=entry.arithmetic, verbose=False)
        optimizer.step()
    base = base_of(type(optimizer))
    (found,) = step_plan.plan(
        base, optimizer, optimizer.param_groups[0], 0, dry_run.foreseen(base, optimizer), measured
    )
    return found


@cache
def kernel(name: str, target: str) -> Kernel:
    """The kernel of KERNELS called `name`, for a target, in the newer dialect."""
    optimizer = type(KERNELS[name].make([_parameter()])).__name__
    title = [
        f"{optimizer}, strategy {KERNELS[name].strategy}, {KERNELS[name].arithmetic} arithmetic: one step, fused.",
        "",
        "The update as it was captured; s0, s1, ... are numbers of the step:",
        "",
        *(f"  {line}" for line in format_graph(job(name).recording.captured.graph).splitlines()),
    ]
    return lower_to_nki(job(name).update, target, name=name, title="\n".join(title))


def _parameter() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16, device="cpu"))
    p.grad = torch.zeros_like(p)
    return p


def source(folder: str, name: str) -> str:
    """The text of a kernel, for the target and in the dialect of a folder."""
    target, dialect = FOLDERS[folder]
    return kernel(name, target).in_dialect(dialect).source


@cache
def adamw_update(strategy: str) -> Update:
    """The rewritten update of AdamW under a strategy."""
    return job_of(Entry(adamw, strategy)).update


def adamw_kernel(strategy: str, target: str) -> Kernel:
    """AdamW's kernel under a strategy: one of `KERNELS`, or one that has no docstring of its own."""
    name = f"adamw_{strategy}"
    return kernel(name, target) if name in KERNELS else lower_to_nki(adamw_update(strategy), target, name=name)


def write_all(folder: Path) -> list[Path]:
    """Writes every kernel into a user's folder, one below it for each target; the paths of those that are new there."""
    return written((folder / target / f"{name}.py", source(target, name)) for target in FOLDERS for name in KERNELS)


def written(wanted: Iterable[tuple[Path, str]]) -> list[Path]:
    """Writes the files that are missing or out of date; their paths."""
    changed = [(p, text) for p, text in wanted if not p.exists() or p.read_text() != text]
    for path, text in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [path for path, _ in changed]


def overview() -> str:
    """The kernels by name, and what can be done with them."""
    rows = [(name, f"strategy {k.strategy}, {k.arithmetic} arithmetic") for name, k in KERNELS.items()]
    width = max(map(len, KERNELS))
    return "\n".join(
        [
            f"{len(KERNELS)} examples, each for {', '.join(FOLDERS)} (trn1_beta1 in the dialect of neuronxcc). Any",
            "other optimizer and strategy gets its kernel in its first step, so nothing here is needed to train.",
            "",
            *(f"  {name:<{width}}  {what}" for name, what in rows),
            "",
            "Nothing was written. --write FOLDER writes them, --costs estimates what steps take; --help has the rest.",
        ]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `kernels`."""
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--write",
        metavar="FOLDER",
        help="write every kernel, for each target, as files in FOLDER (takes about 15 seconds)",
    )
    instead.add_argument(
        "--costs",
        action="store_true",
        help="print the estimated time of a step of AdamW and its accuracy, by strategy (takes up to a minute)",
    )
    instead.add_argument(
        "--model",
        metavar="MODEL",
        help=f"print the estimated time of a step of AdamW on a model: {', '.join(kernel_costs.MODELS)}, or shapes "
        "such as 4096x4096,4096",
    )
    parser.add_argument(
        "--strategy", choices=list(STRATEGIES), metavar="NAME", help=f"with --model: that of AdamW (default: {DEFAULT})"
    )


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Lists or writes kernels, or prints what steps cost; returns the exit status."""
    if options.strategy and options.model is None:
        print("kernels: --strategy goes with --model", file=sys.stderr)
        return 2
    if options.write:
        return _wrote(options.write)
    try:
        for line in _said(options):
            print(line, flush=True)
    except ValueError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 2
    return 0


def _said(options: argparse.Namespace) -> Iterable[str]:
    if options.model is not None:
        return [kernel_costs.answer(options.model, options.strategy or DEFAULT, adamw_kernel)]
    return kernel_costs.summary(adamw_update) if options.costs else [overview()]


def _wrote(folder: str) -> int:
    try:
        _check_folder(Path(folder))
        paths = write_all(Path(folder))
    except OSError as error:
        print(f"kernels: {folder} is not a folder that can be written to ({error}); name another one", file=sys.stderr)
        return 2
    print(_of_folder(folder, len(paths)))
    return 0


def _check_folder(path: Path) -> None:
    """Raises NotADirectoryError if a file is in the way: before anything is generated, which takes a while."""
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise NotADirectoryError(f"{part} is a file")


def _of_folder(folder: str, new: int) -> str:
    """What was done in a user's folder."""
    total = len(FOLDERS) * len(KERNELS)
    if not new:
        return f"all {total} kernels in {folder} are up to date"
    count = f"{total}" if new == total else f"{new} of {total}"
    each = f"{len(KERNELS)} for each of {', '.join(FOLDERS)}"
    return f"wrote {count} kernels ({each}) to {folder}; each begins with its update as equations"
