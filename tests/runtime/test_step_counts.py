"""What steps count: in which dtype, from which step on where first ones are skipped, and once where groups are many."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import schedulefree
import torch
from as_written import Written
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

import collage_neuron
from collage_neuron import exact_value
from collage_neuron.validation import validate

# --- A step count in bf16 or fp16 counts in fp32; two states that share one, and groups that compute, are rejected ----


def _optimizer(**kwargs: Any) -> tuple[list[torch.nn.Parameter], Any]:
    params = [torch.nn.Parameter(torch.ones(8).bfloat16()) for _ in range(3)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params, collage_neuron.compile(torch.optim.AdamW(params, lr=0.1), strategy="plus", **kwargs)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_count_that_two_states_share_is_rejected(backend: str) -> None:
    params, optimizer = _optimizer(backend=backend)
    for _ in range(3):
        optimizer.step()
    optimizer.state[params[2]]["step"] = optimizer.state[params[0]]["step"]
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"\['step'\] and .*\['step'\] share memory.*nothing was updated"):
        optimizer.step()
    assert all(map(torch.equal, before, params))
    assert float(optimizer.state[params[0]]["step"]) == 3
    optimizer.state[params[2]]["step"] = optimizer.state[params[2]]["step"].clone()
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [4, 4, 4]


def test_a_group_that_computes_its_settings_is_rejected() -> None:
    class Doubling(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return 2 * super().__getitem__(key) if key == "lr" else super().__getitem__(key)

    params, optimizer = _optimizer()
    optimizer.step()
    optimizer.param_groups[0] = Doubling(optimizer.param_groups[0])
    before = params[0].detach().clone()
    with pytest.raises(TypeError, match=r"param_groups\[0\] is a Doubling that computes"):
        optimizer.step()
    assert torch.equal(params[0], before)


STEPS = 270


def new() -> tuple[nn.Parameter, Optimizer]:
    p = nn.Parameter(torch.linspace(-1, 1, 64))
    return p, AdamW([p], lr=1e-3, betas=(0.9, 0.9999), weight_decay=0.0)


def train(p: nn.Parameter, optimizer: Optimizer, steps: range) -> None:
    for i in steps:
        p.grad = torch.randn(64, generator=torch.Generator().manual_seed(i)).to(p.dtype)
        optimizer.step()


def narrowed(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    state = copy.deepcopy(state)
    for of_one in state["state"].values():
        of_one["step"] = of_one["step"].to(dtype)
    return state


def loaded(dtype: torch.dtype, how: str, at: int, strategy: str) -> tuple[nn.Parameter, Optimizer]:
    """A run whose count was narrow, and `at`."""
    p, optimizer = new()
    if how == "before compile":
        train(p, optimizer, range(2))
        optimizer.state[p]["step"].fill_(at)
        optimizer.load_state_dict(narrowed(optimizer.state_dict(), dtype))
        optimizer.state[p]["step"] = optimizer.state[p]["step"].to(dtype)
        return p, collage_neuron.compile(optimizer, strategy=strategy, verbose=False)
    collage_neuron.compile(optimizer, strategy=strategy, verbose=False)
    train(p, optimizer, range(2))
    optimizer.state[p]["step"].fill_(at)
    if how == "assigned":
        optimizer.state[p]["step"] = optimizer.state[p]["step"].to(dtype)
    else:
        optimizer.load_state_dict(narrowed(optimizer.state_dict(), dtype))
    return p, optimizer


@pytest.mark.parametrize("strategy", ["plus", "split433", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["before compile", "assigned", "loaded"])
def test_a_narrow_count_counts_on_as_in_fp32(how: str, dtype: torch.dtype, strategy: str) -> None:
    narrow, wide = (loaded(d, how, 250, strategy) for d in (dtype, torch.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p, optimizer in (narrow, wide):
            train(p, optimizer, range(250, STEPS))
    (p, optimizer), (q, other) = narrow, wide
    assert optimizer.state[p]["step"].dtype == torch.float32
    assert optimizer.state[p]["step"].item() == STEPS
    assert torch.equal(exact_value(optimizer, p), exact_value(other, q))


class Narrow(Written):
    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        made = state or {"b": torch.zeros((), dtype=torch.bfloat16), "q": torch.zeros_like(p, dtype=torch.bfloat16)}
        state.update({name: x.add_(0.376) for name, x in made.items()})
        p.sub_(g * state["q"], alpha=0.1 * float(state["b"]))


@pytest.mark.parametrize("between", ["", "loaded", "compiled"])
def test_what_a_step_makes_narrow_stays_so_until_it_is_loaded(between: str) -> None:
    """As in plain torch, which then casts it to the type of the parameter; not if it is compiled again."""
    p, q = nn.Parameter(torch.linspace(-1, 1, 64)), nn.Parameter(torch.linspace(-1, 1, 64))
    plain, compiled = Narrow([q]), collage_neuron.compile(Narrow([p]), strategy="fp32", verbose=False)
    for own, optimizer in ((p, compiled), (q, plain)):
        own.grad = torch.full_like(own, 0.625)
        for i in range(40):
            if between == "loaded" and i == 20:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if between == "compiled" and i == 20 and optimizer is compiled:
                collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
            optimizer.step()
        dtype = torch.float32 if between == "loaded" else torch.bfloat16
        assert {optimizer.state[own][name].dtype for name in "bq"} == {dtype}
    assert torch.equal(exact_value(compiled, p), q)


@pytest.mark.parametrize("how", ["before compile", "assigned", "loaded"])
def test_a_count_that_may_have_stood_still_is_told(how: str) -> None:
    with pytest.warns(
        UserWarning, match=r"'step' of 1 parameters .* cannot count beyond 256, and is 256: it counts in"
    ):
        optimizer = trained_on(how)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item() == 258


def trained_on(how: str) -> Optimizer:
    p, optimizer = loaded(torch.bfloat16, how, 256, "split433")
    train(p, optimizer, range(256, 258))
    return optimizer


# --- first steps that are skipped: the next one is the first, for optimizers whose first step is unlike the others ----

Make = Callable[[list[Parameter]], Optimizer]


class Follows(Written):
    """Its state begins as the parameter."""

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "z" not in state:
            state["z"] = p.clone()
        state["z"].sub_(g, alpha=group["lr"])
        p.lerp_(state["z"], 0.5)


def training(make: Any, **settings: Any) -> Make:
    """A schedule-free optimizer in training mode."""

    def made(params: list[Parameter]) -> Optimizer:
        optimizer: Optimizer = make(params, lr=1e-2, **settings)
        optimizer.train()  # type: ignore[attr-defined]
        return optimizer

    return made


MAKE: dict[str, Make] = {
    "own": Follows,
    "momentum": lambda params: SGD(params, lr=1e-2, momentum=0.9, dampening=0.9),
    "SGDScheduleFree": training(schedulefree.SGDScheduleFree),
    "AdamWScheduleFree": training(schedulefree.AdamWScheduleFree),
    "ADOPT": lambda params: pytorch_optimizer.ADOPT(params, lr=1e-2),
    "NovoGrad": lambda params: pytorch_optimizer.NovoGrad(params, lr=1e-2),
}


def parameters(dtype: torch.dtype) -> list[Parameter]:
    return [Parameter(torch.full((n,), 0.5, dtype=dtype)) for n in (64, 3)]


def step(optimizer: Optimizer, params: list[Parameter], t: int, bad: int | None = None) -> None:
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, 1.0 + t + i)
        if i == bad:
            p.grad[1] = torch.nan
    optimizer.step()


@pytest.mark.parametrize("name", MAKE)
def test_the_next_step_is_the_first(name: str) -> None:
    """Bits of a run without that step; and, two of them later, near the same class in float64."""
    found = []
    for bad in (True, False):
        params = parameters(torch.float32)
        optimizer = collage_neuron.compile(MAKE[name](params), strategy="split444", verbose=False, nonfinite="skip")
        if bad:
            step(optimizer, params, 0, bad=0)
            step(optimizer, params, 0, bad=1)
        for t in range(1, 6):
            step(optimizer, params, t)
        assert collage_neuron.skipped_steps(optimizer) == 2 * bad
        found.append([collage_neuron.exact_value(optimizer, p) for p in params])
    assert all(map(torch.equal, *found))
    exact = parameters(torch.float64)
    oracle = MAKE[name](exact)
    for t in range(1, 6):
        step(oracle, exact, t)
    for x, p in zip(found[0], exact, strict=True):
        torch.testing.assert_close(x.double(), p.detach(), rtol=1e-5, atol=1e-6)


# --- many groups of one parameter: a steady step works nothing out anew, and a validated one looks at a few of them ---

GROUPS = 24  # more than the 16 results that used to be remembered


def optimizer_of(count: int, **kwargs: Any) -> torch.optim.Optimizer:
    """Every third group has two parameters, so that ids of lists and of parameters differ."""
    torch.manual_seed(0)
    groups: list[dict[str, Any]] = [
        {"params": [torch.nn.Parameter(torch.randn(3, 5).bfloat16()) for _ in range(1 + (i % 3 == 0))],
         "lr": 1e-3 * (1 + i)}
        for i in range(count)
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for group in groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    collage_neuron.compile(optimizer, strategy="plus", **kwargs)
    return optimizer


def test_groups_that_share_an_update_are_validated_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = optimizer_of(GROUPS)
    seen: list[set[int]] = []
    monkeypatch.setattr(validate, "is_due", lambda steps: True)
    monkeypatch.setattr(validate, "validate_job", lambda base, own, job, *more: seen[-1].add(id(job.group)))
    for steps in (1, 2, 4):
        seen.append(set())
        validate.history_of(optimizer).steps = steps - 1
        optimizer.step()
    assert [len(ids) for ids in seen] == [validate.GROUPS] * 3
    assert len(set().union(*seen)) == GROUPS
