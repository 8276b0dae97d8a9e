"""Draws of codes, which are spread over the steps of an element: bits, chances, evenness, and the errors of averages.

That they are drawn with the right chance in a step follows from uniform thresholds; over the steps, thresholds of an
element depend on each other, so errors of whole runs are compared with those of independent draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from chances import hoeffding, threefry_of_integers
from exact import on_reference, on_xla
from torch import Tensor

from collage_neuron.numerics.formats import format_named
from collage_neuron.numerics.threefry import Words, threefry
from collage_neuron.passes.ir import scalars
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.rewrite.random_bits import EPOCH, Randomness
from collage_neuron.passes.rewrite.writer import Writer

Draws = Callable[[int], Tensor]
GOLDEN = round((math.sqrt(5) - 1) / 2 * 2**32)
BITS = 1 << 16


@cache
def drawing(spread: tuple[bool, ...]) -> Update:
    """An update that returns thresholds."""
    writer = Writer(["x"])
    random = Randomness(writer.scalar, lambda: writer.index)
    body = writer.finish([random.spread()[0] if each else random() for each in spread])
    outputs = tuple(f"draw{i}" for i in range(len(spread)))
    return Update.elementwise(body, ("x",), outputs, writer.scalars, {"x": format_named("fp32")}, draws=True)


def thresholds(
    update: Update, n: int, seed: int = 0, step: int = 0, parameter: int = 0, first: int = 0, *, xla: bool = False
) -> list[Tensor]:
    entries = torch.tensor(update.scalars.run([], [seed, step, parameter, first]), dtype=torch.float32)
    return (on_xla if xla else on_reference)(update, [torch.zeros(n)], entries)


def defined(seed: int, step: int, parameter: int, element: int, draw: int) -> int:
    """A threshold, from the definition."""
    call = 32 + draw // 2
    word = threefry_of_integers((seed, step // EPOCH), (element, parameter * 64 + call))[draw % 2]
    bits, way = word & 0xFFFF, word >> 16 & 1
    turned = (bits + (step * GOLDEN % 2**32 >> 16)) % BITS
    return turned if way else BITS - 1 - turned


@pytest.mark.parametrize("step", [0, 1, EPOCH - 1, EPOCH, 70_000, 2**32 - 1])
def test_the_graph_draws_what_the_definition_says(step: int, xla: torch.device) -> None:
    """On the reference and on XLA; draws that are not spread, among them, have bits of their own."""
    update = drawing((True, False, True, True))
    seed, parameter, first = 0x12345678, 77, 2**31 + 5
    found = thresholds(update, 64, seed, step, parameter, first)
    for draw, at in enumerate((0, 2, 3)):
        assert found[at].tolist() == [defined(seed, step, parameter, first + i, draw) for i in range(64)]
    fresh = [threefry_of_integers((seed, step), (first + i, parameter * 64))[0] & 0xFFFF for i in range(64)]
    assert found[1].tolist() == fresh
    assert all(map(torch.equal, found, thresholds(update, 64, seed, step, parameter, first, xla=True)))


def test_the_constant_is_odd_so_that_every_number_of_32_bits_is_visited() -> None:
    assert GOLDEN % 2 == 1
    assert [scalars.golden16(step) for step in (1, 2**20)] == [float(n * GOLDEN % 2**32 >> 16) for n in (1, 2**20)]


def test_every_seed_epoch_parameter_element_and_draw_has_bits_of_its_own() -> None:
    """Of two independent thresholds, as many are on the same side of the middle as not, within Hoeffding's bound."""
    n, update = 1 << 14, drawing((True,) * 5)
    keys = itertools.product((0, 1, 2**32 - 1), (0, EPOCH, EPOCH << 8), (0, 1, 1 << 20), (0, 1 << 16))
    throws = [side for key in keys for side in thresholds(update, n, *key)[:2]]
    throws += thresholds(update, n, 0, 0, 0, 0)[2:]
    sides = torch.stack(throws) < BITS // 2
    share = (2 * sides.double() - 1) @ (2 * sides.double() - 1).T / n
    assert float((share - torch.eye(len(share))).abs().max()) <= 2 * hoeffding(n)


@pytest.mark.parametrize("step", [0, 1, 2, 1000, EPOCH - 1, EPOCH])
def test_thresholds_of_a_step_are_uniform(step: int) -> None:
    """In each step a code goes up with its chance: of 16 equal intervals each has its share of the elements."""
    n = 1 << 16
    (found,) = thresholds(drawing((True,)), n, 3, step)
    share = torch.histc(found.double(), 16, 0, BITS) / n
    assert float((share - 1 / 16).abs().max()) <= hoeffding(n)
    assert int(found.min()) >= 0
    assert int(found.max()) < BITS


def by_step(n: int, one_way: bool = False) -> Draws:
    """The thresholds of n elements in a step of the first epoch, as `defined` says, without a graph for each step."""
    words = threefry(
        Words(torch.tensor(0), torch.tensor(0)), Words(torch.arange(n, dtype=torch.int32), torch.tensor(32))
    )
    bits, way = words.first & 0xFFFF, words.first & (0 if one_way else 1 << 16)
    inverted = torch.where(way == 0, 0 if one_way else 0xFFFF, 0)
    return lambda step: ((bits + int(scalars.golden16(step))) & 0xFFFF) ^ inverted


def test_the_same_without_a_graph() -> None:
    for step in (0, 1, EPOCH - 1):
        assert torch.equal(by_step(64)(step), thresholds(drawing((True,)), 64, step=step)[0])


def unevenness(steps: range, chance: float) -> float:
    """By how many the draws of an element that went up differ from their expected number, at most, at any time."""
    draws, ups, worst = by_step(256), torch.zeros(256), 0.0
    for count, step in enumerate(steps, 1):
        ups += draws(step) < chance * BITS
        worst = max(worst, float((ups - count * chance).abs().max()))
    return worst


@pytest.mark.parametrize("chance", [0.5, 0.1, 0.01, 1 / 3])
def test_of_n_steps_the_right_number_goes_up(chance: float) -> None:
    assert unevenness(range(100, 900), chance) <= 3


def test_a_number_that_is_nearly_rational_would_not_spread_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalars, "golden16", lambda step: float(int(step) * 0x80000001 >> 16 & 0xFFFF))
    assert unevenness(range(100, 500), 0.1) > 12


# Averages ------------------------------------------------------------------------------------------------------------

SHAPE = (16, 128)
COUNT = SHAPE[0] * SHAPE[1]


def drawn(draws: Draws, step: int) -> list[Tensor]:
    return [x.reshape(SHAPE) for x in (draws(step), independent(-1 - step))]


def independent(step: int) -> Tensor:
    return torch.randint(0, BITS, (COUNT,), generator=torch.Generator().manual_seed(step % 2**32), dtype=torch.int32)


def of_average(draws: Draws, decay: float, steps: int, period: int = 1, noise: bool = True) -> Tensor:
    """The mean over time of an average of squares in u8q16, over the exact one, less 1."""
    fmt, g = format_named("u8q16"), torch.Generator().manual_seed(1)
    assert fmt.draw is not None
    scale = torch.exp(torch.randn(SHAPE, generator=g))
    exact, total, count = scale.double().square(), torch.zeros(SHAPE, dtype=torch.float64), 0
    words = fmt.draw(scale.square(), *drawn(draws, 0))
    for step in range(1, steps):
        z = torch.randn(SHAPE, generator=g) if noise else torch.ones(SHAPE)
        square = (scale * z).square() * period * (step % period == 0)
        words = fmt.draw(fmt.decode(words) * decay + square * (1 - decay), *drawn(draws, step))
        exact = exact * decay + square.double() * (1 - decay)
        if step > steps // 4 and step % period == 0:
            total, count = total + fmt.decode(words) / exact, count + 1
    return total / count - 1


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("decay", [0.99, 0.999])
def test_averages_are_nearer_than_with_independent_draws(decay: float) -> None:
    spread, others = (of_average(draws, decay, 800) for draws in (by_step(COUNT), independent))
    assert rms(spread) < 0.9 * rms(others)
    assert abs(float(spread.mean())) < 0.1 * rms(others) + abs(float(others.mean()))


@pytest.mark.parametrize("period", [2, 8, 34, 89])
def test_gradients_in_step_with_the_golden_ratio_do_little_harm(period: int) -> None:
    """Each F-th step, where F times the ratio is nearly whole, so that thresholds of these steps are nearly equal."""
    spread, others = (of_average(draws, 0.99, 900, period) for draws in (by_step(COUNT), independent))
    assert rms(spread) < 1.3 * rms(others)


def test_averages_of_constants_have_no_common_error() -> None:
    """Which they have if thresholds of all elements go the same way, since the next one then decides the last."""
    both, one = (float(of_average(by_step(COUNT, way), 0.95, 600, noise=False).mean()) for way in (False, True))
    assert abs(both) < 1.5e-3
    assert abs(one) > 2.5e-3


@pytest.mark.parametrize(("name", "decay"), [("u8q16", 0.99), ("u8q16", 0.999), ("i8q8", 0.99), ("i8q4", 0.99)])
@pytest.mark.parametrize("start", [2.0**-6, 2.0**6])
def test_the_largest_of_a_block_passes_powers_of_two(name: str, decay: float, start: float) -> None:
    """Averages of constants reach them, from below and from above, by steps smaller than the gaps at powers of two."""
    fmt, g = format_named(name), torch.Generator().manual_seed(0)
    constant = torch.exp(torch.randn(64, 3, generator=g))
    numbers = torch.randint(0, BITS, (64, 3), generator=g, dtype=torch.int32)
    assert fmt.draw is not None
    words = fmt.draw(constant * start, numbers)
    for step in range(1, round(10 / (1 - decay))):
        turned = (numbers + int(scalars.golden16(step))) & 0xFFFF
        other = (numbers + int(scalars.mixed16(step))) & 0xFFFF
        words = fmt.draw(fmt.decode(words) * decay + constant * (1 - decay), turned, other)
    ratio = fmt.decode(words) / constant
    assert float(ratio.min()) > 0.8
    assert float(ratio.max()) < 1.25
