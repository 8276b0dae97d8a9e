"""`python -m collage_neuron passes`: prints what each pass changes in the update of an optimizer of torch.optim."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.optim import Optimizer

from collage_neuron.api import compile
from collage_neuron.errors import RunsAsWritten
from collage_neuron.explanation import explain, explain_measured
from collage_neuron.numerics import eft, matrix_sums, reductions, tensor_sums
from collage_neuron.numerics.strategies import ARITHMETICS, DEFAULT, STRATEGIES, bytes_with_adam, default_strategy
from collage_neuron.optimizer.compiled import base_of
from collage_neuron.runtime import step_plan
from collage_neuron.runtime.fallback_warning import why
from collage_neuron.runtime.step_call import needs_one
from collage_neuron.settings import Settings
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.trace import dry_run

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    name: cls
    for name, cls in sorted(vars(torch.optim).items(), key=lambda item: item[0].lower())
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls not in (Optimizer, torch.optim.SparseAdam)
}
"""The optimizers of torch.optim, by name; without SparseAdam, which takes sparse gradients alone."""


HOW_TO_READ = """\
How to read it. `captured` is the step as the optimizer writes it; each pass rewrites it further, and the last one
leaves what runs. A pass removes the lines marked - and adds those marked +; --full prints all after each pass.
# begins what the lines below it are part of: reading a stored value, a captured operation, storing a new value."""

ENTRIES: Mapping[str, str] = {
    r"numbers of the next step": (
        "numbers of the next step: here the second one, of a parameter of 2 by 2; sizes among them are of that."
    ),
    r"\bs0\b": (
        "s0, s1, ...: numbers that Python computes in each step; c0, c1, ...: the fp32 numbers made of them, "
        "which reach the device."
    ),
    r"= fp32\(\(s\d+ - 1\)\)": (
        "p * s0 with s0 near 1 becomes p + p * (s0 - 1), which loses nothing of the small part."
    ),
    r"upper16\(": (
        "upper16(seed), lower16(step), ...: the halves of the 32-bit numbers that random bits are drawn from: the "
        "seed, the number of the step, the index of the parameter, and that of the first element (0 unless it is "
        "a shard)."
    ),
    r"_lo\b": ("param_lo and the like: the second number of a stored value, after param, its bf16 number."),
    r"\+int16": (
        "bf16+int16: a bf16 number and an int16, which counts last places of fp32 from there (at most 32767; none "
        "where the number is 0)."
    ),
    r"\+int8": (
        "bf16+int8: a bf16 number and an int8, which counts last places of fp32 from there in units of 256, so at "
        "most 127 * 256 = 32512."
    ),
    r"bf16x2": ("bf16x2: the sum of two bf16 numbers."),
    r", (row|column|number)\)": (
        "row, column, number: what a sum or mean is given for: each row, each column, or the whole tensor."
    ),
    r"\breduced0\b": (
        "reduced0, ...: sums, norms or means of elements that a stage gives to those after it. number0, ...: what "
        "a stage computes from such sums."
    ),
    r"\bwanted param\b": (
        "wanted param: the update before it is stored, called raw in sums; pair is what arrived of it in the stored "
        "value, high what arrived in its bf16 number alone. A sum of one name is of squares, one of two names of "
        "their products. EDQ, the share of the wanted update that arrives, is `sum pair*raw` over `sum raw`; lost "
        "updates are `count lost pair`. docs/monitor.md explains them."
    ),
    r"\bne\(": ("ne: torch's and Python's !=."),
    r"0\.00390625": ("0.00390625: 1/256."),
}
"""What is explained, by the pattern of the text that needs it."""

IDLE = {"dead-code": "ASGD", "cut": "Adafactor"}
"""Passes that often have nothing to do, each with an optimizer in which it has."""


def legend(text: str, optimizer: str) -> str:
    """How to read a text: what occurs in it, explained; for passes that have nothing to do, an optimizer to look at."""
    lines = [said for pattern, said in ENTRIES.items() if re.search(pattern, text)]
    idle = [name for name in IDLE if re.search(rf"^{name}: .*\n  \(nothing", text, re.MULTILINE)]
    elsewhere = [f"{name} in `passes {IDLE[name]}`" for name in idle if IDLE[name] != optimizer]
    lines += [f"A pass that has nothing to do here is seen at work: {', '.join(elsewhere)}."] * bool(elsewhere)
    filled = [textwrap.fill(line, 118, subsequent_indent="  ") for line in lines]
    return "\n".join([HOW_TO_READ, *filled, "Operations are torch's and Python's, and:", glossary(text)])


def glossary(text: str) -> str:
    """What the operations in a text do that are not torch's: the beginnings of their docstrings."""
    named = {name: x for module in (eft, matrix_sums, reductions, tensor_sums) for name, x in vars(module).items()}
    own = {name: named[name] for name in dict.fromkeys(re.findall(r" (?!c\d)\w+ = (\w+)\(", text)) if name in named}
    said = {name: (inspect.getdoc(function) or "").partition("\n\n")[0] for name, function in own.items()}
    return "".join(
        textwrap.fill(f"{name}: {first}", 118, subsequent_indent="  ") + "\n" for name, first in said.items()
    )


def text(optimizer: str, strategy: str | None, arithmetic: str, measured: bool = False, full: bool = False) -> str:
    """What passes make of an optimizer's second step, when all states exist and nothing is special to the first step.

    Before it is a line with figures, and a sentence alone where steps run as written.

    Raises:
        ValueError: the strategy does not work in the arithmetic.
        UnsupportedUpdate: the optimizer cannot be compiled.
    """
    # A matrix: Adafactor and Muon do otherwise with a vector.
    p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16, device="cpu"))
    p.grad = torch.zeros_like(p)
    made = OPTIMIZERS[optimizer]([p])
    if needs_one(made):
        return f"{optimizer} has no passes to show: its step() needs a closure, and what it does depends on the losses"
    # `auto` would run sums of rows and columns (Adafactor's) as written, since of so few elements that is faster.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunsAsWritten)  # it is said below, without the bytes of this small tensor
        step: Any = compile(made, strategy=strategy, arithmetic=arithmetic, backend="reference", verbose=False).step
        step()
    if bookkeeping(made).as_written:
        reason = why(made).partition(" (at ")[0].replace(" of a tensor of shape [2, 2]", "")
        return (
            f"{optimizer} has no passes: {reason}, so it runs as written on fp32 values, which exist during a step; "
            "between steps weights and states are stored as the strategy says (docs/as_written.md)"
        )
    base = base_of(type(made))
    (job,) = step_plan.plan(base, made, made.param_groups[0], 0, dry_run.foreseen(base, made), measured)
    name = Settings.of(made.param_groups[0]).strategy
    explained = explain_measured(made, full) if measured else explain(made, passes=True, graphs=full)
    return f"{figures(optimizer, str(name), job)}\n\n{explained}"


def figures(optimizer: str, strategy: str, job: step_plan.Job) -> str:
    """The operations before and after all passes, and the bytes per parameter that the result reads and writes."""
    update, graph = job.update, job.recording.captured.graph
    kernels = "one kernel, which reads" if len(update.stages) == 1 else f"{len(update.stages)} stages, which read"
    sizes = {
        key: c.bytes
        for name, fmt in update.formats.items()
        for key, c in zip(fmt.keys(name), fmt.components, strict=True)
        if not c.block  # words that a block of elements shares: 0.03 bytes
    }
    sizes["grad"] = job.params[0].dtype.itemsize
    reads = sum(
        sizes.get(str(n.target), 0) for s in update.stages for n in s.body.nodes if n.op == "placeholder" and n.users
    )
    writes = sum(sizes.get(key, 0) for key in update.outputs)
    # Of several stages all are counted: each of them runs.
    before, after = operations(graph), sum(map(operations, (stage.body for stage in update.stages)))
    writing = f"write{'s' * (len(update.stages) == 1)} {writes}"
    said = (
        f"{optimizer} under {strategy}: {before} operation{'s' * (before != 1)} become{'s' * (before == 1)} {after} in "
        f"{kernels} {reads} bytes per parameter and {writing}. Read this to check that the compiler computes what your "
        "optimizer wrote."
    )
    return textwrap.fill(said, 118)


def operations(graph: fx.Graph) -> int:
    """The number of operations of a graph."""
    return sum(node.op == "call_function" for node in graph.nodes)


def named(given: str) -> str:
    """An argparse type: the name of an optimizer of torch.optim, in whatever case it is written."""
    known = {name.lower(): name for name in OPTIMIZERS}
    if given.lower() in known:
        return known[given.lower()]
    if given.lower() == "sparseadam":
        raise argparse.ArgumentTypeError("SparseAdam takes sparse gradients alone, which cannot be compiled")
    near = [known[name] for name in difflib.get_close_matches(given.lower(), known, 2)]
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise argparse.ArgumentTypeError(
        f"torch.optim has no {given!r}{meant}. There are {', '.join(OPTIMIZERS)}. For an optimizer of your own, call "
        "collage_neuron.explain(optimizer, passes=True)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `passes`."""
    parser.add_argument(
        "optimizer", nargs="?", default="AdamW", metavar="OPTIMIZER", type=named,
        help=f"a class of torch.optim ({', '.join(OPTIMIZERS)}); its defaults are used; default: AdamW. Of one of "
        "your own: collage_neuron.explain(optimizer, passes=True)",
    )  # fmt: skip
    sizes = ", ".join(f"{name} ({bytes_with_adam(name)})" for name in STRATEGIES)
    parser.add_argument(
        "--strategy", choices=STRATEGIES, metavar="NAME",
        help=f"how the parameter and the states are stored, with bytes per parameter of Adam: {sizes}; "
        f"default: {DEFAULT}, or {default_strategy('bf16')} with --arithmetic bf16",
    )  # fmt: skip
    help_of_arithmetic = "fp32, or bf16, in which every operation rounds, as in the paper; default: fp32"
    parser.add_argument("--arithmetic", default="fp32", choices=ARITHMETICS, help=help_of_arithmetic)
    parser.add_argument(
        "--measured", action="store_true",
        help="the update of a step that collage_neuron.monitor measures: one more pass, instrument, adds sums and "
        "counts of what has arrived in the stored values, for EDQ and lost updates (docs/monitor.md)",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="the whole update after each pass, not what each changes")


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Prints what each pass changes, then how to read it; returns the exit status."""
    given = options.optimizer, options.strategy, options.arithmetic, options.measured, options.full
    try:
        with warnings.catch_warnings(record=True) as warned:
            shown = text(*given)
        for said in dict.fromkeys(str(warning.message) for warning in warned):
            print(f"passes: {said}", file=sys.stderr, flush=True)
        if "\ncaptured: " not in shown:
            print(f"passes: {shown}")
            return 0
        print(shown.rstrip(), flush=True)
        print(f"\n{legend(shown, options.optimizer)}", end="", file=sys.stderr)  # what a pipe leaves on the terminal
    except (TypeError, ValueError, RuntimeError) as error:
        print(f"passes: {options.optimizer}: {error}", file=sys.stderr)
        return 1
    return 0
