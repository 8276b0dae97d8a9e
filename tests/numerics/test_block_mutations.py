"""Block formats, broken in one place at a time: each mutation changes a word, or a value, of the numbers tried here.

That the words and values of the unbroken formats are right is tested in test_block_words.py.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator

import pytest
import torch
import torch.fx as fx
from coded import CURVES, LEAST, NAMES, UNSIGNED, as_words, blocks, codes
from exact import edited, on_reference, update_of, without_rounding
from torch import Tensor

from collage_neuron.numerics.block_words import I8Q4
from collage_neuron.numerics.eft import inverse_power_of_two, power_of_two, whole
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.numerics.power_gaps import Gap
from collage_neuron.passes.ir.update import Update

DRAWN = ("i8q4", "i8q8", "u16q16", "u8q16")
"""Drawn between the values of two codes."""

EXCHANGES = {
    power_of_two: inverse_power_of_two,
    inverse_power_of_two: power_of_two,
    operator.add: operator.sub,
    operator.sub: operator.add,
    torch.sign: torch.abs,
    torch.maximum: torch.minimum,
}
"""One operation for another."""


def mutations(update: Update) -> Iterator[tuple[str, Update]]:
    """The update with an operation exchanged, a constant changed, a choice reversed or a rounding lost."""
    yield from without_rounding(update)
    for i, node in enumerate(update.graph.graph.nodes):
        if node.target in EXCHANGES:
            yield f"{node.name} exchanged", edited(update, i, _exchanged)
        if any(isinstance(a, (int, float)) and 0 < abs(a) < torch.inf for a in node.args):
            yield f"{node.name} changed", edited(update, i, _changed)
        if node.target is torch.where:
            yield f"{node.name} swapped", edited(update, i, lambda n: setattr(n, "args", (n.args[0], *n.args[:0:-1])))


def _exchanged(node: fx.Node) -> None:
    node.target = EXCHANGES[node.target]  # type: ignore[index, assignment]


def _changed(node: fx.Node) -> None:
    """Floats are doubled, and bits are shifted by one more; a block has half as many elements."""
    less = node.target.__name__ == "block_max"  # type: ignore[union-attr]

    def other(a: object) -> object:
        if isinstance(a, int):
            return a // 2 if less else a + 1
        return 2 * a if isinstance(a, float) else a

    node.args = tuple(map(other, node.args))  # type: ignore[arg-type]


def numbers(name: str) -> Tensor:
    """Rows of two blocks with magnitudes of 40 binades, of zeros, of the smallest and of the largest numbers."""
    g = torch.Generator().manual_seed(0)
    x = torch.exp2(40 * torch.rand(40, 200, generator=g) - 30)
    x[:, ::9], x[0] = 0, 0
    x[1:9] *= torch.exp2(torch.tensor([-149.0, -120.0, -100.0, -80.0, -60.0, 60.0, 100.0, 117.0]))[:, None]
    x[9, 100], x[10, 5], x[11, 3:5] = torch.finfo().max, torch.inf, torch.nan
    x[12:24, 100] = 2.0**20 * torch.tensor(
        [1, 1.5, 1.75, 1.8749, 1.8751, 1.9, 1.94, 1.99, 1.9998, 1.9999999, 1.1, 1.9993]
    )
    x[24:28] = x[24:28] / x[24:28].amax(1, keepdim=True) * LEAST[name] * torch.tensor([0.7, 1.0, 2.0, 3.0])[:, None]
    x[28], x[28, 7] = 1.0625 - 2.0**-23, 1.5  # next to the middle of two codes
    x[29:37] = torch.linspace(0.92, 1.08, 8)[:, None] * torch.linspace(0.999, 1.001, 200)  # between two powers of two
    return x if name in UNSIGNED else x * (1 - 2 * (torch.rand(x.shape, generator=g) < 0.5).float())


GAPS = {"i8q4": I8Q4.gap} | {name: CURVES[name].gap for name in ("i8q8", "u16q16", "u8q16")}
"""Of the formats whose draws depend on where a number lies between two powers of two."""


def around(gap: Gap) -> list[Tensor]:
    """Blocks with a number in the gap around a power of two, alone or beside larger ones, and what draws them.

    Around 1, and around the smallest power of two that a block has and the one after it.
    """
    ends = torch.tensor([gap.below, gap.above]) / 2
    inside = ends[0].lerp(ends[1], torch.linspace(0, 1, 5))
    at = torch.cat([inside, *(torch.nextafter(ends, torch.tensor(to)) for to in (0.0, 9.0))])
    drawn = torch.tensor([0.0, 20000, 32768, 50000, 65535])
    size, r, o = (t.flatten() for t in torch.meshgrid(at, drawn, drawn, indexing="ij"))
    rows = []
    for other, unit in itertools.product((0.1, 1.0, 1.5), (1.0, gap.least, 2 * gap.least)):
        x = 0.3 * torch.rand(len(size), 132, generator=torch.Generator().manual_seed(3))
        x[:, 0], x[:, 1] = size, other
        rows.append(x * unit)
    drawn_by = [torch.full((len(rows) * len(size), 132), first) for first in (17000.0, 41000.0)]
    for numbers_of, first in zip(drawn_by, (r, o), strict=True):
        numbers_of[:, 0] = first.repeat(len(rows))
    return [torch.cat(rows), *drawn_by]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.float().nan_to_num(1e-3), y.float().nan_to_num(1e-3)) for x, y in zip(a, b, strict=True))


def unnoticed(update: Update, inputs: list[Tensor]) -> list[str]:
    """The mutations that change no result."""
    expected = on_reference(update, inputs)
    return [name for name, mutated in mutations(update) if same(on_reference(mutated, inputs), expected)]


AGAIN = "the word is rounded again, or is whole already"
LAST = "to nearest no root is more than the last code"
FULL = "the last code is the last number of the word, which saturates"
FIRST = "the root of P is its code: this guards against roots that are rounded otherwise"
NAN = "of what is not finite the difference is NaN, added or subtracted"
HARMLESS: dict[str, dict[str, str]] = {
    "i8q4 draw": {"round_to_1": AGAIN},
    "u16q8 encode": {"round_to": AGAIN, "round_to_1": AGAIN, "gt_1 changed": LAST, "where_2 changed": LAST}
    | dict.fromkeys(("ge_1 changed", "add exchanged"), FIRST),
    "u16q8 draw": {"round_to_1": AGAIN} | dict.fromkeys(("ge_1 changed", "add_1 exchanged"), FIRST),
    "i8q8 draw": {"round_to_1": AGAIN},
    "u16q16 encode": dict.fromkeys(("round_to", "round_to_1"), AGAIN)
    | dict.fromkeys(("ge_1 changed", "add_1 exchanged"), FIRST),
    "u16q16 draw": {"round_to_1": AGAIN},
    "u8q16 encode": dict.fromkeys(("round_to", "round_to_1"), AGAIN)
    | dict.fromkeys(("gt_1 changed", "where_2 changed"), FULL)
    | dict.fromkeys(("ge_1 changed", "add_1 exchanged"), FIRST),
    "u16q8 decode": {"add_1 exchanged": NAN},
    "ue5m3 decode": {"add_1 exchanged": NAN},
}
UP = "what is drawn up across the gap is drawn up between the codes around it by the same number: guards roundings"
HARMLESS["i8q4 draw"] |= {"ge changed": UP}
HARMLESS["i8q8 draw"] |= {"ge changed": UP}
HARMLESS["u16q16 draw"] |= {"ge_1 changed": UP, "add_7 exchanged": UP}
HARMLESS["u8q16 draw"] = {"round_to_1": AGAIN, "ge_1 changed": UP, "add_7 exchanged": UP}
HARMLESS["u8q16 draw"] |= dict.fromkeys(("gt_3 changed", "where_6 changed"), FULL)
"""Mutations without an effect, by name, with the reason."""


@pytest.mark.mutants
@pytest.mark.parametrize("name", NAMES)
def test_every_mutation_is_noticed(name: str) -> None:
    fmt, x = FORMATS[name], numbers(name)
    stored = [c.storage for c in fmt.components]
    found = {"encode": unnoticed(update_of(["x"], fmt.encode, stored), [x])}
    found["decode"] = unnoticed(update_of(["c", "p"], lambda c, p: [fmt.decode([c, p])]), blocks(name, 0.5))
    if (draw := fmt.draw) is not None:
        other = torch.randint(0, 2**16, x.shape, generator=torch.Generator().manual_seed(2)).float()
        r = torch.randint(0, 2**16, x.shape, generator=torch.Generator().manual_seed(1)).float()
        r[:, 100] = 0
        if name in DRAWN:  # the last random numbers: P stays the power of two, and what is a code stays that code
            x[38, :127] = fmt.decode([as_words(name, codes(name)[-127:]), torch.ones(127)])
            r[12, 100], r[38] = 2**16 - 1, 2**16 - 1
        if name in ("u16q16", "u8q16"):  # P, drawn downwards
            x[39], r[39] = 1.0, 2**16 - 1
        update = update_of(["x", "r", "o"], lambda x, r, o: draw(x, whole(r), whole(o)), stored)
        found["draw"] = unnoticed(update, [x, r, other])
        if name in GAPS:
            in_gaps = unnoticed(update, around(GAPS[name]))
            found["draw"] = [mutation for mutation in found["draw"] if mutation in in_gaps]
    for kind, names in found.items():
        assert set(names) == set(HARMLESS.get(f"{name} {kind}", {})), kind
