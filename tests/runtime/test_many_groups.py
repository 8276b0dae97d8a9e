"""Many groups of one parameter: a steady step works nothing out anew, and a validated one looks at a few of them."""

from typing import Any

import pytest
import torch

import collage_neuron
from collage_neuron import torch_privates
from collage_neuron.runtime import step_plan
from collage_neuron.states import visible_states
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.validation import validate

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


def counted(monkeypatch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> list[str]:
    """A list to which each call of these functions adds its name."""
    calls: list[str] = []

    def noting(name: str, own: Any) -> Any:
        def noted(*args: Any) -> Any:
            calls.append(name)
            return own(*args)

        return noted

    for module, name in places:
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    return calls


def test_a_steady_step_works_nothing_out_anew_for_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = optimizer_of(GROUPS, validate="off")
    for _ in range(4):
        optimizer.step()
    calls = counted(monkeypatch, (visible_states, "_by_kind"), (step_plan, "_job"), (torch_privates, "guard"))
    optimizer.step()
    assert calls == []
    optimizer.param_groups[5]["collage_arithmetic"] = "bf16"
    optimizer.step()
    assert calls == ["_job", "guard", "guard"]  # of one group, and of all


def test_tables_forget_the_oldest() -> None:
    optimizer = optimizer_of(1, validate="off")
    params = [*optimizer.param_groups[0]["params"], *(torch.nn.Parameter(torch.ones(2).bfloat16()) for _ in range(9))]
    optimizer.param_groups[0]["params"] = params
    for i in range(1, 2 ** len(params), 23):  # other gradients in each step
        for j, p in enumerate(params):
            p.grad = torch.ones_like(p) if i >> j & 1 else None
        optimizer.step()
    known = bookkeeping(optimizer).structure.known
    assert [len(known[name]) for name in ("jobs", "launches")] == [32, 32]


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
