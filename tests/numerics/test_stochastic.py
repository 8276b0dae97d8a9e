"""Stochastic stores: the generator, the chances against exact rationals, no bias, and the same bits everywhere."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.fx as fx
from as_written import Written
from exact import edited, on_reference, on_xla
from oracles import hoeffding
from planned import capture
from torch import Tensor, nn
from updates import rewritten

from collage_neuron.errors import VerificationError
from collage_neuron.numerics.eft import shift_right, stochastic_round
from collage_neuron.numerics.formats import format_named
from collage_neuron.numerics.threefry import ROTATIONS, Words, rotate_left, threefry
from collage_neuron.passes.backends import reference
from collage_neuron.passes.ir.update import Captured, Update
from collage_neuron.passes.ir.verify import verify

MASK = 2**32 - 1


def threefry_of_integers(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """The algorithm on Python's integers, from the paper."""
    ks = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + ks[0]) & MASK, (counter[1] + ks[1]) & MASK
    for i in range(20):
        x = (x + y) & MASK
        r = ROTATIONS[i % 8]
        y = (y << r & MASK | y >> 32 - r) ^ x
        if i % 4 == 3:
            x, y = (x + ks[(i // 4 + 1) % 3]) & MASK, (y + ks[(i // 4 + 2) % 3] + i // 4 + 1) & MASK
    return x, y


pytestmark = pytest.mark.usefixtures("rejecting")


def int32(n: int) -> Tensor:
    return torch.tensor((n + 2**31) % 2**32 - 2**31, dtype=torch.int32)


def unsigned(x: Tensor) -> list[int]:
    return [n & MASK for n in x.flatten().tolist()]


# The generator -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((MASK, MASK), (MASK, MASK), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_the_known_answers_of_random123(
    counter: tuple[int, int], key: tuple[int, int], expected: tuple[int, int]
) -> None:
    words = threefry(Words(*map(int32, key)), Words(*map(int32, counter)))
    assert tuple(unsigned(torch.stack(words))) == expected


def test_int32_tensors_wrap_as_words_do() -> None:
    numbers = random.Random(0)
    rows = [[numbers.getrandbits(32) for _ in range(4)] for _ in range(200)]
    columns = [torch.stack([int32(n) for n in column]) for column in zip(*rows, strict=True)]
    words = threefry(Words(*columns[:2]), Words(*columns[2:]))
    expected = [threefry_of_integers((a, b), (c, d)) for a, b, c, d in rows]
    assert list(zip(unsigned(words.first), unsigned(words.second), strict=True)) == expected


def test_shifts_and_rotations_treat_int32_as_bits() -> None:
    for n in (0, 1, 2**31, MASK, 0x12345678, 0xF0000001):
        for k in range(1, 32):
            assert unsigned(shift_right(int32(n), k)) == [n >> k]
            assert unsigned(rotate_left(int32(n), k)) == [(n << k & MASK) | n >> 32 - k]


# Rounding ------------------------------------------------------------------------------------------------------------

EVERY = torch.arange(1 << 16, dtype=torch.int32)
"""All that `random` may be."""


LARGEST = (2 - 2**-7) * 2.0**127

VALUES = torch.tensor([
    1.0, 1.5, 1 + 2**-8, 1 + 2**-23, 1 + 3 * 2**-20, 2 - 2**-23, -(1 + 2**-9), -math.pi, 0.1, 1e-3, 1e30, -3e-38,
    2.0**-126, 2.0**-130, 2.0**-149, -(2.0**-133 + 2.0**-149), 0.0, -0.0, LARGEST, LARGEST - 2.0**110,
]).tolist()  # fmt: skip


def neighbours(x: float) -> tuple[Fraction, Fraction]:
    """The bf16 at x or next to it towards 0, and the one after it: by rationals alone."""
    q = Fraction(x)
    exponent = -126 if q == 0 else max(-126, math.floor(math.log2(abs(q))))
    while abs(q) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > -126 and abs(q) < Fraction(2) ** exponent:
        exponent -= 1
    ulp = Fraction(2) ** (exponent - 7)
    low = abs(q) // ulp * ulp
    sign = -1 if x < 0 else 1
    return sign * low, sign * (low + ulp)


@pytest.mark.parametrize("x", VALUES)
def test_chances_are_exact(x: float) -> None:
    """Of the 65536 equally likely numbers as many round up as the fraction of an ulp says: the mean is x itself."""
    found = stochastic_round(torch.full((1 << 16,), x), EVERY)
    low, high = neighbours(x)
    ups, downs = (int((found.double() == float(end)).sum()) for end in (high, low))
    assert ups + downs == 1 << 16
    assert low + (high - low) * Fraction(ups, 1 << 16) == Fraction(x)
    assert torch.equal(found, found.bfloat16().float())


def test_a_bf16_stays_whatever_the_number() -> None:
    """All of them: no update, no change."""
    bits = torch.arange(1 << 16, dtype=torch.int32) << 16
    x = bits.view(torch.float32)
    number = ~x.isnan()
    for n in (0, 1, 0x7FFF, 0xFFFF):
        found = stochastic_round(x, torch.full_like(bits, n))
        assert torch.equal(found[number].view(torch.int32), bits[number])
        assert bool(found[~number].isnan().all())


def test_infinities_and_nan_stay() -> None:
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    for x in nans:
        assert bool(stochastic_round(x.expand(1 << 16), EVERY).isnan().all())
    for x in (math.inf, -math.inf):
        assert set(stochastic_round(torch.full((1 << 16,), x), EVERY).tolist()) == {x}


def storing(draws: int = 1) -> Update:
    """An update that stores its fp32 gradient: as the parameter, and as states, each by its own random bits."""

    class Storing(Written):
        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            for i in range(draws - 1):
                state[f"state{i}"] = g.clone()
            p.copy_(g)

    p = nn.Parameter(torch.zeros(2))
    captured = capture(Storing, Storing([p]), {"params": [p]}, p, {}).captured
    update = rewritten(captured, dict.fromkeys(["param", *captured.states], format_named("bf16_stochastic")), "fp32")
    verify(update)
    return update


def drawn(
    update: Update, x: Tensor, seed: int = 0, step: int = 0, parameter: int = 0, first: int = 0, *, xla: bool = False
) -> list[Tensor]:
    components = {"param": torch.zeros_like(x).bfloat16(), "grad": x}
    scalars = torch.tensor(update.scalars.run([], [seed, step, parameter, first]), dtype=torch.float32)
    return (on_xla if xla else on_reference)(update, [components[key] for key in update.inputs], scalars)


BEYOND = 1 + 2**-8
"""Half an ulp beyond 1: each draw is a coin."""


def coins(n: int, key: tuple[int, ...] = (), draws: int = 1) -> Tensor:
    return torch.cat(drawn(storing(draws), torch.full((n,), BEYOND), *key)) != 1


def test_every_seed_step_parameter_element_and_draw_has_bits_of_its_own() -> None:
    """Two fair coins agree half of the time, within Hoeffding's bound; the same coin always."""
    n = 1 << 14
    seeds, steps, parameters = (0, 1, 1 << 16, 2**32 - 1), (0, 1, 1 << 16), (0, 1, 1 << 20)
    throws = [coins(n, key) for key in itertools.product(seeds, steps, parameters)]
    throws += list(coins(n, draws=9).split(n))[1:]  # nine draws: three calls of the generator
    throws += [coins(n, (0, 0, 0, first)) for first in (1, 2, 64, 1 << 16, 2**32 - 1)]
    for i, a in enumerate(throws):
        assert torch.equal(a, a)
        for b in throws[:i]:
            assert abs((a == b).double().mean().item() - 0.5) <= hoeffding(n)


def test_bits_depend_on_no_shape_pieces_or_backend(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, update = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0)), storing(6)
    found = drawn(update, x, seed=11, step=70_000, parameter=300)
    assert all(map(torch.equal, [r.flatten() for r in found], drawn(update, x.flatten(), 11, 70_000, 300)))
    assert all(map(torch.equal, found, drawn(update, x, 11, 70_000, 300, xla=True)))
    rows = drawn(update, x[3:], 11, 70_000, 300, first=3000)
    assert all(map(torch.equal, [r[3:] for r in found], rows))
    monkeypatch.setattr(reference, "CHUNK", 999)
    assert all(map(torch.equal, found, drawn(update, x, 11, 70_000, 300)))


def draws(
    update: Update, seed: int = 0x12345678, step: int = 0x9ABCDEF, parameter: int = 77, first: int = 2**31 + 5
) -> list[Tensor]:
    """The random bits themselves, 16 for each of 64 elements and each store."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(update.graph.graph, copies)
    graph.output([n.args[1] for n in copies.values() if n.target is stochastic_round])
    scalars = torch.tensor(update.scalars.run([], [seed, step, parameter, first]), dtype=torch.float32)
    inputs = [torch.zeros(64, dtype=torch.bfloat16) for _ in update.inputs]
    bits: list[Tensor] = fx.GraphModule(nn.Module(), graph)(*inputs, reference.numbers(inputs[0], 0), *scalars)
    return bits


def test_the_graph_draws_what_the_generator_says() -> None:
    bits = draws(storing(6))
    key = 0x12345678, 0x9ABCDEF
    for i, found in enumerate(bits):
        words = [threefry_of_integers(key, (2**31 + 5 + element, 77 * 64 + i // 4)) for element in range(64)]
        assert found.tolist() == [w[i % 4 // 2] >> 16 * (i % 2) & 0xFFFF for w in words]


def plain_sgd() -> Captured:
    p = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    return capture(torch.optim.SGD, optimizer, optimizer.param_groups[0], p, {}).captured


def test_a_store_without_its_rounding_is_an_error() -> None:
    update = rewritten(plain_sgd(), {"param": format_named("bf16_stochastic")}, "fp32")
    verify(update)
    at = next(i for i, n in enumerate(update.graph.graph.nodes) if n.target is stochastic_round)

    def drop(node: Any) -> None:
        node.replace_all_uses_with(node.args[0])
        node.graph.erase_node(node)

    with pytest.raises(VerificationError, match="without a round_to: a rounding was lost"):
        verify(edited(update, at, drop))
