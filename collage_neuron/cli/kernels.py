"""`python -m collage_neuron kernels`: lists and writes kernels of common optimizers; estimates what steps cost."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from collage_neuron.api import compile
from collage_neuron.numerics.strategies import DEFAULT, STRATEGIES, StrategyLike
from collage_neuron.optimizer.compiled import base_of
from collage_neuron.passes.backends.nki.bodies import time_of, with_bodies
from collage_neuron.passes.backends.nki.emit import Work
from collage_neuron.passes.backends.nki.hardware import TARGETS
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
    def step(self, closure: Any = None) -> Any:
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
    foreseen = dry_run.foreseen(base, optimizer)
    (planned,) = step_plan.plan(base, optimizer, optimizer.param_groups[0], 0, foreseen, measured)
    return planned


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


def write_all(folder: Path) -> str:
    """Writes every kernel into a user's folder, one below it for each target; returns what was done."""
    folder.mkdir(parents=True, exist_ok=True)  # raises before anything is generated, which takes a while
    new = written((folder / target / f"{name}.py", source(target, name)) for target in FOLDERS for name in KERNELS)
    total, each = len(FOLDERS) * len(KERNELS), f"{len(KERNELS)} for each of {', '.join(FOLDERS)}"
    return f"wrote {len(new)} of {total} kernels ({each}) to {folder}; each begins with its update as equations"


def written(wanted: Iterable[tuple[Path, str]]) -> list[Path]:
    """Writes the files that are missing or out of date; their paths."""
    # A file that is up to date keeps its time.
    changed = [(p, text) for p, text in wanted if not p.exists() or p.read_text() != text]
    for path, text in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [path for path, _ in changed]


# What a step takes on a model -----------------------------------------------------------------------------------------

Shapes = list[tuple[int, ...]]


def llama_7b() -> Shapes:
    """The parameters of Llama-7B (Touvron et al., 2023): 32 layers of width 4096, MLPs of 11008, 32000 words."""
    width, hidden, words = 4096, 11008, 32000
    layer = [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden), (width,), (width,)]
    return [(words, width), *layer * 32, (width,), (words, width)]


def gpt2() -> Shapes:
    """The parameters of GPT-2 (Radford et al., 2019), 124 M: 12 layers of width 768, 50257 words, 1024 positions."""
    width = 768
    norms = [(width,)] * 4
    layer = [*norms, (width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *layer * 12, (width,), (width,)]


MODELS: Mapping[str, Callable[[], Shapes]] = {"llama-7b": llama_7b, "gpt2": gpt2}
"""Presets by name."""


def shapes_of(model: str) -> Shapes:
    """The shapes of a preset, or of a list such as `4096x4096,4096`.

    Raises:
        ValueError: `model` is neither.
    """
    if model in MODELS:
        return MODELS[model]()
    try:
        shapes = [tuple(int(n) for n in shape.split("x")) for shape in model.split(",")]
    except ValueError:
        shapes = []
    if not shapes or any(n < 1 for shape in shapes for n in shape):
        raise ValueError(f"--model {model}: choose {', '.join(MODELS)}, or give shapes such as 4096x4096,4096")
    return shapes


def works_of(kernel: Kernel, shapes: Shapes) -> list[Work]:
    """What the kernel of a step does for parameters of these shapes."""
    return [Work(kernel, math.prod(shape), kernel.cut(shape)) for shape in shapes]


TITLED = {"gpt2": "GPT-2", "llama-7b": "Llama-7B"}
"""Names of the presets in a sentence."""


def answer(model: str, strategy: str) -> str:
    """The times of a step on one core of each target, in ms: one sentence, beside those of fp32 master weights."""
    times, masters = (milliseconds(name, shapes_of(model)) for name in (strategy, "fp32"))
    elements = sum(map(math.prod, shapes_of(model)))
    size = f"{elements / 1e6:,.0f} M" if elements >= 1e6 else f"{elements:,} parameters"
    beside = f"; fp32 master weights: {_by_target(masters)}" * (strategy != "fp32")
    own = _by_target(times, " on 1 core of ")
    said = f"{TITLED.get(model, 'these shapes')} ({size}), one step of AdamW under {strategy}: {own}{beside}."
    return fill(f"{said[0].upper()}{said[1:]} Estimates by a cost model; nothing has run on a device.", 118)


def _by_target(times: Mapping[str, float], on: str = " on ") -> str:
    (target, first), *others = times.items()
    return ", ".join([f"{first:.3g} ms{on}{target}", *(f"{x:.3g} on {other}" for other, x in others)])


def milliseconds(strategy: str, shapes: Shapes) -> dict[str, float]:
    """The estimated time of AdamW's step on one core of each target, in the newer dialect."""
    kernels = {target: adamw_kernel(strategy, target).in_dialect("nki") for target in TARGETS}
    return {target: sum(map(time_of, with_bodies(works_of(k, shapes)))) / 1e6 for target, k in kernels.items()}


# The command ----------------------------------------------------------------------------------------------------------


def overview() -> str:
    """The kernels by name, and what can be done with them."""
    width = max(map(len, KERNELS))
    rows = (f"  {name:<{width}}  strategy {k.strategy}, {k.arithmetic} arithmetic\n" for name, k in KERNELS.items())
    return (
        f"{len(KERNELS)} examples, each for {', '.join(FOLDERS)} (trn1_beta1 in the dialect of neuronxcc). Any\n"
        f"other optimizer and strategy gets its kernel in its first step, so nothing here is needed to train.\n\n"
        f"{''.join(rows)}\n"
        "Nothing was written. --write FOLDER writes them; --model MODEL estimates what a step on a model takes."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `kernels`."""
    instead = parser.add_mutually_exclusive_group()
    help_of_write = "write every kernel, for each target, as files in FOLDER (takes about 15 seconds)"
    instead.add_argument("--write", metavar="FOLDER", help=help_of_write)
    models = f"{', '.join(MODELS)}, or shapes such as 4096x4096,4096"
    help_of_model = f"print the estimated time of a step of AdamW on a model: {models}"
    instead.add_argument("--model", metavar="MODEL", help=help_of_model)
    parser.add_argument(
        "--strategy", choices=list(STRATEGIES), metavar="NAME", help=f"with --model: that of AdamW (default: {DEFAULT})"
    )


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Lists or writes kernels, or prints what steps cost; returns the exit status."""
    if options.strategy and options.model is None:
        print("kernels: --strategy goes with --model", file=sys.stderr)
        return 2
    try:
        if options.write:
            print(write_all(Path(options.write)))
        else:
            print(overview() if options.model is None else answer(options.model, options.strategy or DEFAULT))
    except OSError as error:
        said = f"{options.write} is not a folder that can be written to ({error.strerror}); name another one"
        print(f"kernels: {said}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 2
    return 0
