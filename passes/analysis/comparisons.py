"""Finds the states that a step compares: an error of theirs may choose another branch, and is no small one then.

Given::

    count = seen + (grad != 0)
    param - s0 * grad * (count >= 5)

Result: `seen`. Rounded stochastically, a counter of 5 is a 4 in some elements, and these do not move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from collage_neuron.passes.analysis.polynomials import Sum
from collage_neuron.passes.analysis.value_numbering import Values


def compared(values: Values, new: Mapping[str, Sum]) -> frozenset[str]:
    """Names of the inputs that comparisons or signs in `new` depend on; the larger of two values compares none.

    A sign by which a state itself is moved (Yogi's second moment) does not count: it stays as wrong as it was.
    """
    of_state = {name: set(_atoms(values, x)) for name, x in new.items()}
    found = set[str]()
    for atom in set().union(*of_state.values()):
        kind, operands, _ = values.atoms[atom]
        if kind in ("mask", "sign"):
            names = {name for x in operands for name in values.inputs(x)}
            found |= {n for n in names if kind == "mask" or atom not in of_state.get(n, ())}
    return frozenset(found)


def counts(values: Values, x: Sum, name: str) -> bool:
    """Returns True if x, the new value of a state, is the old one and whole numbers: comparisons, signs, constants.

    Such a state is compared with numbers, and needs a format that holds whole numbers as they are.
    """
    (own,) = values.atom("input", name=name)
    changed = [leaf for leaf in values.alternatives(x, name) if leaf != {own: 1.0}]
    return any(own in leaf for leaf in changed) and all(
        c == 1.0 if p == own else all(values.atoms[a].kind in ("mask", "sign") for a, _ in p)
        for leaf in changed
        for p, c in leaf.items()
    )


def _atoms(values: Values, x: Sum) -> Iterator[int]:
    """The atoms that a value consists of, each once."""
    seen, todo = set[int](), [x]
    while todo:
        new = {a for p in todo.pop() for a, _ in p} - seen
        seen |= new
        todo += [operand for a in new for operand in values.atoms[a].operands]
        yield from new
