"""The strategies named by their bytes, from end to end on the reference backend: rows with tails, 0-d, checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import REPRESENTATIVE

import collage_neuron
from collage_neuron.numerics.strategies import STRATEGIES, Role, Strategy, tells_roles
from collage_neuron.states.store import read_exact, record_of

SPLIT = [name for name in STRATEGIES if name.startswith("split")]
SHAPES = ((300,), (5, 130), (), (3, 4, 70))
ERROR = {"split4": 2e-5, "split3": 2e-4, "split412": 2e-3, "split312": 2e-3, "split311": 5e-3}
"""Of the parameter's norm, after 20 steps; about three times what is found."""


def steps(optimizer: Any, params: Any, others: Any, reference: Any, numbers: range) -> None:
    for i in numbers:
        g = torch.Generator().manual_seed(i)
        for p, q in zip(params, others, strict=True):
            p.grad = (torch.randn(p.shape, generator=g) * 1e-3 + 1e-4).bfloat16()
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()


@pytest.mark.sampled(of=3, each=False)  # formats are tested one by one in test_block_formats.py and its neighbours
@pytest.mark.parametrize("name", SPLIT)
def test_adamw_follows_fp32_through_a_checkpoint(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter((torch.randn(s, generator=g) * 0.02).bfloat16()) for s in SHAPES]
    others = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = collage_neuron.compile(torch.optim.AdamW(params, lr=1e-4), strategy=name)
    reference = torch.optim.AdamW(others, lr=1e-4)
    steps(optimizer, params, others, reference, range(10))
    before = [collage_neuron.exact_value(optimizer, p) for p in params]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(collage_neuron.exact_value(optimizer, p), x) for p, x in zip(params, before, strict=True))
    steps(optimizer, params, others, reference, range(10, 20))
    error = ERROR[name] if name in ERROR else ERROR[name[:6]]
    for p, q in zip(params, others, strict=True):
        assert (collage_neuron.exact_value(optimizer, p) - q).norm() <= error * q.norm()


def test_a_state_that_may_be_negative_gets_no_format_without_signs() -> None:
    """ASGD's average of the parameter is slow, and as negative as the parameter."""
    p = torch.nn.Parameter(torch.randn(5, 130).bfloat16())
    optimizer = collage_neuron.compile(torch.optim.ASGD([p]), strategy="split311")
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert optimizer.state[p]["ax"].dtype == torch.bfloat16


def test_each_role_has_its_format() -> None:
    """A strategy of one's own that says nothing of them keeps as the parameter what is negative or not recognised."""
    strategies = Strategy("own", "bf16+int8", "i16q8", "u16q16"), STRATEGIES["split433"], STRATEGIES["split423"]
    own, split433, split423 = ([s.of(role) for role in ROLES] for s in strategies)
    assert own == [PLAIN, "u16q16", "u16q16", *[PLAIN] * 4, "i16q8", "i16q8", "fp32"]
    assert split433 == [WIDE, PLAIN, WIDE, WIDE, WIDE, PLAIN, PLAIN, PLAIN, PLAIN, "fp32"]
    assert split423 == [WIDE, PLAIN, PLAIN, WIDE, WIDE, PLAIN, PLAIN, "i16q8", "i16q8", "fp32"]
    assert STRATEGIES["split412"].of("long") == WIDE  # a hundred errors of 8 bits would be in it
    assert {STRATEGIES["plus"].of(role) for role in (None, "maximum", "average", "long")} == {"bf16"}
    assert not any(tells_roles(name) for name in ("light", "plus", "full", "fp32", {"*": "u16q8"}))
    assert all(tells_roles(name) for name in ("split444", "split433", "split423", "split422", "split311"))


PLAIN, WIDE = "bf16+int8", "bf16+int16"
ROLES: tuple[Role | None, ...] = (
    None, "slow", "sum", "signed", "idle", "decaying", "maximum", "average", "long", "counter",
)  # fmt: skip


@pytest.mark.parametrize(("name", "state"), [("Adagrad", "sum"), ("ASGD", "ax")])
def test_states_of_which_nothing_is_forgotten_have_four_bytes_under_split433(name: str, state: str) -> None:
    """A checkpoint of before, which has three, is read as it is: nothing is lost."""
    shape, cls = (4, 130), getattr(torch.optim, name)
    before = {"param": "bf16+int16", state: "bf16+int8"}
    p, q = (torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()) for _ in "pq")
    old = collage_neuron.compile(cls([p]), strategy=before)
    new = collage_neuron.compile(cls([q]), strategy="split433")
    for step in range(3):
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        old.step()
    assert old.state[p][f"{state}_lo"].dtype == torch.int8
    with torch.no_grad():
        q.copy_(p)
    saved = copy.deepcopy(old.state_dict())
    saved["param_groups"][0]["collage_strategy"] = "split433"
    new.load_state_dict(saved)
    assert torch.equal(collage_neuron.exact_value(new, q), collage_neuron.exact_value(old, p))
    values = [read_exact(x, o.state[x], state, record_of(o, x)) for x, o in ((p, old), (q, new))]
    assert torch.equal(*values)
    q.grad = torch.ones_like(q)
    new.step()
    assert new.state[q][f"{state}_lo"].dtype == torch.int16
    assert collage_neuron.bytes_per_parameter(new) == 10


def test_each_number_of_bytes_has_its_strategy_with_adagrad_too() -> None:
    """Its sum needs four bytes under split433, three under split423 and two under split422."""

    def of(budget: int) -> str:
        p = torch.nn.Parameter(torch.randn(4, 256).bfloat16())
        optimizer = collage_neuron.compile(torch.optim.Adagrad([p]), bytes=budget)
        return str(optimizer.param_groups[0]["collage_strategy"])

    assert [of(n) for n in (12, 10, 9, 8, 7, 6)] == ["fp32", "split444", "split423", "split422", "split322", "split311"]


def test_the_strategies_that_represent_the_others_store_in_every_format() -> None:
    used, shown = (
        {f for name in names for f in (STRATEGIES[name].param, STRATEGIES[name].state, STRATEGIES[name].slow)}
        for names in (STRATEGIES, REPRESENTATIVE)
    )
    assert used == shown
