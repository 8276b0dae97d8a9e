"""Stochastic stores: the generator, the chances against exact rationals, no bias, and the same bits everywhere."""

from __future__ import annotations

import copy
import itertools
import math
import operator
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.fx as fx
from chances import MASK, hoeffding, threefry_of_integers
from exact import edited, on_reference, on_xla
from models import differences, gpt, mlp, parameters, set_gradients, snapshot, train
from torch import Tensor, nn
from updates import rewritten

import collage_neuron
from collage_neuron.conversion import convert
from collage_neuron.errors import UnsupportedUpdate, VerificationError
from collage_neuron.numerics.eft import shift_right, stochastic_round
from collage_neuron.numerics.formats import format_named
from collage_neuron.numerics.threefry import Words, rotate_left, threefry
from collage_neuron.passes.backends import reference
from collage_neuron.passes.backends.registry import get
from collage_neuron.passes.capture.capture import capture
from collage_neuron.passes.ir.update import Captured, Update
from collage_neuron.passes.ir.verify import verify
from collage_neuron.runtime import plan

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
    ups = sum(Fraction(v) == high for v in found.tolist())
    assert ups + sum(Fraction(v) == low for v in found.tolist()) == 1 << 16
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

    class Storing(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                for i in range(draws - 1):
                    self.state[p][f"state{i}"] = p.grad.clone()
                p.copy_(p.grad)

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


@pytest.mark.parametrize("x", [1 + 2**-9, 1 + 2**-20, -(1 + 3 * 2**-10), 0.1, 2 - 2**-23])
def test_drawn_bits_round_up_as_often_as_they_should(x: float) -> None:
    n = 1 << 18
    (found,) = drawn(storing(), torch.full((n,), x), seed=3, step=5)
    low, high = neighbours(torch.tensor(x).item())
    chance = (Fraction(torch.tensor(x).item()) - low) / (high - low)
    share = (found.float() == float(high)).double().mean().item()
    assert abs(share - float(chance)) <= hoeffding(n)


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


def test_bits_do_not_depend_on_the_shape_the_pieces_or_the_backend(
    xla: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, update = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0)), storing(6)
    found = drawn(update, x, seed=11, step=70_000, parameter=300)
    assert all(map(torch.equal, [r.flatten() for r in found], drawn(update, x.flatten(), 11, 70_000, 300)))
    assert all(map(torch.equal, found, drawn(update, x, 11, 70_000, 300, xla=True)))
    rows = drawn(update, x[3:], 11, 70_000, 300, first=3000)
    assert all(map(torch.equal, [r[3:] for r in found], rows))
    monkeypatch.setattr(reference, "CHUNK", 999)
    assert all(map(torch.equal, found, drawn(update, x, 11, 70_000, 300)))


def test_xla_rounds_every_number_as_the_reference_does(xla: torch.device) -> None:
    """`stochastic_round` itself, on numbers of every kind; but for numbers below 2**-126, which XLA takes for 0."""
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7F800000, -0x800000, 0x7F7FFFFF, 0x7F7F0001], dtype=torch.int32)
    normal = [v for v in VALUES if v == 0 or abs(v) >= 2.0**-126]
    x = torch.cat([torch.tensor(normal), bits.view(torch.float32)]).repeat(512)
    found, expected = drawn(storing(), x, xla=True)[0], drawn(storing(), x)[0]
    assert bool(((found == expected) | (found.isnan() & expected.isnan())).all())


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


def test_every_integer_operation_counts() -> None:
    """Another in its place, and the bits are others."""
    update = storing(6)
    expected = draws(update)
    others: dict[Any, Any] = {
        operator.xor: operator.or_, operator.or_: operator.and_, operator.add: operator.sub,
        operator.and_: operator.or_, operator.lshift: shift_right, shift_right: operator.lshift,
    }  # fmt: skip
    nodes = list(update.graph.graph.nodes)
    tried = [i for i, node in enumerate(nodes) if node.target in others]
    assert len(tried) > 200
    for i in tried:
        mutant = edited(update, i, lambda node: setattr(node, "target", others[node.target]))
        counts_calls = nodes[i].target is operator.add and nodes[i].args[1] == 0  # the first call is number 0
        assert all(map(torch.equal, draws(mutant), expected)) == counts_calls, nodes[i]


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


# Whole optimizers ----------------------------------------------------------------------------------------------------


def sgd(strategy: str, n: int, device: str | torch.device = "cpu", **settings: Any) -> tuple[nn.Parameter, Any]:
    p = nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device="cpu").to(device))
    return p, collage_neuron.compile(torch.optim.SGD([p], lr=1.0), strategy=strategy, **settings)


def test_small_updates_arrive_on_average_and_in_bf16_never() -> None:
    """Steps of 2**-11 from 1 to 2: above 1 an ulp is 2**-7, and rounding to nearest loses every one of them.

    Each step's rounding error is within an ulp and has mean 0 whatever happened before (Azuma and Hoeffding).
    """
    n, steps, update = 4096, 256, 2.0**-11
    for strategy, arrives in (("stochastic", True), ("bf16", False)):
        p, optimizer = sgd(strategy, n)
        for _ in range(steps):
            p.grad = torch.full_like(p, -update)
            optimizer.step()
        mean = p.detach().double().mean().item()
        bound = 2**-7 * math.sqrt(2 * steps * math.log(2 / 1e-9) / n)
        assert (abs(mean - (1 + steps * update)) <= bound) == arrives
    assert bound < steps * update / 8  # it says something
    assert mean == 1


def test_second_moments_decay_on_average_when_states_are_stored_stochastically() -> None:
    """v of 1 times 0.999**t: within Azuma's bound with `stochastic_states`; stuck with the other two."""
    n, steps = 4096, 400
    means = {}
    for strategy in ("bf16", "stochastic", "stochastic_states"):
        p = nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
        optimizer = collage_neuron.compile(torch.optim.AdamW([p], lr=0.0, betas=(0.9, 0.999)), strategy=strategy)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.state[p]["exp_avg_sq"].fill_(1.0)
        for _ in range(steps):
            optimizer.step()
        means[strategy] = optimizer.state[p]["exp_avg_sq"].double().mean().item()
    bound = 2**-8 * math.sqrt(2 * steps * math.log(2 / 1e-9) / n)  # below 1 an ulp is 2**-8
    assert abs(means["stochastic_states"] - 0.999**steps) <= bound < 0.05
    assert means["bf16"] == means["stochastic"] == 1


def test_an_update_of_nothing_changes_nothing() -> None:
    p, optimizer = sgd("stochastic", 1000)
    p.data = torch.randn(1000).bfloat16()
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    for _ in range(5):
        optimizer.step()
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize("strategy", ["stochastic", "stochastic_states"])
def test_equal_seeds_give_equal_runs_and_others_do_not(strategy: str) -> None:
    runs = []
    for seed in (5, 5, 6):
        model: nn.Module = gpt()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy, seed=seed)
        train(model, optimizer, range(4))
        runs.append((model, optimizer))
    assert differences(snapshot(runs[0][1]), snapshot(runs[1][1])) == []
    assert differences(snapshot(runs[0][1]), snapshot(runs[2][1])) != []


@pytest.mark.parametrize("strategy", ["stochastic", "stochastic_states"])
def test_both_backends_store_the_same_bits_where_they_compute_the_same_numbers(
    xla: torch.device, strategy: str
) -> None:
    """SGD without momentum: one product and one sum of bf16 numbers, exact in fp32 where exponents are near."""
    import torch_xla

    ends = {}
    for name, device in (("reference", torch.device("cpu")), ("xla", xla)):
        params = [nn.Parameter(p.detach().bfloat16().to(device)) for p in parameters(shapes=((5, 7), (33,)))]
        optimizer = collage_neuron.compile(torch.optim.SGD(params, lr=2**-9), strategy=strategy, seed=9)
        for i in range(5):
            set_gradients(params, i)
            optimizer.step()
            torch_xla.sync()
        ends[name] = [p.detach().cpu() for p in params]
    assert all(map(torch.equal, ends["reference"], ends["xla"]))


def test_parameters_of_one_update_and_of_two_groups_draw_apart() -> None:
    params = [nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(4)]
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = collage_neuron.compile(torch.optim.SGD(groups, lr=1.0), strategy="stochastic")
    for p in params:
        p.grad = torch.full_like(p, -(2.0**-8))
    optimizer.step()
    for i, p in enumerate(params):
        assert abs((p.detach() != 1).double().mean().item() - 0.5) <= hoeffding(4096)
        for q in params[:i]:
            assert abs((p == q).double().mean().item() - 0.5) <= hoeffding(4096)


def continued(optimizer: torch.optim.Optimizer, model: nn.Module, how: Callable[[Any], Any]) -> Any:
    """A fresh pair that goes on where these are."""
    other: nn.Module = mlp(1)
    fresh: torch.optim.Optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    other, fresh = collage_neuron.compile(other, fresh, strategy="stochastic_states", seed=1)
    other.load_state_dict(how(model.state_dict()))
    fresh.load_state_dict(how(optimizer.state_dict()))
    return other, fresh


def through_a_file(state: Any) -> Any:
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("how", [copy.deepcopy, through_a_file])
def test_a_resumed_run_goes_on_as_it_would_have(how: Callable[[Any], Any]) -> None:
    model: nn.Module = mlp()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = collage_neuron.compile(model, optimizer, strategy="stochastic_states", seed=4)
    train(model, optimizer, range(3))
    other, resumed = continued(optimizer, model, how)
    train(model, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    assert differences(snapshot(optimizer), snapshot(resumed)) == []
    assert resumed.param_groups[0]["collage_seed"] == 4
    assert resumed.param_groups[0]["collage_drawn"] == 6


def test_a_step_that_is_refused_draws_nothing() -> None:
    p, optimizer = sgd("stochastic", 4)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="nothing was updated"):
        optimizer.step()
    assert optimizer.param_groups[0]["collage_drawn"] == 1


def test_other_strategies_have_nothing_of_it() -> None:
    p, optimizer = sgd("plus", 4)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert "collage_drawn" not in optimizer.param_groups[0]
    job = plan.plan_update(torch.optim.SGD, optimizer, optimizer.param_groups[0], [p])
    assert not job.update.draws
    assert "index" not in {n.target for n in job.update.graph.graph.nodes}


def test_a_monitor_sees_an_unbiased_update_that_is_mostly_lost_or_too_large() -> None:
    """A step of half an ulp arrives whole in half of the elements: EDQ 1 within Hoeffding's bound, half are lost."""
    n = 1 << 14
    p, optimizer = sgd("stochastic", n)
    with collage_neuron.monitor(optimizer) as monitor:
        p.grad = torch.full_like(p, -(2.0**-8))
        optimizer.step()
    record = monitor.latest()
    assert record is not None
    assert record.total.pair.ratio == pytest.approx(1, abs=2 * hoeffding(n))
    assert record.total.pair.lost == pytest.approx(50, abs=100 * hoeffding(n))


def test_explain_shows_where_chance_comes_in() -> None:
    _, optimizer = sgd("stochastic", 4)
    text = collage_neuron.explain(optimizer, graphs=True)
    assert "bf16_stochastic" in text
    assert "stochastic_round(" in text
    assert "= upper16(seed)" in text
    assert collage_neuron.bytes_per_parameter(optimizer) == 4


def test_compile_refuses_what_kernels_cannot_draw_before_it_changes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "choose", lambda choice, device: get("nki"))
    monkeypatch.setattr(convert, "require_sound", lambda backend, device: None)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    strategy = {"param": "bf16", "*": "ue5m3"}
    with pytest.raises(UnsupportedUpdate, match=r"do not add random bits .* use backend='xla'"):
        collage_neuron.compile(model, optimizer, strategy=strategy)
    assert (type(optimizer), model.weight.dtype) == (torch.optim.RMSprop, torch.float32)


def test_what_cannot_work_is_refused() -> None:
    for strategy in ("stochastic", {"*": "bf16_stochastic"}):
        with pytest.raises(ValueError, match=r"leaves its store nothing to round.*use arithmetic='fp32'"):
            sgd(strategy, 4, arithmetic="bf16")  # type: ignore[arg-type]
    for seed in (-1, 2**32, 1.5, "1"):
        with pytest.raises(ValueError, match=f"seed is {seed!r}; give a whole number of 32 bits, from 0 to 4294967295"):
            sgd("stochastic", 4, seed=seed)
