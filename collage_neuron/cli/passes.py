"""`python -m collage_neuron passes`: prints what each pass changes in the update of an optimizer of torch.optim."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.api import compile
from collage_neuron.explanation import explain, explain_measured
from collage_neuron.numerics import eft, matrix_sums, reductions, tensor_sums
from collage_neuron.numerics.strategies import ARITHMETICS, DEFAULT, STRATEGIES, bytes_with_adam, default_strategy

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}
"""The optimizers of torch.optim, by name."""


LEGEND = """\
How to read it. `captured` is the step as the optimizer writes it; each pass below rewrites it further, and `cut` leaves
what runs. A pass removes the lines marked - and adds those marked +; --full prints the whole update after each pass.
Where a pass has nothing to do here: for dead-code see `passes ASGD`, for cut `passes Adafactor`.
#: what the lines below it are part of: reading a stored value, an operation of the captured step, storing a new value.
s0, s1, ...: numbers that Python computes in each step; c0, c1, ...: the fp32 numbers made of them, which reach the
device. p * s0 with s0 near 1 becomes p + p * (s0 - 1), which loses nothing of the small part.
stored: a strategy names the format of the parameter and of each state. bf16+int16 is a bf16 number and an int16, which
counts last places of fp32 from there (at most 32767; none where the number is 0). With int8 they are counted in units
of 256, so at most 127 * 256 = 32512. bf16x2 is a sum of two bf16 numbers. docs/strategies.md compares strategies.
Operations are torch's and Python's (ne is !=; 0.00390625 is 1/256), and:
"""


def glossary(found: str) -> str:
    """What the operations in a text do that are not torch's: the beginnings of their docstrings."""
    named = {name: x for module in (eft, matrix_sums, reductions, tensor_sums) for name, x in vars(module).items()}
    ours = {name: named[name] for name in dict.fromkeys(re.findall(r" (?!c\d)\w+ = (\w+)\(", found)) if name in named}
    texts = {name: (inspect.getdoc(function) or "").partition("\n\n")[0] for name, function in ours.items()}
    return "".join(textwrap.fill(f"{name}: {text}", 118, subsequent_indent="  ") + "\n" for name, text in texts.items())


def text(optimizer: str, strategy: str | None, arithmetic: str, measured: bool = False, full: bool = False) -> str:
    """What passes make of an optimizer's second step, when all states exist and nothing is special to the first step.

    Raises:
        ValueError: the strategy does not work in the arithmetic.
        UnsupportedUpdate: the optimizer cannot be compiled.
    """
    p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16, device="cpu"))
    p.grad = torch.zeros_like(p)
    made = OPTIMIZERS[optimizer]([p])
    is_needed = inspect.signature(made.step).parameters["closure"].default is inspect.Parameter.empty
    # `auto` would run sums of rows and columns (Adafactor's) as written, since of so few elements that is faster.
    step: Any = compile(made, strategy=strategy, arithmetic=arithmetic, backend="reference", verbose=False).step
    step(*[lambda: torch.zeros((), dtype=torch.float32, device="cpu")] * is_needed)
    return explain_measured(made, full) if measured else explain(made, passes=True, graphs=full)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `passes`."""
    parser.add_argument(
        "optimizer", nargs="?", default="AdamW", metavar="OPTIMIZER", choices=OPTIMIZERS,
        help=f"a class of torch.optim ({', '.join(OPTIMIZERS)}); its defaults are used; default: AdamW",
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
        "counts of what has arrived in the stored values",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="the whole update after each pass, not what each changes")


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Prints what each pass changes; returns the exit status."""
    given = options.optimizer, options.strategy, options.arithmetic, options.measured, options.full
    try:
        found = text(*given)
        if "\ncaptured: " in found:
            print(f"{LEGEND}{glossary(found)}", file=sys.stderr, flush=True)  # first: it says how to read what follows
        print(found.rstrip())
    except (TypeError, ValueError, RuntimeError) as error:
        print(f"{options.optimizer}: {error}", file=sys.stderr)
        return 1
    return 0
