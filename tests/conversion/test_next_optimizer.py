"""Another optimizer over a compiled model goes on from exact values, and a plain one is told what it does."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, RMSprop

import collage_neuron
from collage_neuron import RoundedWeights, exact_value
from collage_neuron.states.low_words import LEFT


def steps(model: nn.Module, *optimizers: Any, count: int = 5) -> None:
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        for optimizer in optimizers:
            optimizer.step()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(16, 16)


def compiled(form: str, model: nn.Module) -> Any:
    optimizer = AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    if form == "both":
        return collage_neuron.compile(model, optimizer, verbose=False)[1]
    return collage_neuron.compile(optimizer, verbose=False) if form == "optimizer" else optimizer


@torch.no_grad()
def write_the_same(p: Any) -> None:
    p.copy_(p.clone())


BETWEEN: dict[str, Callable[[Any, list[Any]], Any]] = {
    "read": lambda w, os: [exact_value(o, w) for o in os],
    "saved": lambda w, os: [o.state_dict() for o in os],
    "loaded": lambda w, os: os[1].load_state_dict(copy.deepcopy(os[1].state_dict())),
    "cleared": lambda w, os: [o.state.clear() for o in os[:2]],
    "forgotten": lambda w, os: setattr(os[0], "state", defaultdict(dict)),
    "compiled again": lambda w, os: collage_neuron.compile(os[1], verbose=False),
    "another one": lambda w, os: os.append(collage_neuron.compile(SGD([w], lr=1e-5), verbose=False)),
    "the same bits": lambda w, os: write_the_same(w),
    "other memory": lambda w, os: setattr(w, "data", w.data.clone()),
    "written": lambda w, os: collage_neuron.set_exact_value(os[0], w, exact_value(os[1], w)),
    "method": lambda w, os: os[0].zero(),
    "copied": lambda w, os: os.append(copy.copy(os[0])),
}


@pytest.mark.filterwarnings("ignore:parameters of this")
@pytest.mark.parametrize("what", BETWEEN)
def test_three_optimizers_have_one_value_whatever_is_done_between_steps(what: str) -> None:
    class Own(SGD):
        @torch.no_grad()
        def zero(self) -> None:
            for p in self.param_groups[0]["params"]:
                p.add_(0)

    model: Any = linear()
    made: list[Any] = [Own(model.parameters(), lr=1e-5), AdamW(model.parameters(), lr=1e-5)]
    optimizers = [collage_neuron.compile(o, verbose=False) for o in (*made, RMSprop(model.parameters(), lr=1e-5))]
    for turn in range(6):
        steps(model, optimizers[turn % 3], count=2)
        end = exact_value(optimizers[turn % 3], model.weight)
        assert (end != model.weight).any()
        BETWEEN[what](model.weight, optimizers)
        copies, weight = copy.deepcopy((optimizers, model.weight))
        assert all(torch.equal(exact_value(o, weight), end) for o in copies)
        assert all(torch.equal(exact_value(o, model.weight), end) for o in optimizers)


@pytest.mark.filterwarnings(
    "ignore:parameters of this"
)  # what bf16 alone stores has no low words that others could take
@pytest.mark.parametrize("strategies", [("split433", "plus"), ("plus", "fp32"), ("fp32", "bf16")])
def test_optimizers_of_two_strategies_have_one_value_as_far_as_their_formats_go(strategies: tuple[str, str]) -> None:
    model = linear()
    model, first = collage_neuron.compile(
        model, SGD(model.parameters(), lr=1e-3), strategy=strategies[0], verbose=False
    )
    second = collage_neuron.compile(AdamW(model.parameters(), lr=1e-3), strategy=strategies[1], verbose=False)
    for turn in range(20):
        steps(model, (first, second)[turn % 2], count=2)
        ours, theirs = (exact_value(o, model.weight) for o in (first, second))
        bound = 2.0**-8 if "bf16" in strategies else 2.0**-16  # significant bits of hi, and of hi + lo
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=0.0)


@pytest.mark.parametrize("when", ["at once", "in copies", "gone"])
def test_optimizers_that_have_the_same_parameters_hand_on_what_they_store(when: str) -> None:
    """Whoever was compiled first: the steps in which the other's rate is zero change nothing."""
    model: Any = linear()
    both: list[Any] = [compiled("both", model), compiled("optimizer", model)]
    if when == "in copies":
        model, both = copy.deepcopy((model, both))
    for turn in range(4):
        steps(model, both[turn % 2], count=3)
        end = exact_value(both[turn % 2], model.weight)
        assert (end != model.weight).any()
        other = both[1 - turn % 2]
        assert torch.equal(exact_value(other, model.weight), end)
        saved = copy.deepcopy(other.state_dict()["state"][0])
        if when == "gone":
            both[turn % 2] = compiled("optimizer", model)
        other.param_groups[0]["lr"] = 0.0
        other.state.clear()
        steps(model, other, count=1)
        other.param_groups[0]["lr"] = 1e-5
        assert torch.equal(exact_value(other, model.weight), end)
        assert torch.equal(other.state_dict()["state"][0]["param_lo"], saved["param_lo"])


def test_words_of_weights_that_were_written_meanwhile_are_not_taken() -> None:
    model = linear()
    optimizer = compiled("both", model)
    steps(model, optimizer)
    del optimizer
    assert hasattr(model.weight, LEFT)
    with torch.no_grad():
        model.weight.add_(1)
    optimizer = compiled("both", model)
    assert torch.equal(exact_value(optimizer, model.weight), model.weight.float())
    assert not hasattr(model.weight, LEFT)


@pytest.mark.parametrize(
    ("source", "target"),
    [("split433", "split323"), ("split423", "split423"), ("plus", "split433"), ("split433", "plus")],
)
@pytest.mark.parametrize("group_first", [True, False])
def test_a_state_that_is_moved_is_read_in_the_format_it_has(source: str, target: str, group_first: bool) -> None:
    moved, *others = (nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(i))) for i in range(3))
    first = collage_neuron.compile(SGD([moved, others[0]], lr=1e-6, momentum=0.9), strategy=source, verbose=False)
    second = collage_neuron.compile(SGD(others[1:], lr=0.0, momentum=0.9), strategy=target, verbose=False)
    moved.grad = torch.ones_like(moved)
    first.step()
    value = exact_value(first, moved)
    first.param_groups[0]["params"] = others[:1]
    for action in (0, 1) if group_first else (1, 0):
        if action == 0:
            second.add_param_group({"params": [moved]})
            exact_value(second, moved)
        else:
            second.state[moved] = first.state.pop(moved)
    assert torch.equal(exact_value(second, moved), value)


def test_a_parameter_that_replaces_another_before_the_first_step_begins_with_its_own_values() -> None:
    model: Any = linear()
    optimizer = compiled("both", model)
    new = model.weight = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(9)).bfloat16())
    optimizer.param_groups[0].update(params=[new, model.bias], lr=0.0)
    written = new.detach().float().clone()
    steps(model, optimizer, count=1)
    assert torch.equal(exact_value(optimizer, new), written)


def test_a_plain_optimizer_over_a_compiled_model_is_told_once_and_a_wrapper_is_not() -> None:
    class Wrapper(AdamW):
        def __init__(self, base: Any) -> None:
            super().__init__(base.param_groups)
            self.base = base

        def step(self, closure: Any = None) -> Any:
            return self.base.step(closure)

    model: Any = nn.Sequential(linear(), linear())
    model[0].requires_grad_(False)
    _, head = collage_neuron.compile(model, AdamW(model[1].parameters(), lr=1e-5), verbose=False)
    model[0].requires_grad_(True)
    body = AdamW(model[0].parameters(), lr=1e-5)
    with pytest.warns(RoundedWeights, match="this AdamW is not compiled and trains bf16 parameters"):
        steps(model, head, body, count=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, head, body, Wrapper(head), AdamW(linear().parameters()), count=2)


def test_no_memory_stays_of_optimizers_that_are_gone_and_of_parameters_that_are() -> None:
    model: Any = linear()
    first = compiled("optimizer", model)
    steps(model, first)
    for _ in range(2):
        second = compiled("optimizer", model)
        steps(model, second, first)
        del second
    gc.collect()
    assert not hasattr(model.weight, LEFT)  # the first one has the same words
    group = first.param_groups[0]
    group["params"] = [model.weight]
    del first.state[model.bias]
    gone = weakref.ref(model.bias)
    model.bias = None
    steps(model, first, count=2)
    gc.collect()
    assert gone() is None


def test_on_xla_a_value_that_one_optimizer_sets_is_that_of_another(xla: torch.device) -> None:
    model: Any = linear().to(xla)
    first, second = (compiled("optimizer", model) for _ in range(2))
    steps(model, first, second, count=2)
    value = torch.full((16, 16), 1.2345)
    collage_neuron.set_exact_value(first, model.weight, value.to(xla))
    for optimizer in (first, second):
        assert (exact_value(optimizer, model.weight).cpu() - value).abs().max() < 2.0**-22


@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("strategy", ["split433", "fp32"])
def test_a_second_optimizer_that_has_states_already_takes_the_words_of_the_first(strategy: str, is_gone: bool) -> None:
    """Adagrad makes its states in the constructor."""
    model: Any = linear()
    first = compiled("optimizer", model)
    steps(model, first)
    value = exact_value(first, model.weight)
    if is_gone:
        del first
    second = collage_neuron.compile(Adagrad(model.parameters(), lr=0.0), strategy=strategy, verbose=False)
    assert torch.equal(exact_value(second, model.weight), value)
    steps(model, second, count=1)
    assert torch.equal(exact_value(second, model.weight), value)


@pytest.mark.parametrize("strategies", [("split433", "fp32"), ("fp32", "split433"), ("plus", "split433")])
def test_words_of_weights_written_with_what_they_are_count_in_another_format(strategies: tuple[str, str]) -> None:
    model: Any = linear()
    first = collage_neuron.compile(AdamW(model.parameters(), lr=1e-5), strategy=strategies[0], verbose=False)
    steps(model, first)
    value = exact_value(first, model.weight)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    second = collage_neuron.compile(SGD(model.parameters(), lr=0.0), strategy=strategies[1], verbose=False)
    steps(model, second, count=1)
    torch.testing.assert_close(exact_value(second, model.weight), value, rtol=2.0**-16, atol=0.0)
