"""What torch's own TestOptimRenewed (test/test_optim.py) promises of an optimizer, asked of compiled classes.

`STANDS_FOR` has every test of that class, with what stands for it here or in `test_optim_db.py`, or the reason why
nothing can. Parameters are bf16, and compiled classes are built as torch's are: from parameters and options.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sampling import part
from torch import nn
from torch.nn import Parameter
from torch_problems import COVERED, INFOS, Options, db, inputs
from torch_promises import CHECKS, Affine, compiled, equal, exact

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate

pytestmark = pytest.mark.usefixtures("rejecting")

NO_CUDA = "needs CUDA"

STANDS_FOR = {
    "test_adamw_serialization": "test_decoupled_decay_survives_loading",
    "test_can_load_from_to_named_state_dict": "test_names_of_parameters_survive_loading",
    "test_can_load_older_state_dict": "an_older_state_dict_loads",
    "test_complex": "test_complex_parameters_are_rejected",
    "test_complex_2d": "test_complex_parameters_are_rejected",
    "test_cpu_load_state_dict": "a_state_of_another_implementation_loads",
    "test_deepcopy_copies_all_public_attrs": "a_copy_steps_like_the_original",
    "test_defaults_changed_to_foreach": "needs CUDA; a compiled class runs none of the implementations",
    "test_errors": "test_errors_are_those_of_the_class, test_errors_of_a_step_are_those_of_the_class",
    "test_foreach_large_tensor": "needs CUDA, 72 GB",
    "test_foreach_matches_forloop": "any_way_to_run_takes_the_same_steps, a_layer_may_be_frozen_and_thawed",
    "test_forloop_goes_right_direction": "goes_right_direction, goes_right_direction_with_schedulers",
    "test_forloop_goes_right_direction_multigpu": "needs two GPUs; groups on mixed devices are rejected",
    "test_fused_cpu_matches_cuda": NO_CUDA,
    "test_fused_does_not_step_if_foundinf": "test_fused_does_not_step_where_the_scaler_found_inf",
    "test_fused_error_on_params_on_meta": "test_parameters_on_meta_are_rejected",
    "test_fused_large_tensor": "needs 64 GB",
    "test_fused_matches_forloop": "any_way_to_run_takes_the_same_steps, a_layer_may_be_frozen_and_thawed",
    "test_load_nontensor_step": "a_step_count_may_be_loaded_as_a_number",
    "test_load_state_dict_post_hook": "hooks_see_and_change_what_is_loaded",
    "test_load_state_dict_pre_hook_and_prepend": "hooks_see_and_change_what_is_loaded",
    "test_load_state_dict_pre_post_hook": "hooks_see_and_change_what_is_loaded",
    "test_mixed_device_dtype": "needs two GPUs; bf16 and fp32 side by side: dtypes_may_be_mixed",
    "test_non_empty_state": "no_state_is_empty_after_a_step",
    "test_optim_infos_do_not_specify_global_cliquey_kwargs": "checks torch's own test inputs",
    "test_optimizer_can_be_printed": "it_can_be_printed",
    "test_param_group_with_lrscheduler_goes_right_direction": "groups_with_schedulers_go_the_right_direction",
    "test_param_groups_lr": "groups_have_their_learning_rates, a_tiny_learning_rate_moves_nothing",
    "test_param_groups_weight_decay": "groups_have_their_weight_decay",
    "test_peak_memory_foreach": NO_CUDA,
    "test_rosenbrock_sparse": "test_sparse_gradients_are_rejected, rosenbrock_comes_nearer",
    "test_save_load_equality_with_weights_only": "a_saved_state_is_equal_when_read",
    "test_second_order_optims_return_consistent_types": "LBFGS, the only one, is rejected",
    "test_set_default_dtype_works_with_foreach": "the_default_dtype_changes_nothing",
    "test_state_dict_deterministic": "state_dict_round_trip, loading_is_deterministic",
    "test_state_dict_post_hook": "hooks_see_and_change_what_is_saved",
    "test_state_dict_pre_hook": "hooks_see_and_change_what_is_saved",
    "test_state_dict_pre_post_hook": "hooks_see_and_change_what_is_saved",
    "test_state_dict_with_cuda_params": NO_CUDA,
    "test_step_all_hooks": "hooks_run_in_order",
    "test_step_is_noop_for_zero_grads": "gradients_of_zero_move_nothing",
    "test_step_is_noop_when_params_have_no_grad": "without_gradients_nothing_happens",
    "test_step_post_hook": "hooks_run_in_order",
    "test_step_pre_hook": "hooks_run_in_order",
    "test_tensor_lr": "a_learning_rate_may_be_a_tensor",
}
"""Every test of TestOptimRenewed in torch 2.9, and the checks that stand for it; a sentence where there is none."""


@pytest.mark.sampled(of=8)
@pytest.mark.parametrize("name", COVERED)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_input_passes(check: Callable[[str, Options], None], name: str) -> None:
    failed = {}
    for description, options in part(inputs(name), 3, check.__name__):
        try:
            check(name, options)
        except Exception as error:  # noqa: PERF203  # every one is tried, and all that fail are shown
            failed[description] = f"{type(error).__name__}: {error}"
    assert not failed


# --- once, or for some ---------------------------------------------------------------------------------------------


def test_decoupled_decay_survives_loading() -> None:
    model = nn.Linear(5, 5, dtype=torch.bfloat16)
    adam, adamw = compiled("Adam"), compiled("AdamW")
    coupled = adam(model.parameters()).state_dict()
    decoupled = adamw(model.parameters()).state_dict()
    old = copy.deepcopy(decoupled)
    del old["param_groups"][0]["decoupled_weight_decay"]
    for make, saved, expected in ((adam, decoupled, True), (adamw, coupled, True), (adamw, old, True)):
        optimizer = make(model.parameters())
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is expected


@pytest.mark.parametrize("name", COVERED)
@pytest.mark.parametrize("named", [(False, False), (False, True), (True, False), (True, True)])
def test_names_of_parameters_survive_loading(name: str, named: tuple[bool, bool]) -> None:
    problem = Affine()
    ways = {False: problem.params, True: [("weight", problem.weight), ("bias", problem.bias)]}
    optimizer, other = (compiled(name)(ways[way]) for way in named)
    problem.train(optimizer, 2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    problem.train(other, 1)
    names = other.state_dict()["param_groups"][0].get("param_names")
    assert names == (["weight", "bias"] if any(named) else None)


@pytest.mark.parametrize("name", COVERED)
def test_complex_parameters_are_rejected(name: str) -> None:
    optimizer = INFOS[name].optim_cls([Parameter(torch.randn(3, dtype=torch.complex64))])
    with pytest.raises(TypeError, match="complex"):
        collage_neuron.compile(optimizer)


@pytest.mark.parametrize("name", [name for name in COVERED if INFOS[name].supports_sparse])
def test_sparse_gradients_are_rejected(name: str) -> None:
    """Nothing has been changed when it is."""
    p = Parameter(torch.ones(2).bfloat16())
    optimizer = compiled(name)([p])
    p.grad = torch.tensor([3.0, 0.0]).bfloat16().to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    assert torch.equal(p, torch.ones(2).bfloat16())
    assert not optimizer.state_dict()["state"].get(0, {}).get("step", 0)


@pytest.mark.parametrize("name", COVERED)
def test_errors_of_a_step_are_those_of_the_class(name: str) -> None:
    """An input that torch's class fails on when it steps fails with the compiled one too, if there is such an input."""
    for one in INFOS[name].optim_error_inputs_func("cpu", torch.bfloat16):
        if one.error_on is db.OptimizerErrorEnum.STEP_ERROR:
            given = one.optimizer_error_input
            optimizer = compiled(name)(given.params, **given.kwargs)
            with pytest.raises((one.error_type, TypeError, ValueError, UnsupportedUpdate)):
                optimizer.step()


FUSED = [name for name in COVERED if "fused" in INFOS[name].supported_impls]


@pytest.mark.parametrize("name", FUSED)
def test_parameters_on_meta_are_rejected(name: str) -> None:
    p = Parameter(torch.empty(2, device="meta", dtype=torch.bfloat16))
    p.grad = torch.empty_like(p)
    with pytest.raises((RuntimeError, ValueError, TypeError), match="meta"):
        collage_neuron.compile(INFOS[name].optim_cls([p])).step()


@pytest.mark.parametrize("name", FUSED)
def test_fused_does_not_step_where_the_scaler_found_inf(name: str) -> None:
    """As GradScaler asks it of optimizers that unscale by themselves: by two attributes."""
    problem = Affine()
    optimizer = compiled(name)(problem.params, fused=True)
    before = exact(optimizer, problem.params)
    for p in problem.params:
        p.grad = torch.ones_like(p)
    scaler = torch.amp.grad_scaler.GradScaler("cpu", init_scale=4.0)
    for p in problem.params:
        p.grad = torch.full_like(p, math.inf)
    scaler.scale(torch.tensor(1.0))
    scaler.step(optimizer)
    scaler.update()
    assert equal(before, exact(optimizer, problem.params))
    assert scaler.get_scale() == 2.0


# --- the list ------------------------------------------------------------------------------------------------------


def test_what_stands_for_each_test_of_torch_is_there() -> None:
    """Each entry is a sentence, or names checks that exist and run."""
    here = {check.__name__ for check in CHECKS} | {k for k in globals() if k.startswith("test_")}
    text_there = Path(__file__).with_name("test_optim_db.py").read_text()
    there = set(re.findall(r"^def (\w+)", text_there, re.MULTILINE))
    known = here | there
    for name, text in STANDS_FOR.items():
        words = [word for word in text.replace(",", " ").replace(":", " ").split() if "_" in word]
        assert not set(words) - known, name
        assert words or " " in text, name


def test_nothing_is_left_out_without_a_reason() -> None:
    reasons = {name: text for name, text in STANDS_FOR.items() if "_" not in text}
    assert len(STANDS_FOR) == 45
    assert all(any(w in text for w in ("needs", "rejected", "CUDA", "torch's own")) for text in reasons.values())
