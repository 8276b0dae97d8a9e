"""`python -m collage_neuron passes`: prints what each pass changes in the update of an optimizer of torch.optim."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer, SparseAdam

from collage_neuron.api import compile
from collage_neuron.errors import RunsAsWritten
from collage_neuron.explanation import explain
from collage_neuron.numerics.strategies import ARITHMETICS, DEFAULT, STRATEGIES, default_strategy

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    name.lower(): cls
    for name, cls in sorted(vars(torch.optim).items(), key=lambda item: item[0].lower())
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls not in (Optimizer, SparseAdam, LBFGS)
}
"""The optimizers of torch.optim, by name; without what takes sparse gradients, or a closure."""

HOW_TO_READ = """
How to read it. `captured` is the second step, as the optimizer writes it; each pass rewrites it further, and the last
one leaves what runs. A pass removes the lines marked - and adds those marked +; --full prints all after each pass.
# begins what the lines below it are part of: reading a stored value, a captured operation, storing a new value.
s0, s1, ... are numbers that Python computes in each step; c0, c1, ... the fp32 numbers made of them, which reach the
device; param_lo and the like the second word of a stored value. row, column, number: what a sum is given for.
Operations are torch's and Python's, and those of collage_neuron/numerics, whose docstrings say what they do."""


def text(optimizer: str, strategy: str | None, arithmetic: str, full: bool = False) -> str:
    """What passes make of an optimizer's second step, when all states exist and nothing is special to the first step.

    Raises:
        ValueError: the strategy does not work in the arithmetic.
    """
    # A matrix: Adafactor and Muon do otherwise with a vector.
    p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16, device="cpu"))
    p.grad = torch.zeros_like(p)
    made = OPTIMIZERS[optimizer]([p])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunsAsWritten)  # `explain` says it
        # `auto` would run sums of rows and columns (Adafactor's) as written, since of so few elements that is faster.
        step: Any = compile(made, strategy=strategy, arithmetic=arithmetic, backend="reference", verbose=False).step
        step()
    return explain(made, passes=True, graphs=full)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `passes`."""
    parser.add_argument(
        "optimizer", nargs="?", default="adamw", metavar="OPTIMIZER", type=str.lower, choices=OPTIMIZERS,
        help=f"a class of torch.optim ({', '.join(OPTIMIZERS)}); its defaults are used; default: AdamW. Of one of "
        "your own: collage_neuron.explain(optimizer, passes=True)",
    )  # fmt: skip
    of_strategy = f"how parameter and states are stored; default: {DEFAULT}, or {default_strategy('bf16')} with bf16"
    parser.add_argument("--strategy", choices=STRATEGIES, metavar="NAME", help=of_strategy)
    help_of_arithmetic = "fp32, or bf16, in which every operation rounds, as in the paper; default: fp32"
    parser.add_argument("--arithmetic", default="fp32", choices=ARITHMETICS, help=help_of_arithmetic)
    parser.add_argument("--full", action="store_true", help="the whole update after each pass, not what each changes")


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Prints what each pass changes, then how to read it; returns the exit status."""
    try:
        print(text(options.optimizer, options.strategy, options.arithmetic, options.full).rstrip(), flush=True)
        print(HOW_TO_READ, file=sys.stderr)  # what a pipe leaves on the terminal
    except (TypeError, ValueError, RuntimeError) as error:
        print(f"passes: {options.optimizer}: {error}", file=sys.stderr)
        return 1
    return 0
