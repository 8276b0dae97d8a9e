"""torch.distributed.checkpoint in one process: its hidden first step leaves every bit alone, and runs go on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import differences, gpt, mlp, snapshot, train
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import collage_neuron
from collage_neuron import STRATEGIES, exact_value
from collage_neuron.numerics.strategies import DEFAULT

Run = tuple[nn.Module, Optimizer]

OPTIONS = {"nested": StateDictOptions(), "flat": StateDictOptions(flatten_optimizer_state_dict=True)}


def start(strategy: str, seed: int, dtype: torch.dtype = torch.float32) -> Run:
    model = mlp(seed).to(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return collage_neuron.compile(model, optimizer, strategy=strategy)


def save(run: Run, folder: Path, options: StateDictOptions) -> None:
    model, optimizer = get_state_dict(*run, options=options)
    state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def trained(run: Run, folder: Path, options: StateDictOptions = OPTIONS["nested"]) -> Run:
    """The run after three steps, saved in the folder."""
    train(*run, range(3))
    run[1].zero_grad()
    save(run, folder, options)
    return run


def load(run: Run, folder: Path, options: StateDictOptions, planner: DefaultLoadPlanner | None = None) -> None:
    model, optimizer = get_state_dict(*run, options=options)
    state_dict_loader.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder, planner=planner)
    set_state_dict(*run, model_state_dict=model, optim_state_dict=optimizer, options=options)


def go_on(run: Run, steps: range) -> dict[str, Any]:
    train(*run, steps)
    return snapshot(run[1])


@pytest.mark.sampled(of=6)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 model", "bf16 model"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_goes_on_bit_for_bit(strategy: str, dtype: torch.dtype, options: str, tmp_path: Path) -> None:
    run = trained(start(strategy, 0, dtype), tmp_path, OPTIONS[options])
    whole = go_on(run, range(3, 6))
    other = start(strategy, 1, dtype)
    load(other, tmp_path, OPTIONS[options])
    assert differences(go_on(other, range(3, 6)), whole) == []


@pytest.mark.parametrize(("kind", "strategy"), [(AdamW, DEFAULT), (SGD, DEFAULT), (Adagrad, "split422")])
def test_tied_weights_and_optimizers_without_states_or_all_go_on(kind: Any, strategy: str, tmp_path: Path) -> None:
    runs: list[Run] = []
    for seed in (0, 1):
        model: nn.Module = gpt(seed)
        optimizer: Optimizer = kind(model.parameters(), lr=1e-2)
        runs.append(collage_neuron.compile(model, optimizer, strategy=strategy))
    trained(runs[0], tmp_path)
    load(runs[1], tmp_path, StateDictOptions())
    assert differences(go_on(runs[1], range(3, 5)), go_on(runs[0], range(3, 5))) == []


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2345678))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


@pytest.mark.parametrize("strategy", ["plus", DEFAULT])
def test_a_parameter_without_dimensions_goes_on(strategy: str, tmp_path: Path) -> None:
    """Adagrad has its states before the first step, so torch takes no hidden one."""
    runs: list[Run] = []
    for seed in (0, 1):
        model = mlp(seed).append(Scaled())
        runs.append(collage_neuron.compile(model, Adagrad(model.parameters(), lr=1e-2), strategy=strategy))
    trained(runs[0], tmp_path)
    load(runs[1], tmp_path, StateDictOptions())
    assert differences(go_on(runs[1], range(3, 5)), go_on(runs[0], range(3, 5))) == []


@pytest.mark.parametrize("options", OPTIONS)
def test_low_words_of_a_frozen_layer_go_on(options: str, tmp_path: Path) -> None:
    """torch reads into them, and gives the optimizer no states of parameters that need no gradient."""
    runs: list[tuple[Any, Optimizer]] = [start(DEFAULT, seed) for seed in (0, 1)]
    for model, _ in runs:
        model[0].requires_grad_(False)
    trained(runs[0], tmp_path, OPTIONS[options])
    load(runs[1], tmp_path, OPTIONS[options])
    one, other = ([exact_value(optimizer, p) for p in model[0].parameters()] for model, optimizer in runs)
    assert all(map(torch.equal, one, other))


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_hidden_first_step_makes_all_states_and_changes_no_bit_of_a_parameter(strategy: str) -> None:
    """Weight decay is on. The sign of a zero is the one thing a pair does not hold."""
    run = start(strategy, 0)
    before = {k: v for k, v in snapshot(run[1]).items() if "param" in k}
    _, optimizer = get_state_dict(*run)
    after = {k: v for k, v in snapshot(run[1]).items() if "param" in k}
    assert differences(after, before) == []
    assert all({"step", "exp_avg", "exp_avg_sq"} <= state.keys() for state in optimizer["state"].values())  # type: ignore[union-attr]
    assert not any(p.grad is not None for p in run[0].parameters())


@pytest.mark.filterwarnings("ignore:.*goes on with those of the checkpoint")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("partial", [False, True], ids=["all keys", "partial"])
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize(("old", "new"), [("plus", "split433"), ("split433", "plus")])
def test_low_words_that_went_through_a_template_of_another_type_are_refused(
    old: str, new: str, kind: Any, partial: bool, options: str, tmp_path: Path
) -> None:
    """A run under the old default, read by a script that names no strategy, and the other way round."""

    def made(seed: int, strategy: str) -> Run:
        model = mlp(seed)
        return collage_neuron.compile(model, kind(model.parameters(), lr=1e-2), strategy=strategy)

    trained(made(0, old), tmp_path, OPTIONS[options])
    other = made(1, new)
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    with pytest.raises((ValueError, CheckpointException), match=r"_lo|collage_formats"):
        load(other, tmp_path, OPTIONS[options], planner)
