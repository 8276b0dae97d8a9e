"""`compile(model)` alone: optimizers that are built later, and their first step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_forms import FORMS, adamw, by_both, by_model
from models import backward, differences, gpt, mlp, set_gradients, snapshot, train
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import collage_neuron
from collage_neuron import Compiled, exact_value, torch_privates
from collage_neuron.errors import UnsupportedUpdate


@pytest.mark.whole
@pytest.mark.parametrize(
    ("strategy", "arithmetic"),
    [("plus", "fp32"), ("plus", "bf16"), ("full", "fp32"), ("full", "bf16"), ("fp32", "fp32")],
)
def test_with_the_model_alone_every_step_is_the_one_of_the_other_forms(strategy: str, arithmetic: str) -> None:
    """Bit for bit, and the first step already: the low words of the fp32 weights, or these, are in it."""
    found = []
    for form in FORMS.values():
        model = mlp()
        optimizer = form(model, strategy=strategy, arithmetic=arithmetic)
        model.bfloat16()  # the form (optimizer) leaves the model's own casting to the user
        train(model, optimizer, [1])
        first = snapshot(optimizer)
        train(model, optimizer, [2, 3])
        found.append((first, snapshot(optimizer)))
    for first, last in found[1:]:
        assert differences(first, found[0][0]) == []
        assert differences(last, found[0][1]) == []
    assert any("param_lo" in key or "param_master" in key for key in found[0][0])


def recorded_first_step(closure: bool) -> tuple[list[str], Any, Optimizer]:
    """Names of what happened in the first two steps, in order; the loss of the second; the optimizer."""
    events: list[str] = []
    model = collage_neuron.compile(mlp())
    optimizer = adamw(model)

    def note(name: str) -> Callable[..., None]:
        def hook(o: Optimizer, args: Any, kwargs: Any) -> None:
            stepped = max((float(s.get("step", 0)) for s in o.state.values()), default=0.0)
            events.append(f"{name} at {stepped:.0f}")
            assert o is optimizer

        return hook

    def loss() -> torch.Tensor:
        events.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return backward(model, 0)

    optimizer.register_step_pre_hook(note("pre"))
    optimizer.register_step_post_hook(note("post"))
    backward(model, 0)
    arguments: list[Any] = [loss] if closure else []
    before = register_optimizer_step_pre_hook(note("global pre"))
    after = register_optimizer_step_post_hook(note("global post"))
    try:
        return events, [optimizer.step(*arguments) for _ in range(2)], optimizer
    finally:  # other tests step too
        before.remove()
        after.remove()


def test_the_first_step_runs_hooks_around_it_and_the_closure_once() -> None:
    events, results, _ = recorded_first_step(closure=True)
    steps = [["global pre", "pre", "closure", "post", "global post"]] * 2
    expected = [
        name if name == "closure" else f"{name} at {i + ('post' in name)}" for i, s in enumerate(steps) for name in s
    ]
    assert events == expected
    assert results[0] > results[1] > 0


class Counting(Optimizer):
    """Takes its rates from a list, an iterator and Python's generator; raises without parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.125})
        self.rates, self.count = [1.0, 0.5, 0.25, 0.125], itertools.count(1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        rate = self.rates.pop(0) / next(self.count) * random.random()
        params = [p for group in self.param_groups for p in group["params"]]
        device = params[0].device
        for p in params:
            p.add_(p.grad.to(device), alpha=-self.param_groups[0]["lr"] * rate)
        return loss


class Derived(Counting):
    """Its step runs hooks, and so does the one it calls."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("cls", [Counting, Derived])
def test_the_first_step_runs_its_own_code_once(cls: Any, kept: bool) -> None:
    """Also every step of a bound method that is kept from before compiling."""
    Counting(mlp().parameters())  # torch runs hooks around the steps of a class of which it has seen an object
    found = []
    for form in ("(model, optimizer)", "(model)"):
        model = mlp() if form == "(model, optimizer)" else collage_neuron.compile(mlp())
        optimizer: Any = cls(model.parameters())
        step = optimizer.step
        if form == "(model, optimizer)":
            collage_neuron.compile(model, optimizer)
        random.seed(0)
        results = []
        for i in range(3):
            backward(model, i)
            results.append((step if kept else optimizer.step)(lambda i=i: i))
        found.append((snapshot(optimizer), optimizer.rates, repr(optimizer.count), random.getstate(), results))
    assert differences(found[0][0], found[1][0]) == []
    assert found[0][1:] == found[1][1:]
    assert found[1][1:3] == ([0.125], "count(4)")


def test_a_kept_step_whose_class_has_another_one_now_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own code would run too."""
    model = mlp()
    optimizer = Counting(model.parameters())
    kept, own = optimizer.step, torch_privates.unhooked_step(Counting)
    monkeypatch.setattr(Counting, "step", lambda self, closure=None: own(self, closure))
    collage_neuron.compile(model)
    backward(model, 0)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UnsupportedUpdate, match=r"this Counting\.step\(\) is from before .* nothing was updated"):
        kept()
    assert all(map(torch.equal, model.parameters(), before))
    assert len(optimizer.rates) == 4
    optimizer.step()
    assert len(optimizer.rates) == 3


def test_weights_loaded_before_the_first_step_win_over_the_low_words() -> None:
    model = collage_neuron.compile(mlp(0), strategy="plus")
    loaded = {k: v.bfloat16() for k, v in mlp(1).state_dict().items()}
    loaded["0.bias"] = model.state_dict()["0.bias"].clone()  # one that stays what it was
    model.load_state_dict(loaded)
    optimizer = adamw(model, lr=0.0)
    train(model, optimizer, [0])
    exact = {name: exact_value(optimizer, p) for name, p in model.named_parameters()}
    assert torch.equal(exact["0.weight"], loaded["0.weight"].float())
    assert not torch.equal(exact["0.bias"], loaded["0.bias"].float())


def swap(model: Any) -> None:
    model[0], model[2] = model[2], model[0]


def replace_weight(model: Any) -> None:
    model[1].weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(5)))


def assign_all(model: Any) -> None:
    loaded = stack(1).state_dict()
    model.load_state_dict({name: loaded[name] for name in model.state_dict()}, assign=True)


EDITS: dict[str, Callable[[Any], object]] = {
    "wrapped": lambda model: model.__setitem__(1, nn.Sequential(model[1])),
    "parametrized": lambda model: parametrize.register_parametrization(model[1], "weight", nn.Identity()),
    "deleted": lambda model: model.__delitem__(0),
    "inserted": lambda model: model.insert(1, nn.ReLU()),
    "swapped": swap,
    "other object": replace_weight,
    "other data": lambda model: setattr(model[1].weight, "data", stack(1)[1].weight.data),
    "assigned": assign_all,
    "in fp32": lambda model: model.float(),
    "in fp32, without a head": lambda model: model.float().__delitem__(2),
}


def stack(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_model_that_is_changed_before_the_first_step_keeps_its_values(edit: Callable[[Any], object]) -> None:
    """What `compile(model)` has kept belongs to parameters, not to names; and what is fp32 by then is newer."""
    model, plain = collage_neuron.compile(stack(), strategy="split433"), stack()
    edit(model)
    edit(plain)
    optimizer = adamw(model, lr=0.0)
    set_gradients(list(model.parameters()), 0)
    optimizer.step()
    for p, value in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.dtype == torch.bfloat16
        assert torch.equal(exact_value(optimizer, p), value)


@pytest.mark.parametrize("second", [{}, {"strategy": "plus"}, {"strategy": "fp32", "keep_fp32": ["1"]}])
@pytest.mark.parametrize("edit", [swap, lambda model: model.float()], ids=["swapped", "in fp32"])
def test_a_model_that_is_compiled_once_more_keeps_its_values(edit: Callable[[Any], object], second: Any) -> None:
    """With other settings too, and in spite of changes between: a cell of a notebook that is run again."""
    model, plain = collage_neuron.compile(stack()), stack()
    edit(model)
    edit(plain)
    if model[1].weight.dtype == torch.bfloat16:
        second = {"strategy": second.get("strategy")}
    optimizer = adamw(collage_neuron.compile(model, **second), lr=0.0)
    set_gradients(list(model.parameters()), 0)
    optimizer.step()
    assert [p.dtype == torch.float32 for p in model[1].parameters()] == ["keep_fp32" in second] * 2
    bound = 2.0**-17 if second.get("strategy") == "plus" else 0.0  # two words of bf16, half a place of the second
    for p, value in zip(model.parameters(), plain.parameters(), strict=True):
        assert ((exact_value(optimizer, p) - value).abs() <= bound * value.abs()).all()


@pytest.mark.parametrize("rows", [5, 11])
def test_a_vocabulary_of_another_size_keeps_the_rows_that_it_has(rows: int) -> None:
    """As `resize_token_embeddings` of transformers makes it: new parameters, into which rows are copied."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(8, 16))
    value = nn.Embedding(rows, 16, dtype=torch.bfloat16)
    before = model[0].weight.detach().clone()
    collage_neuron.compile(model)
    both = min(rows, 8)
    value.weight.data[:both] = model[0].weight.data[:both]
    model[0] = value
    optimizer = adamw(model, lr=0.0)
    set_gradients(list(model.parameters()), 0)
    new = value.weight.detach().float()
    optimizer.step()
    assert torch.equal(exact_value(optimizer, model[0].weight), torch.cat([before[:both], new[both:]]))


def test_what_is_saved_before_the_first_step_has_low_words() -> None:
    first, model, twin = (collage_neuron.compile(mlp(seed)) for seed in (0, 1, 0))
    saved = [first.state_dict(), adamw(first).state_dict()]
    optimizer, other = adamw(model), adamw(twin)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(2))
    train(twin, other, range(2))
    assert differences(snapshot(optimizer), snapshot(other)) == ["group 0, collage_formats"]  # of what was loaded


def test_a_refused_first_step_leaves_all_as_it_was_and_the_next_is_the_first() -> None:
    model, twin = mlp(), mlp()
    optimizer, other = by_model(model), by_both(twin)
    backward(model, 0)
    optimizer.param_groups[0]["lr"] = float("nan")
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="nothing was updated"):
        optimizer.step()
    assert type(optimizer) is AdamW
    assert differences(snapshot(optimizer), before) == []
    optimizer.param_groups[0]["lr"] = 1e-2
    train(model, optimizer, range(2))
    train(twin, other, range(2))
    assert differences(snapshot(optimizer), snapshot(other)) == []


def test_optimizers_over_other_models_are_left_alone() -> None:
    model, control = mlp(), mlp()
    optimizer, alone = adamw(model), adamw(control)
    train(control, alone, range(2))
    collage_neuron.compile(gpt())
    train(model, optimizer, range(2))
    assert type(optimizer) is AdamW
    assert differences(snapshot(optimizer), snapshot(alone)) == []


def test_an_optimizer_that_stepped_before_its_model_was_marked_is_compiled() -> None:
    """As with the two optimizers of a GAN, whose models are compiled one after the other."""
    collage_neuron.compile(gpt())
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, [0])
    assert type(optimizer) is AdamW
    optimizer.zero_grad()
    collage_neuron.compile(model)
    train(model, optimizer, [1])
    assert isinstance(optimizer, Compiled)


def test_a_model_marked_alone_and_moved_to_xla_keeps_its_low_words(xla: torch.device) -> None:
    found = []
    for device in (torch.device("cpu"), xla):
        model = collage_neuron.compile(mlp()).to(device)
        optimizer = adamw(model)
        set_gradients(list(model.parameters()), 0)
        optimizer.step()
        found.append(snapshot(optimizer))
    assert [k for k in differences(*found) if "step" in k or "group" in k] == []
    assert found[0].keys() == found[1].keys()
    lows = [k for k in found[0] if k.endswith("param_lo")]
    assert lows
    # XLA:CPU contracts a * b + c: the last bit of a low word may differ where the update's does.
    for k in lows:
        assert (found[0][k][1].int() - found[1][k][1].int()).abs().max() <= 1


def without_first(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop(0)


def reversed_order(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


def with_another(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].insert(0, nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)))


def in_two_groups(optimizer: Any) -> None:
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop(0)]})


@pytest.mark.parametrize("edit", [without_first, reversed_order, with_another, in_two_groups])
def test_parameters_of_one_shape_keep_their_low_words_where_the_list_is_edited_before_the_first_step(edit: Any) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    values = {p: p.detach().clone() for p in model.parameters()}
    model, optimizer = collage_neuron.compile(model, AdamW(model.parameters(), lr=0.0), verbose=False)
    edit(optimizer)
    for p in values:
        p.grad = torch.ones_like(p)
    optimizer.step()
    held = [p for group in optimizer.param_groups for p in group["params"] if p in values]
    for p in held:
        torch.testing.assert_close(collage_neuron.exact_value(optimizer, p), values[p], rtol=2.0**-22, atol=0.0)
