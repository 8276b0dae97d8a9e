"""Wrappers that hold fp32 parameters before the line: DDP reduces gradients as before, the others are rejected."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import prepared_runs as prepared
import pytest
import skipped_runs as skipped
import torch
import wrapped_runs as runs
from models import differences, snapshot
from sharded_runs import different
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer
from worlds import in_turn, run_world

import collage_neuron
from collage_neuron import STRATEGIES, UnsupportedUpdate

pytestmark = pytest.mark.usefixtures("rejecting")

BOTH = (True, False)
CALLS: dict[int, dict[str, tuple[Any, ...]]] = {
    1: {f.__name__: (f,) for f in (runs.rejected, runs.held_by_something, skipped.of_an_unknown_library)},
    2: {f.__name__: (f,) for f in (runs.every_form, runs.every_option, runs.fsdp1_of_fp32, runs.fsdp1_after_the_line)}
    | {
        f"{f.__name__}, {use_orig_params}": (f, use_orig_params)
        for f in (runs.fsdp1_of_bf16, runs.fsdp1_of_others, runs.fsdp1_after_the_model_alone)
        for use_orig_params in BOTH
    }
    | {kind: (skipped.skipped, kind) for kind in skipped.KINDS},
    4: {kind: (skipped.skipped, kind) for kind in ("hsdp", "tensor_parallel")},
}
Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each process found, by the number of processes: one world for all tests."""
    folder = tmp_path_factory.mktemp("worlds")
    return {size: run_world(size, folder / str(size), in_turn, calls) for size, calls in CALLS.items()}


# --- DistributedDataParallel ------------------------------------------------------------------------------------------


def test_ddp_around_fp32_parameters_reduces_gradients_after_the_line_in_every_form(found: Found) -> None:
    """The replicas stay equal, and have the bits of replicas that nothing wraps: with the low words of fp32 weights."""
    first, second = (own["every_form"] for own in found[2])
    assert any(bits.any() for name, bits in first["by hand"].items() if name.endswith("param_lo"))
    for form in runs.FORMS:
        assert (form, different(first[form], second[form])) == (form, [])
        assert (form, different(first[form], first["by hand"])) == (form, [])


def test_every_option_of_ddp_is_kept_when_it_is_set_up_anew(found: Found) -> None:
    first, second = (own["every_option"] for own in found[2])
    for option, (ours, expected) in first.items():
        assert (option, different(ours, expected)) == (option, [])
        assert (option, different(ours, second[option][0])) == (option, [])


def test_a_ddp_that_cannot_be_set_up_anew_is_rejected_before_anything_changes(found: Found) -> None:
    messages = found[1][0]["rejected"]
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


def test_hooks_of_an_unknown_wrapper_on_fp32_parameters_are_rejected(found: Found) -> None:
    messages = found[1][0]["held_by_something"]
    assert "gradient of param_groups[0]['params'][0]: a wrapper that reduces gradients in hooks" in messages[0]
    assert "gradient of model parameter '0.weight'" in messages[1]
    assert "or delete that loss (del loss)" in messages[1]


LIBRARIES = {"accelerate": "accelerate", "fabric": "lightning"}


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found of the libraries that are installed."""
    calls = {name: (prepared.every_form, name) for name, needs in LIBRARIES.items() if find_spec(needs)}
    return run_world(2, tmp_path_factory.mktemp("world"), in_turn, calls)


@pytest.mark.parametrize("library", LIBRARIES)
def test_after_a_library_has_wrapped_gradients_are_reduced_in_every_form(
    library: str, wrapped: list[dict[str, Any]]
) -> None:
    pytest.importorskip(LIBRARIES[library])
    (first, said), (second, _) = (own[library] for own in wrapped)
    for form in first.keys() - {"by hand"}:
        assert (form, different(first[form], second[form])) == (form, [])
        assert (form, different(first[form], first["by hand"])) == (form, [])
    assert said.endswith("or compile the one inside: collage_neuron.compile(model, optimizer.optimizer)")


# --- ZeRO-1 -----------------------------------------------------------------------------------------------------------


def advice_on_zero() -> list[str]:
    """The messages for torch's ZeroRedundancyOptimizer, by model, alone, as a class, with a compiled class inside."""
    model = torch.nn.Linear(3, 2)
    plain, right = (ZeroRedundancyOptimizer(model.parameters(), c) for c in (AdamW, collage_neuron.compile(AdamW)))
    targets: list[Any] = [(model, plain), (plain,), (ZeroRedundancyOptimizer,), (model, right)]
    messages = []
    for target in targets:
        with pytest.raises(UnsupportedUpdate) as error:
            collage_neuron.compile(*target)
        messages.append(str(error.value))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return messages


def test_zero_around_an_optimizer_is_rejected_with_advice_that_it_can_follow(tmp_path: Path) -> None:
    (messages,) = run_world(1, tmp_path, advice_on_zero)
    for message in messages:
        assert "give it a compiled class, optimizer_class=collage_neuron.compile(AdamW), and a model that is" in message
        assert message.endswith("If it was given one, nothing else needs the line")


def test_zero_of_torch_xla_is_rejected_with_advice_that_it_can_follow(xla: torch.device) -> None:
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    model = torch.nn.Linear(3, 2).to(xla)
    targets: list[Any] = [(model, ZeroRedundancyOptimizer(model.parameters(), AdamW)), (ZeroRedundancyOptimizer,)]
    for target in targets:
        with pytest.raises(UnsupportedUpdate, match=r"\(AdamW\), optimizer_dtype=torch.bfloat16, and a model"):
            collage_neuron.compile(*target)


# --- FSDP1 and torch_xla's FSDP ---------------------------------------------------------------------------------------


def test_fsdp1_of_fp32_parameters_is_rejected_in_every_form(found: Found) -> None:
    for own in found[2]:
        assert len(own["fsdp1_of_fp32"]) == 10
        for message in own["fsdp1_of_fp32"]:
            assert "is float32 and held by FullyShardedDataParallel, which would go on with the float32 copy" in message
            assert "shard it by fully_shard" in message


@pytest.mark.parametrize("use_orig_params", BOTH)
def test_fsdp1_of_bf16_parameters_ends_where_one_process_ends(use_orig_params: bool, found: Found) -> None:
    assert [own[f"fsdp1_of_bf16, {use_orig_params}"] for own in found[2]] == [[True] * 4] * 2


@pytest.mark.parametrize("use_orig_params", BOTH)
def test_fsdp1_of_a_class_that_is_traced(use_orig_params: bool, found: Found) -> None:
    """An elementwise step ends where one process ends; sums, values that are read and drawn numbers are rejected."""
    for own in found[2]:
        ends, (sums, read, drawn, later) = own[f"fsdp1_of_others, {use_orig_params}"]
        assert ends == [True] * 4
        assert "adds up elements" in sums
        assert "adds up elements" in later
        assert "reads a value" in read
        assert "cannot wait" in drawn
        for said in (sums, read, drawn, later):
            assert "this process has a part only" in said


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


def test_fsdp1_after_the_line_is_rejected_by_the_first_step(found: Found) -> None:
    message = found[2][0]["fsdp1_after_the_line"]
    assert "has another shape than its state 'param_lo', [5, 6]: it was exchanged, or cut" in message


@pytest.mark.parametrize("use_orig_params", BOTH)
def test_fsdp1_of_a_model_that_was_compiled_alone_trains(use_orig_params: bool, found: Found) -> None:
    assert [own[f"fsdp1_after_the_model_alone, {use_orig_params}"] for own in found[2]] == [True] * 2


# --- parameters that are converted or exchanged after the line --------------------------------------------------------


def step(model: torch.nn.Module, optimizer: Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def compiled(strategy: str) -> tuple[torch.nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    return collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-3), strategy=strategy)


@pytest.mark.filterwarnings("ignore:the memory of a parameter")  # it is exchanged, and back
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("steps", [0, 4])
def test_a_model_that_is_converted_back_to_fp32_is_rejected_by_the_step(strategy: str, steps: int) -> None:
    model, optimizer = compiled(strategy)
    for _ in range(steps):
        step(model, optimizer)
    optimizer = copy.deepcopy(optimizer)  # which knows it too
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        p.data, p.grad = p.data.float(), torch.ones_like(p.float())
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match="is float32 now and was bfloat16 before"):
        optimizer.step()
    assert differences(snapshot(optimizer), before) == []
    for p in params:
        p.data, p.grad = p.data.bfloat16(), torch.ones_like(p.bfloat16())
    optimizer.step()
    assert {p.dtype for p in params} == {torch.bfloat16}


def test_a_model_that_is_converted_back_to_fp32_may_be_compiled_again() -> None:
    model, optimizer = compiled("full")
    step(model, optimizer)
    exact = [collage_neuron.exact_value(optimizer, p) for p in model.parameters()]
    model.float()
    collage_neuron.compile(model, optimizer, strategy="full")
    assert all(
        torch.equal(collage_neuron.exact_value(optimizer, p), x) for p, x in zip(model.parameters(), exact, strict=True)
    )
    step(model, optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parameters_may_be_exchanged_before_the_first_step_by_others_of_bf16(dtype: torch.dtype) -> None:
    """As `load_state_dict(assign=True)` and moves to an XLA device do, where the groups are given the new ones."""
    model, optimizer = compiled("full")
    model.load_state_dict({k: v.to(dtype) for k, v in model.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    if dtype == torch.bfloat16:
        step(model, optimizer)
        return
    with pytest.raises(TypeError, match="is float32 now and was bfloat16 before"):
        step(model, optimizer)


# --- nonfinite="skip": one decision for all processes that share parameters -------------------------------------------


@pytest.mark.parametrize(
    ("size", "kind"), [(2, kind) for kind in skipped.KINDS] + [(4, "hsdp"), (4, "tensor_parallel")]
)
def test_a_nan_in_one_process_makes_all_skip_and_count(kind: str, size: int, found: Found) -> None:
    assert [own[kind] for own in found[size]] == [[]] * size


def test_skip_is_rejected_for_parameters_that_a_library_has_split_its_own_way(found: Found) -> None:
    message = found[1][0]["of_an_unknown_library"]
    assert "split by tensor parallelism (p.tensor_model_parallel), over processes that only its library" in message
