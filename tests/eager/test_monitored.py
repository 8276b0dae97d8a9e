"""What the monitor says of steps on fp32 values: beside the same formulas in float64, from exact values."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from as_written import LAUNCHED, Lamb, Make, Muon, Shampoo, compiled, everything, parameters, run, values

import collage_neuron
from collage_neuron import checkpoint

STRATEGIES = ("bf16", "plus", "split433", "split322", "stochastic")


def in_fp32(
    make: Make, optimizer: Any, params: list[Any], step: int
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """What a step makes of the stored values in plain fp32: parameters and states."""
    plain = make([torch.nn.Parameter(value.clone()) for value in values(optimizer, params)])
    model = torch.nn.ParameterList(params)
    if optimizer.state:
        plain.load_state_dict(copy.deepcopy(checkpoint.get_fp32_state_dict(model, optimizer)[1]))  # lists are shared
    run(plain, 1, first=step)
    own = plain.param_groups[0]["params"]
    return [p.detach() for p in own], [plain.state[p] for p in own]


@pytest.mark.parametrize("make", [Muon, Lamb, Shampoo])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_numbers_are_those_of_the_values_before_and_after(make: Make, strategy: str) -> None:
    optimizer, params = compiled(make, strategy, seed=3)
    with collage_neuron.monitor(optimizer) as monitor:
        for step in range(4):
            before, highs = values(optimizer, params), [p.detach().float() for p in params]
            wanted, _ = in_fp32(make, optimizer, params, step)
            run(optimizer, 1, first=step)
            after = values(optimizer, params)
            record = monitor.latest()
            assert record is not None
            assert record.step == 1 + step
            for i, p in enumerate(params):
                found = record.parameters[f"0.{i}"].measures
                raw = (wanted[i] - before[i]).double()
                for which, e in (("pair", after[i] - before[i]), ("high", p.detach().float() - highs[i])):
                    if which == "high" and strategy in ("split322", "split433"):  # a coded one has its own reading
                        continue
                    e = e.double()
                    effect = getattr(found, which)
                    assert effect.norm == pytest.approx(float(e.norm()), rel=1e-6)
                    assert effect.edq == pytest.approx(float((e * raw).sum() / raw.norm()), rel=1e-5, abs=1e-9)
                    lost = 100 * int(((raw != 0) & (e == 0)).sum()) / int((raw != 0).sum())
                    assert effect.lost == pytest.approx(lost)
                # What is launched measures the update itself, of weights of about 1, which fp32 rounds by 2**-24.
                rounded = 2**-24 * p.numel() ** 0.5 if make in LAUNCHED else 0
                assert found.raw_norm == pytest.approx(float(raw.norm()), rel=1e-6, abs=rounded)


@pytest.mark.parametrize("strategy", ["plus", "stochastic"])
def test_a_monitor_changes_no_bit_and_measures_when_due(strategy: str) -> None:
    ours, plain = (compiled(Shampoo, strategy)[0] for _ in range(2))
    with collage_neuron.monitor(ours, every=3) as monitor:
        run(ours, 7)
        run(plain, 7)
    assert everything(ours) == everything(plain)
    assert [record.step for record in monitor.history] == [3, 6]


def test_one_that_is_attached_before_the_first_step_measures_it() -> None:
    """Until then nobody knows that the step needs copies: it must not fall silent."""

    class Late(Muon):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            if state.get("step", 0) < 2:
                state.setdefault("step", 0)
                state.setdefault("momentum_buffer", torch.zeros_like(p))
                state["step"] += 1
                p.sub_(g, alpha=group["lr"])
            else:
                super().update(p, g, state, group)

    optimizer = collage_neuron.compile(Late(parameters(torch.bfloat16)), strategy="plus")
    with collage_neuron.monitor(optimizer) as monitor:
        run(optimizer, 5)
    assert [record.step for record in monitor.history] == [1, 2, 3, 4, 5]
    assert all(record.total.raw_norm > 0 for record in monitor.history)


def test_parameters_without_a_gradient_and_skipped_steps_have_no_numbers() -> None:
    optimizer, params = compiled(Muon, "plus", nonfinite="skip")
    with collage_neuron.monitor(optimizer) as monitor:
        run(optimizer, 2)
        for p in params[1:]:
            p.grad = None
        optimizer.step()
        params[0].grad = torch.full_like(params[0], math.inf)
        optimizer.step()
    assert [list(record.parameters) for record in monitor.history][2:] == [["0.0"]]
