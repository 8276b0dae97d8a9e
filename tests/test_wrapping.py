"""Wrappers that hold fp32 parameters before the line: DDP reduces gradients as before, the others are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import skipped_runs as skipped
import torch
import wrapped_runs as runs
from sharded_runs import different
from torch.optim import AdamW
from worlds import run_world

import collage_neuron

# --- DistributedDataParallel ------------------------------------------------------------------------------------------


def test_ddp_around_fp32_parameters_reduces_gradients_after_the_line_in_every_form(tmp_path: Path) -> None:
    """The replicas stay equal, and have the bits of replicas that nothing wraps: with the low words of fp32 weights."""
    first, second = run_world(2, tmp_path, runs.every_form)
    assert any(bits.any() for name, bits in first["by hand"].items() if name.endswith("param_lo"))
    for form in runs.FORMS:
        assert (form, different(first[form], second[form])) == (form, [])
        assert (form, different(first[form], first["by hand"])) == (form, [])


def test_every_option_of_ddp_is_kept_when_it_is_set_up_anew(tmp_path: Path) -> None:
    first, second = run_world(2, tmp_path, runs.every_option)
    for option, (found, expected) in first.items():
        assert (option, different(found, expected)) == (option, [])
        assert (option, different(found, second[option][0])) == (option, [])


def test_a_ddp_that_cannot_be_set_up_anew_is_rejected_before_anything_changes(tmp_path: Path) -> None:
    (messages,) = run_world(1, tmp_path, runs.rejected)
    for name, problem in {
        "mixed precision": "with mixed_precision, which",
        "built in": "with a communication hook of torch's own, which",
        "in backward": "with optimizers that step in backward, which",
        "hook that ran": "with a communication hook that has run, which",
        "python": r"with a reducer in Python (torch._dynamo.config.optimize_ddp), which",
        "delayed": "with delay_all_reduce_named_params, which",
    }.items():
        assert f"held by a DistributedDataParallel {problem} cannot be set up anew" in messages[name]
        assert messages[name].endswith("and wrap the model after that")


def test_hooks_of_an_unknown_wrapper_on_fp32_parameters_are_rejected(tmp_path: Path) -> None:
    (messages,) = run_world(1, tmp_path, runs.held_by_something)
    assert "gradient of param_groups[0]['params'][0]: a wrapper that reduces gradients in hooks" in messages[0]
    assert "gradient of model parameter '0.weight'" in messages[1]
    assert "or delete that loss (del loss)" in messages[1]


# --- FSDP1 and torch_xla's FSDP ---------------------------------------------------------------------------------------


def test_fsdp1_of_fp32_parameters_is_rejected_in_every_form(tmp_path: Path) -> None:
    for messages in run_world(2, tmp_path, runs.fsdp1_of_fp32):
        assert len(messages) == 10
        for message in messages:
            assert "is float32 and held by FullyShardedDataParallel, which would go on with the float32 copy" in message
            assert "shard it by fully_shard" in message


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_of_bf16_parameters_ends_where_one_process_ends(use_orig_params: bool, tmp_path: Path) -> None:
    assert run_world(2, tmp_path, runs.fsdp1_of_bf16, use_orig_params) == [[True] * 4] * 2


@pytest.mark.parametrize("form", ["(model, optimizer)", "(optimizer)", "(model)"])
def test_fsdp_of_torch_xla_is_rejected(form: str, xla: torch.device) -> None:
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    wrapped = XlaFullyShardedDataParallel(torch.nn.Linear(3, 2).to(xla))
    optimizer = AdamW(wrapped.parameters())
    targets: dict[str, Any] = {
        "(model, optimizer)": (wrapped, optimizer),
        "(optimizer)": (optimizer,),
        "(model)": (wrapped,),
    }
    with pytest.raises(ValueError, match="XlaFullyShardedDataParallel, which has float32 parameters only: leave its"):
        collage_neuron.compile(*targets[form])
    assert type(optimizer) is AdamW
    assert {p.dtype for p in wrapped.parameters()} == {torch.float32}


# --- nonfinite="skip": one decision for all processes that share parameters -------------------------------------------


@pytest.mark.parametrize(
    ("size", "kind"), [(2, kind) for kind in skipped.KINDS] + [(4, "hsdp"), (4, "tensor_parallel")]
)
def test_a_nan_in_one_process_makes_all_skip_and_count(kind: str, size: int, tmp_path: Path) -> None:
    assert run_world(size, tmp_path, skipped.skipped, kind) == [[]] * size


def test_skip_is_rejected_for_parameters_that_a_library_has_split_its_own_way(tmp_path: Path) -> None:
    (message,) = run_world(1, tmp_path, skipped.of_an_unknown_library)
    assert "split by tensor parallelism (p.tensor_model_parallel), over processes that only its library" in message
