"""Software pipelining: what leads to divisions and roots is computed one step of the loop ahead.

A division waits for the root before it, and what follows waits for the division: some 60 cycles, in which a CPU can
begin instructions of the next step only as far as it has registers to rename, which hold little more than one step.
With that chain ahead, the next step's roots run beside this step's roundings. A loop over x becomes::

    run:                                         ; the chain of the first step is before all loops
      %run_q = phi [ %first_q, %entry ], [ %ahead_q, %ran ]
    loop:
      %q = phi [ %run_q, %run ], [ %ahead_q, %loop ]
      %ahead_q = ...                             ; of %ahead, the step after %i, or %i itself if that is the last
      ...                                        ; the rest of step %i, which begins with its %q

Results of floating-point arithmetic are carried to the next turn; what else the rest needs (words as they are loaded,
masks) is computed again, which is as cheap as a register. Nothing is stored ahead, so that the order of loads and
stores of an element is as before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from collage_neuron.passes.backends.native.llvm_builder import NAME, RESULT

LONG = re.compile(r" = fdiv | = call <\d+ x float> @llvm\.sqrt\.")
CARRIED = re.compile(r" +%\w+ = (?:fadd|fsub|fmul|fdiv|fneg|call) (<\d+ x float>) ")
"""Floating-point arithmetic, by the lines of it, and its type."""


class Ahead(NamedTuple):
    """The lines of a loop in two parts."""

    chain: list[str]
    """Those of what is long, and of all that it needs."""
    rest: list[str]
    """The others, and what they need of the chain and is not carried."""
    carried: dict[str, str]
    """The type of each result of the chain that the rest takes from the turn before."""

    def lines(self, at: str, prefix: str) -> list[str]:
        """The chain of the step that begins at `at`; its results have names with a prefix."""
        own = {line.split()[0] for line in self.chain}

        def renamed(name: re.Match[str]) -> str:
            return at if name[0] == "%i" else f"%{prefix}_{name[0][1:]}" if name[0] in own else name[0]

        return [NAME.sub(renamed, line) for line in self.chain]

    def phis(self, first: tuple[str, str], later: tuple[str, str], prefix: str = "") -> Iterator[str]:
        """The lines that carry results into a block, from two others: (the block, the prefix of its results)."""
        for name, kind in self.carried.items():
            sources = ", ".join(f"[ {_prefixed(name, p)}, %{block} ]" for block, p in (first, later))
            yield f"  {_prefixed(name, prefix)} = phi {kind} {sources}"


def _prefixed(name: str, prefix: str) -> str:
    return f"%{prefix}_{name[1:]}" if prefix else name


def ahead_of(lines: Sequence[str]) -> Ahead:
    """The lines of a loop's body, taken apart; nothing is ahead in a loop without divisions and roots."""
    made = {line.split()[0]: line for line in lines if RESULT.match(line)}
    needs = {name: [x for x in NAME.findall(line)[1:] if x in made] for name, line in made.items()}
    chain = _closure((name for name, line in made.items() if LONG.search(line)), needs)
    others = [line for line in lines if line.split()[0] not in chain]
    wanted = [x for line in others for x in NAME.findall(line) if x in chain]
    carried, again = dict[str, str](), set[str]()
    while wanted:
        name = wanted.pop()
        if arithmetic := CARRIED.match(made[name]):
            carried[name] = arithmetic[1]
        elif name not in again:
            again.add(name)
            wanted += needs[name]
    rest = [line for line in lines if line.split()[0] not in chain - again]
    ordered = {name: carried[name] for name in made if name in carried}  # equal kernels have equal texts
    return Ahead([line for line in lines if line.split()[0] in chain], rest, ordered)


def _closure(names: Iterator[str], needs: dict[str, list[str]]) -> set[str]:
    """These names, and all that they need."""
    found, waiting = set[str](), [*names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += needs[name]
    return found
