"""Saving and loading: an interrupted run is the uninterrupted one, bit for bit, also in a new process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints_of_both import adamw, are_alike_after, in_ours, in_torch
from models import MODES, REPRESENTATIVE, differences, mlp, parameters, run_script, set_gradients, snapshot, train
from sampling import part
from torch import nn
from torch.optim import SGD, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils._pytree import tree_map_only

import collage_neuron
from collage_neuron import STRATEGIES, exact_value

HALF, WHOLE = 3, 6


MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": adamw,
    "momentum": lambda model: SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "nadam": lambda model: NAdam(model.parameters(), lr=1e-2),  # has a second number beside `step`, an fp32 tensor
}


FORM: dict[str, Callable[..., Any]] = {
    "(model, optimizer)": collage_neuron.compile,
    "(model)": lambda model, optimizer, **settings: collage_neuron.compile(model, **settings),
}


def start(case: dict[str, Any], seed: int) -> tuple[nn.Module, Optimizer, Any]:
    """What a script sets up, from an fp32 model with weights that depend on `seed`."""
    warnings.filterwarnings("ignore", ".* cannot (decrease|hold a decay)")  # a new process makes warnings errors
    model = mlp(seed)
    optimizer = MAKE[case["make"]](model)
    FORM[case["form"]](model, optimizer, **case["settings"])
    return model, optimizer, CosineAnnealingLR(optimizer, 10)


def go_on(model: nn.Module, optimizer: Optimizer, scheduler: Any, steps: range) -> None:
    for i in steps:
        train(model, optimizer, [i])
        scheduler.step()


def case_of(name: str, make: str = "adamw", form: str = "(model, optimizer)") -> dict[str, Any]:
    strategy, arithmetic = name.split()
    return {"make": make, "form": form, "settings": {"strategy": strategy, "arithmetic": arithmetic}}


CASES = {f"{s} {a}": case_of(f"{s} {a}") for s, a in MODES if s in REPRESENTATIVE}
CASES |= {f"momentum {s} fp32": case_of(f"{s} fp32", "momentum") for s in part(REPRESENTATIVE, 6)}
CASES |= {f"nadam {s} fp32": case_of(f"{s} fp32", "nadam") for s in ("plus", "fp32")}
CASES |= {f"model alone, {s} fp32": case_of(f"{s} fp32", form="(model)") for s in part(STRATEGIES, 8)}


def host(x: Any) -> Any:
    """The same with every tensor copied to the CPU."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), x)


def interrupted(case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what is saved half way, the snapshot at the end of the uninterrupted run)."""
    model, optimizer, scheduler = start(case, seed=0)
    go_on(model, optimizer, scheduler, range(HALF))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    saved = host({name: x.state_dict() for name, x in parts.items()})
    go_on(model, optimizer, scheduler, range(HALF, WHOLE))
    return case | saved, snapshot(optimizer)


def resumed(saved: dict[str, Any]) -> dict[str, Any]:
    """The snapshot at the end of a run that starts from what was saved, over other weights."""
    model, optimizer, scheduler = start(saved, seed=1)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    go_on(model, optimizer, scheduler, range(HALF, WHOLE))
    return snapshot(optimizer)


SCRIPT = """
import sys, torch
sys.path.append(sys.argv[3])
import test_resume
saved = torch.load(sys.argv[1])  # weights_only: nothing but tensors, numbers and names
torch.save({name: test_resume.resumed(case) for name, case in saved.items()}, sys.argv[2])
"""

Runs = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """(uninterrupted, interrupted and gone on with in a new process) of every case: one process for them all."""
    done, folder = {name: interrupted(case) for name, case in CASES.items()}, tmp_path_factory.mktemp("resume")
    torch.save({name: saved for name, (saved, _) in done.items()}, folder / "saved.pt")
    run_script(folder, SCRIPT, folder / "saved.pt", folder / "resumed.pt", Path(__file__).parent)
    found = torch.load(folder / "resumed.pt")
    return {name: (end, found[name]) for name, (_, end) in done.items()}


def steps_on_xla(p: nn.Parameter, optimizer: Optimizer, steps: range) -> None:
    import torch_xla

    for i in steps:
        set_gradients([p], i)
        optimizer.step()
        torch_xla.sync()


@pytest.mark.sampled(of=5, each=False)  # XLA has the words of each in backends/test_xla_compilers.py
@pytest.mark.parametrize(("strategy", "arithmetic"), MODES)
def test_every_strategy_goes_on_on_xla_bit_for_bit(xla: torch.device, strategy: str, arithmetic: str) -> None:
    """One parameter, whose weights and states go through the CPU, as a checkpoint does."""

    def made(seed: int) -> tuple[nn.Parameter, Optimizer]:
        (start,) = parameters(seed, ((16, 8),))
        p = nn.Parameter(start.detach().to(xla))
        optimizer = AdamW([p], lr=1e-3, weight_decay=0.1)
        return p, collage_neuron.compile(optimizer, strategy=strategy, arithmetic=arithmetic)

    p, optimizer = made(0)
    steps_on_xla(p, optimizer, range(HALF))
    saved, weights = host(optimizer.state_dict()), host(p)
    steps_on_xla(p, optimizer, range(HALF, WHOLE))
    q, other = made(1)
    with torch.no_grad():
        q.copy_(weights)
    other.load_state_dict(saved)
    steps_on_xla(q, other, range(HALF, WHOLE))
    assert differences(snapshot(other), snapshot(optimizer)) == []


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_in_a_new_process_bit_for_bit(runs: Runs, name: str) -> None:
    whole, resumed_one = runs[name]
    assert differences(whole, resumed_one) == []
    assert any("param" in key for key in whole)


# --- state_dict and load_state_dict -----------------------------------------------------------------------------------


def test_a_checkpoint_of_ours_brings_its_strategy_and_says_so() -> None:
    source, optimizer = in_ours("full")
    model, other = in_ours("plus", steps=0)
    model.load_state_dict(source.state_dict())
    with pytest.warns(UserWarning, match=r"compiled for strategy 'plus'.* goes on with .* 'full'.* To switch: collage"):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["collage_strategy"] == "full"
    are_alike_after((source, optimizer), (model, other), range(HALF, HALF + 1))


# --- from a plain torch run -----------------------------------------------------------------------------------------


def test_a_plain_torch_checkpoint_leaves_the_low_words_of_weights_that_were_compiled_from_fp32() -> None:
    weights, trained = in_torch()
    saved = trained.state_dict()
    exact = [p.detach().clone() for p in weights.parameters()]
    optimizer = adamw(weights)
    collage_neuron.compile(weights, optimizer)
    optimizer.load_state_dict(saved)
    for p, x in zip(weights.parameters(), exact, strict=True):
        torch.testing.assert_close(exact_value(optimizer, p), x, rtol=2**-17, atol=0)


@pytest.mark.parametrize("strategy", ["plus", "split433", "split422", "bf16"])
def test_what_was_loaded_can_be_loaded_again(strategy: str) -> None:
    """Training writes to nothing of the caller's: a run may go back to its best state twice."""
    model, optimizer = in_ours(strategy)
    weights, states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    runs = []
    for _ in range(2):
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        train(model, optimizer, range(3, 6))
        runs.append(snapshot(optimizer))
    assert differences(*runs) == []
