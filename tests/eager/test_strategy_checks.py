"""A mapping may name states that only some parameters have; a name that none has is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from as_written import Muon, Written, compiled, everything, parameters, run
from torch import Tensor
from torch.nn import Parameter

import collage_neuron

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


def test_groups_with_other_mappings_do_not_count() -> None:
    params = parameters(torch.bfloat16)
    own = {"param": "bf16+int16", "exp_avg": "bf16"}
    optimizer = Momentum([{"params": params[:2], "collage_strategy": own}, {"params": params[2:]}])
    with pytest.raises(ValueError, match="the strategy names 'exp_avg'; this update has param, momentum_buffer "):
        collage_neuron.compile(optimizer, strategy="plus")


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
