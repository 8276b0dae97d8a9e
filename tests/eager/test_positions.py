"""Formats of the states of steps as written: which they get, what strategies name, and the words of each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from as_written import Muon, Written, compiled, everything, parameters, run
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.eager import codec
from collage_neuron.eager.moment_detection import averages
from collage_neuron.numerics.formats import FORMATS, Format
from collage_neuron.passes.backends.protocol import Backend
from collage_neuron.passes.backends.registry import choose
from collage_neuron.states import word_encoding
from collage_neuron.states.bookkeeping import bookkeeping

# --- states of steps as written: positions are kept as the parameter is, averages in fewer bytes where they show ------

SHAPE, STEPS, RATE = (64, 128), 200, 1e-6


class Lookahead(Optimizer):
    """Sign momentum; every fifth step the weights go half of the way back to slow ones. It reads what is launched."""

    def __init__(self, params: Any, lr: float = RATE, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["slow"], state["m"], state["v"] = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 1 - group["beta"])
                state["v"].mul_(group["beta"]).addcmul_(p.grad, p.grad, value=1 - group["beta"])
                if not p.grad.isfinite().all().item():
                    continue
                p.sub_(state["m"].sign(), alpha=group["lr"])
                if group["steps"] % 5 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def train(p: Any, optimizer: Optimizer, steps: range) -> None:
    for i in steps:
        p.grad = (numbers(1) + numbers(i + 2)).bfloat16().to(p.dtype)
        optimizer.step()


def lookahead(start: torch.Tensor, strategy: str = "split433") -> tuple[Any, Optimizer]:
    p = Parameter(start.clone())
    return p, collage_neuron.compile(Lookahead([p]), strategy=strategy)


@pytest.mark.parametrize(("strategy", "size"), [("split433", 0.07), ("split423", 0.3)])
def test_slow_weights_are_as_accurate_as_in_fp32_at_small_rates(strategy: str, size: float) -> None:
    start = size * numbers(0)
    exact, plain = Parameter(start.double()), Parameter(start.clone())
    for p in exact, plain:
        train(p, Lookahead([p]), range(STEPS))
    p, optimizer = lookahead(start, strategy)
    train(p, optimizer, range(STEPS))
    off, wanted = (
        (x.double() - exact.detach()).norm().item() for x in (collage_neuron.exact_value(optimizer, p), plain.detach())
    )
    assert off < 1.1 * wanted


def test_averages_have_three_bytes_in_a_resumed_run_too() -> None:
    p, optimizer = lookahead(numbers(0))
    train(p, optimizer, range(3))
    q, resumed = lookahead(p.detach())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for of, its in (p, optimizer), (q, resumed):
        train(of, its, range(3, 6))
        text = collage_neuron.explain(its)
        low = {k: x.dtype for k, x in its.state[of].items() if k.endswith("_lo")}
        assert low == {"param_lo": torch.int16, "slow_lo": torch.int16, "m_lo": torch.int8, "v_lo": torch.int8}, text
        assert collage_neuron.bytes_per_parameter(its) == 2 + 4 + 4 + 3 + 3
    assert all(torch.equal(x, resumed.state[q][k]) for k, x in optimizer.state[p].items())


P, G = numbers(0), numbers(1)


@pytest.mark.parametrize(
    ("first", "is_average"),
    [
        (0.1 * G, True),
        (0.1 * G * G, True),
        (G, False),  # a sum, or a momentum: of a sum no error is forgotten
        ((1 - 1e-6) * G, False),  # eps is no beta
        (0.02 * G, False),  # a sum of steps at a rate of .02, although another beta is .98
        (P, False),
        (0.1 * P, False),  # an average of the weights
        (torch.zeros(SHAPE), False),
    ],
)
def test_what_is_not_evident_is_no_average(first: torch.Tensor, is_average: bool) -> None:
    group = {"lr": 0.02, "betas": (0.9, 0.98), "eps": 1e-6}
    assert averages(group, P, G, {"m": first}) == ({"m"} if is_average else set())


def test_an_average_and_that_of_the_squares_show_each_other() -> None:
    """Of a gradient that was clipped, or that the step has added a decay to; a third state beside them is nothing."""
    group, scaled = {"lr": 0.001, "betas": (0.9, 0.999)}, 0.3 * (G + 0.1 * P)
    states = {"m": 0.1 * scaled, "v": 0.001 * scaled * scaled, "slow": P, "sum": scaled}
    assert averages(group, P, G, states) == {"m", "v"}
    assert not averages(group, P, G, {"m": states["m"], "slow": P})


class Counting(Optimizer):
    """Counts from step `since` on how often gradients were positive, by 61: soon beyond the whole numbers of bf16.

    It runs as written: numpy reads the memory of a gradient.
    """

    def __init__(self, params: Any, since: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self.since, self.taken = since, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for p in self.param_groups[0]["params"]:
            n = self.state[p].setdefault("n", torch.zeros_like(p))
            if self.taken >= self.since:
                n.add_((p.grad > 0).float(), alpha=61)
            p.sub_(p.grad * float(p.grad.numpy().any()), alpha=0.1)


@pytest.mark.parametrize("since", [1, 3])
@pytest.mark.parametrize("strategy", ["split433", "plus", "bf16", {"*": "bf16+int16"}])
def test_counts_are_exact(strategy: Any, since: int) -> None:
    torch.manual_seed(0)
    p, grads = Parameter(torch.randn(40, 3).bfloat16()), torch.randn(40, 40, 3).bfloat16()
    optimizer = collage_neuron.compile(Counting([p], since), strategy=strategy)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    assert torch.equal(optimizer.state[p]["n"], 61.0 * (grads[since - 1 :] > 0).sum(0))
    assert bookkeeping(optimizer).formats[p]["n"] == "fp32"


# --- A mapping may name states that only some parameters have; a name that none has is an error -----------------------

MAPPING = {"param": "bf16+int16", "momentum_buffer": "i8q4", "exp_avg": "bf16", "exp_avg_sq": "fp32"}
WRONG = {**MAPPING, "exp_avgs": "bf16"}
TOLD = "the strategy names 'exp_avgs'; this update has param, momentum_buffer, exp_avg, exp_avg_sq "


class Momentum(Written):
    """Momentum for matrices, Adam for all else, in one step: this can be captured."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dim() == 2:
            self.of_matrix(p, g, state, group)
            return
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["exp_avg"].lerp_(g, 0.1)
        state["exp_avg_sq"].mul_(0.95).addcmul_(g, g, value=0.05)
        p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-group["lr"])

    def of_matrix(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        p.sub_(state["momentum_buffer"].mul_(0.9).add_(g), alpha=group["lr"])


class Mixed(Momentum):
    """The same with Muon's update of matrices, which runs on copies."""

    of_matrix = Muon.update


def in_groups(cls: Any, count: int) -> tuple[Any, list[Parameter]]:
    params = parameters(torch.bfloat16)
    cut = 2 if count == 2 else len(params)
    return cls([{"params": part} for part in (params[:cut], params[cut:]) if part]), params


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("cls", [Momentum, Mixed])
def test_a_mapping_names_states_that_only_some_parameters_have(cls: Any, groups: int) -> None:
    optimizer, params = in_groups(cls, groups)
    optimizer = collage_neuron.compile(optimizer, strategy=MAPPING)
    run(optimizer, 2)
    assert ("fp32 values" in collage_neuron.explain(optimizer)) == (cls is Mixed)
    assert optimizer.state[params[0]]["momentum_buffer"].dtype == torch.int8
    state = optimizer.state[params[2]]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("groups", [1, 2])
def test_compile_rejects_a_name_of_no_state_of_any_parameter(groups: int) -> None:
    optimizer, _ = in_groups(Momentum, groups)
    with pytest.raises(ValueError, match=TOLD):
        collage_neuron.compile(optimizer, strategy=WRONG)
    assert type(optimizer) is Momentum


def test_the_first_step_as_written_rejects_it_before_anything_is_written() -> None:
    optimizer, _ = compiled(Mixed, WRONG)
    before = everything(optimizer)
    for _ in range(2):
        with pytest.raises(ValueError, match=TOLD):
            run(optimizer, 1)
    assert repr(everything(optimizer)) == repr(before)


@pytest.mark.parametrize("cls", [Momentum, Mixed])
def test_a_name_that_is_changed_later_is_looked_at_again(cls: Any) -> None:
    optimizer, _ = compiled(cls, MAPPING)
    run(optimizer, 1)
    optimizer.param_groups[0]["collage_strategy"] = WRONG
    with pytest.raises(ValueError, match=TOLD):
        run(optimizer, 1, 1)


def test_parameters_without_a_gradient_may_have_the_state_later() -> None:
    """On copies nothing is known of them before they have one: a warning, once."""
    optimizer, params = compiled(Mixed, {**MAPPING, "exp_avg_sq": "bf16"})
    given = dict(zip(params, (torch.ones_like(p) for p in params), strict=True))
    for p in params[:2]:
        p.grad = given[p]
    with pytest.warns(UserWarning, match="'exp_avg'; this update has param, momentum_buffer .* no gradient so far"):
        optimizer.step()
    for p in params:
        p.grad = given[p]
    optimizer.step()
    assert optimizer.state[params[2]]["exp_avg"].dtype == torch.bfloat16


# --- conversions by backends: the words that each format's own functions make, and the values that they read ----------

CPU = torch.device("cpu")


def tensor() -> torch.Tensor:
    """Numbers of all sizes, ties of bf16 among them, in rows that no block divides."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 300, generator=g) * torch.exp2(torch.randint(-60, 60, (6, 300), generator=g).float())
    x[0, :100] = torch.arange(100) / 256 + 1 + 2**-9
    x[1, :4] = torch.tensor([0.0, -0.0, 2.0**-126, 3.0e38])
    return x


def encoded(backend: Backend, *given: Any) -> None:
    conversions = codec.Conversions()
    conversions.encode(backend, *given)
    conversions.run()


def decoded(backend: Backend, *given: Any) -> None:
    conversions = codec.Conversions()
    conversions.decode(backend, *given)
    conversions.run()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["param", "momentum"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_words_and_values_are_those_of_the_format(fmt: Format, name: str, backend: str) -> None:
    runner, x = choose(backend, CPU), tensor() if fmt.signed else tensor().abs()
    made, back = codec.empty_words(fmt, x), torch.empty_like(x)
    encoded(runner, fmt, name, x, made, [1, 2, 3, 0])
    decoded(runner, fmt, made, back)
    assert torch.equal(back.view(torch.int32), word_encoding.decode(fmt, made).view(torch.int32))
    if fmt.draw is None:
        assert all(map(same_bits, made, word_encoding.settled(fmt, name, x)))
        again = codec.empty_words(fmt, x)
        encoded(runner, fmt, name, back, again, [1, 2, 4, 0])
        assert all(map(same_bits, made, again))


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


# --- torch's Muon with its momentum in 1, 2, 3 and 4 bytes: what is kept, and how far it is off ----------------------

MUON_SHAPE, MUON_STEPS = (64, 96), 40

MOMENTA = {  # bytes of the momentum, without those that 128 elements share; distance from fp32, of that travelled
    "i8q4": (1, 0.06), "i8q8": (1, 0.09),
    "bf16": (2, 0.009), "i16q4": (2, 0.005),
    "bf16+int8": (3, 0.0045), "bf16+int16": (4, 2.0**-20),
}  # fmt: skip
"""Muon's own iteration begins by rounding to bf16: where the momentum is rounded before, that is another number."""


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(MUON_SHAPE, generator=generator).bfloat16() for _ in range(MUON_STEPS)]


def start() -> torch.Tensor:
    return 0.1 * torch.randn(MUON_SHAPE, generator=torch.Generator().manual_seed(1))


def trained(p: Parameter, optimizer: Any, grads: list[torch.Tensor]) -> None:
    for g in grads:
        p.grad = g.to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("momentum", MOMENTA)
def test_the_momentum_has_its_bytes_and_the_run_its_distance_from_fp32(momentum: str) -> None:
    size, most = MOMENTA[momentum]
    plain = Parameter(start())
    trained(plain, torch.optim.Muon([plain], lr=0.02), gradients())
    p, strategy = Parameter(start()), {"param": "bf16+int16", "momentum_buffer": momentum}
    optimizer: Any = collage_neuron.compile(torch.optim.Muon([p], lr=0.02), strategy=strategy)
    trained(p, optimizer, gradients())
    words = {k: x for k, x in optimizer.state[p].items() if k.startswith("momentum_buffer")}
    assert sum(x.nbytes for k, x in words.items() if not k.endswith("_scale")) == size * p.numel()
    found, wanted = collage_neuron.exact_value(optimizer, p), plain.detach()
    assert float((found - wanted).norm() / (wanted - start()).norm()) < most
