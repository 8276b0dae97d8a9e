"""`python -m collage_neuron passes`: prints what each pass changes in the update of an optimizer of torch.optim."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.api import compile
from collage_neuron.explanation import explain, explain_measured
from collage_neuron.numerics.strategies import ARITHMETICS, DEFAULT, STRATEGIES, default_strategy

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}
"""The optimizers of torch.optim, by name."""


LEGEND = """\
A pass removes the lines marked - and adds those marked +; expand replaces every line. --full prints the whole update
after each pass. s0, s1, ... are the numbers of the step (learning rate, betas, what follows from the step count),
computed by Python; c0, c1, ... the fp32 numbers made of them, which reach the device: p * s0 with s0 near 1 becomes
p + p * (s0 - 1), which loses nothing of the small part. widen reads a number as fp32,
round_to rounds, narrow stores what is rounded. places(x) counts the last places of fp32 by which x differs from the
bf16 number next to it, beyond(hi, n) moves a number by so many. Of your own optimizer:
collage_neuron.explain(optimizer, passes=True)."""


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
    step: Any = compile(made, strategy=strategy, arithmetic=arithmetic, verbose=False).step
    step(*[lambda: torch.zeros((), dtype=torch.float32, device="cpu")] * is_needed)
    return explain_measured(made, full) if measured else explain(made, passes=True, graphs=full)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `passes`."""
    parser.add_argument(
        "optimizer", nargs="?", default="AdamW", metavar="OPTIMIZER", choices=OPTIMIZERS,
        help=f"a class of torch.optim ({', '.join(OPTIMIZERS)}); its defaults are used; default: AdamW",
    )  # fmt: skip
    default = f"{DEFAULT}; {default_strategy('bf16')} in bf16"
    parser.add_argument("--strategy", choices=STRATEGIES, metavar="NAME", help=f"any strategy; default: {default}")
    help_of_arithmetic = "fp32, or bf16, in which every operation rounds, as in the paper; default: fp32"
    parser.add_argument("--arithmetic", default="fp32", choices=ARITHMETICS, help=help_of_arithmetic)
    parser.add_argument("--measured", action="store_true", help="the update of a step that a monitor measures")
    parser.add_argument("--full", action="store_true", help="the whole update after each pass, not what each changes")


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Prints what each pass changes; returns the exit status."""
    given = options.optimizer, options.strategy, options.arithmetic, options.measured, options.full
    try:
        found = text(*given)
        print(f"{LEGEND}\n", file=sys.stderr, flush=True)  # first: it says how to read what follows
        print(found, end="")
    except (TypeError, ValueError, RuntimeError) as error:
        print(f"{options.optimizer}: {error}", file=sys.stderr)
        return 1
    return 0
