"""`compile(..., bytes=N)`: of the strategies that fit, the safest for the states that the optimizer has."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import mlp, train
from sampling import part
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import collage_neuron
from collage_neuron.numerics.formats import format_named
from collage_neuron.numerics.strategies import BY_ACCURACY, STRATEGIES

Build = Callable[[list[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2),
    "AMSGrad": lambda p: AdamW(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: SGD(p, lr=1e-2),
    "momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: Adagrad(p, lr=1e-2),
}


def compiled(kind: str, **arguments: Any) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(128, 1, bias=False)  # one row of one block
    return collage_neuron.compile(model, OPTIMIZERS[kind](list(model.parameters())), **arguments)


def strategy_of(optimizer: Optimizer) -> str:
    return str(optimizer.param_groups[0]["collage_strategy"])


def needed(kind: str, strategy: str) -> float:
    """Bytes per parameter without shared words, as they are after a step, with a bf16 gradient."""
    model, optimizer = compiled(kind, strategy=strategy)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    p = next(model.parameters())
    words = [t for k, t in optimizer.state[p].items() if t.shape == p.shape]
    return float(sum(t.element_size() for t in (p, *words))) + 2


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_most_accurate_that_fits_is_taken(kind: str) -> None:
    """Of those that were really as small after a step."""
    sizes = {name: needed(kind, name) for name in BY_ACCURACY if name in STRATEGIES}
    for budget in part(range(int(min(sizes.values())), 18), 3, kind):
        _, optimizer = compiled(kind, bytes=budget)
        assert strategy_of(optimizer) == next(name for name, size in sizes.items() if size <= budget)
        assert f"chosen by bytes={budget}: " in collage_neuron.explain(optimizer)
    least = min(sizes, key=lambda name: sizes[name])
    with pytest.raises(ValueError, match=rf"the smallest is '{least}' with {sizes[least]:.0f} bytes per parameter"):
        compiled(kind, bytes=int(min(sizes.values())) - 1)


def test_every_strategy_that_is_measured_is_in_the_order() -> None:
    """All but those with a parameter of one word and wider states, which are worse than others as large."""
    left_out = {"fp32_states", "stochastic_states"}
    assert {name for name in BY_ACCURACY if name in STRATEGIES} == set(STRATEGIES) - left_out


def test_none_comes_after_one_with_the_same_words_or_fewer_of_each() -> None:
    """Within the family: more words in every role are never less accurate."""
    split = [STRATEGIES[name] for name in BY_ACCURACY if name.startswith("split") and name in STRATEGIES]
    sizes = [[format_named(f).bytes for f in (s.param, s.state, s.slow)] for s in split]
    for i, size in enumerate(sizes):
        for later in sizes[i + 1 :]:
            assert any(x < y for x, y in zip(later, size, strict=True))


def test_rows_that_are_too_short_for_blocks_count() -> None:
    """Blocks do not cross rows: of a convolution, each row of 3 elements has words of its own, 1.3 bytes an element."""
    for budget in range(8, 17):
        model = nn.Conv2d(4, 4, 3, bias=False)
        optimizer = collage_neuron.compile(AdamW(model.parameters(), lr=1e-2), bytes=budget)
        assert collage_neuron.bytes_per_parameter(optimizer) <= budget


def test_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="collage_neuron"):
        _, optimizer = compiled("AdamW", bytes=16)
    assert [r.getMessage() for r in caplog.records] == ["bytes=16: strategy 'fp32', 16 bytes per parameter with AdamW"]
    _, other = compiled("AdamW", strategy="fp32")
    assert "chosen by" not in collage_neuron.explain(other)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert "chosen by bytes=16" in collage_neuron.explain(copied)


class LateState(torch.optim.SGD):
    """Has a second state from its second step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if state:
                state["late"] = state.get("late", torch.zeros_like(p)).mul(0.5).add(p.grad)
            state["early"] = state.get("early", torch.zeros_like(p)).mul(0.5).add(p.grad)
            p.sub_(state["early"] + state.get("late", state["early"]), alpha=1e-3)


def test_it_is_said_only_of_groups_chosen_so_and_while_it_holds() -> None:
    own: dict[str, Any] = {"params": [nn.Parameter(torch.ones(4, 256))], "collage_strategy": "fp32"}
    optimizer = AdamW([{"params": [nn.Parameter(torch.ones(4, 256))]}, own], lr=1e-2)
    first, second = collage_neuron.explain(collage_neuron.compile(optimizer, bytes=8)).split("param_groups[1]")
    assert "chosen by bytes=8: of those that fit, the smallest worst error" in first
    assert "not chosen by bytes=8, which gives split312 to groups that name no strategy" in second
    assert "of those that fit" not in second
    late = LateState([nn.Parameter(torch.ones(4, 256))])
    collage_neuron.compile(late, bytes=6)
    assert "chosen by bytes=6: of those that fit" in collage_neuron.explain(late)
    for group in late.param_groups:
        group["params"][0].grad = torch.ones(4, 256, dtype=torch.bfloat16)
    late.step()
    with pytest.warns(UserWarning, match=r"chosen by bytes=6, and this step of CollageLateState needs \d+ bytes"):
        late.step()
    assert "chosen by bytes=6 for the states" in collage_neuron.explain(late)


def test_a_decay_that_needs_a_wider_state_is_told() -> None:
    """Of a first moment whose decay becomes .9999 a code of one byte is too little; it is said once."""
    p = nn.Parameter(torch.ones(4, 128))
    optimizer = collage_neuron.compile(AdamW([p], lr=1e-2), bytes=9)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9999, 0.999)
    with pytest.warns(UserWarning, match="a number of its group has changed"):
        optimizer.step()
    optimizer.step()
    assert collage_neuron.bytes_per_parameter(optimizer) > 10


def test_a_group_that_needs_more_decides() -> None:
    model = mlp()
    first, *others = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": others, "momentum": 0.9}]
    optimizer = SGD(groups, lr=1e-2)
    collage_neuron.compile(optimizer, bytes=10)
    assert max(needed("SGD", strategy_of(optimizer)), needed("momentum", strategy_of(optimizer))) <= 10
    assert len({group["collage_strategy"] for group in optimizer.param_groups}) == 1


def test_a_model_alone_gets_it_at_the_first_step_and_keeps_its_low_words() -> None:
    """The same bits as with the optimizer at hand."""
    start = mlp()
    whole = collage_neuron.compile(start, OPTIMIZERS["AdamW"](list(start.parameters())), bytes=14)
    model = collage_neuron.compile(mlp(), bytes=14)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    train(*whole, range(2))
    assert strategy_of(optimizer) == strategy_of(whole[1])
    for p, q in zip(model.parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(collage_neuron.exact_value(optimizer, p), collage_neuron.exact_value(whole[1], q))


@pytest.mark.parametrize("wrong", [12.0, True, "12"])
def test_what_is_not_a_whole_number_is_rejected(wrong: Any) -> None:
    with pytest.raises(TypeError, match="give a whole number of bytes per parameter"):
        compiled("AdamW", bytes=wrong)
