"""`collage_neuron.monitor`: what a user sees of it; tests/passes/test_instrument.py holds the numbers to float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import differences, gpt, mlp, snapshot, train
from monitored import sync, trained
from torch import nn

import collage_neuron
from collage_neuron import JsonLog, Measures, Monitor, Record
from collage_neuron.monitoring import monitor
from collage_neuron.monitoring.run_log import read_log
from collage_neuron.passes.backends import registry
from collage_neuron.passes.backends.protocol import Backend, Launch, Measure
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.validation import validate

STRATEGIES = ["bf16", "light", "plus", "full", "fp32_states", "fp32"]


def last(monitor: Monitor) -> Record:
    record = monitor.latest()
    assert record is not None
    return record


# What is measured ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "where"), [*((strategy, "cpu") for strategy in STRATEGIES), ("plus", "xla")])
def test_a_record_has_every_modules_effective_update(strategy: str, where: str, request: pytest.FixtureRequest) -> None:
    """Within fp32: a square rounds three times, and rows of fewer than 200 numbers are added in fp32."""
    device = request.getfixturevalue("xla") if where == "xla" else "cpu"
    model, optimizer, monitor = trained(strategy, device=device)
    before = {n: collage_neuron.exact_value(optimizer, p).cpu().double() for n, p in model.named_parameters()}
    train(model, optimizer, [9])
    sync(device)
    record, now = last(monitor), {n: collage_neuron.exact_value(optimizer, p) for n, p in model.named_parameters()}
    effects = {name: value.cpu().double() - before[name] for name, value in now.items()}
    for module in ("embedding", "norm", "qkv"):
        e = torch.cat([x.flatten() for name, x in effects.items() if name.rpartition(".")[0] == module])
        found = record.modules[module]
        assert found.elements == e.numel()
        assert found.pair.norm == pytest.approx(float(e.norm()), rel=400 * 2**-24)
        zero = round(found.zero / 100 * e.numel())
        assert round(found.pair.lost / 100 * (e.numel() - zero)) == int((e == 0).sum()) - zero
    assert record.total.elements == sum(e.numel() for e in effects.values())


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
def test_bf16_loses_much_of_the_update_and_pairs_nearly_nothing(arithmetic: str) -> None:
    total = {s: last(trained(s, arithmetic)[2]).total for s in ("bf16", "light", "plus", "full")}
    assert total["bf16"].pair == total["bf16"].high
    assert total["bf16"].pair.lost > 30
    assert total["bf16"].pair.ratio < 0.9
    for s in ("light", "plus", "full"):
        assert total[s].pair.ratio == pytest.approx(1, abs=2**-8)
        assert total[s].pair.lost < 2 < 20 < total[s].high.lost
    assert "param" in total["light"].low_norms
    assert set(total["full"].low_norms) == {"param", "exp_avg", "exp_avg_sq"}
    assert total["bf16"].low_norms == {}


def test_fp32_loses_nothing_and_its_high_word_what_bf16_would() -> None:
    total = last(trained("fp32")[2]).total
    assert total.pair.ratio == pytest.approx(1, abs=2**-16)
    assert total.pair.lost == 0
    assert total.high.lost > 20


def decaying(strategy: str, arithmetic: str, device: str | torch.device) -> Measures:
    """Second moments that have seen large gradients and now see none: each wants to become smaller by a thousandth."""
    p = nn.Parameter(torch.ones(4, 33, dtype=torch.bfloat16, device=device))
    optimizer = collage_neuron.compile(
        torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.999)), strategy=strategy, arithmetic=arithmetic
    )
    with collage_neuron.monitor(optimizer, every=2) as monitor:
        for scale in (1.0, 1e-4):
            p.grad = (torch.linspace(0.5, 1, 132).reshape(4, 33) * scale).bfloat16().to(device)
            optimizer.step()
            sync(device)
    return last(monitor).total


@pytest.mark.parametrize("where", ["cpu", "xla"])
@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
def test_at_beta2_of_999_every_decreasing_second_moment_stalls_in_bf16_and_none_in_a_pair(
    arithmetic: str, where: str, request: pytest.FixtureRequest
) -> None:
    device = request.getfixturevalue("xla") if where == "xla" else "cpu"
    for strategy, stalled in {"bf16": 100, "plus": 0, **({"light": 100, "full": 0} if where == "cpu" else {})}.items():
        found = decaying(strategy, arithmetic, device)
        assert found.falling == {"exp_avg_sq": 100}
        assert found.stalled == {"exp_avg_sq": stalled}
    if (arithmetic, where) == ("fp32", "cpu"):
        assert decaying("fp32_states", arithmetic, device).stalled == {"exp_avg_sq": 0}


def test_a_second_moment_that_stays_zero_is_not_falling() -> None:
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = collage_neuron.compile(torch.optim.AdamW([p]), strategy="plus")
    monitor = collage_neuron.monitor(optimizer)
    p.grad = torch.zeros_like(p)
    for _ in range(2):
        optimizer.step()
    assert last(monitor).total.falling == {"exp_avg_sq": 0}


@pytest.mark.parametrize("strategy", ["stochastic_states", "split422", "split311"])
def test_states_that_are_rounded_stochastically_do_not_count_as_stalled(strategy: str) -> None:
    assert decaying(strategy, "fp32", "cpu").stalled == {}
    assert decaying("split433", "fp32", "cpu").stalled == {"exp_avg_sq": 0}


def test_true_zero_updates_are_counted_apart_from_lost_ones() -> None:
    p = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    optimizer = collage_neuron.compile(torch.optim.SGD([p], lr=1.0), strategy="bf16")
    monitor = collage_neuron.monitor(optimizer)
    p.grad = torch.tensor([0.0] * 10 + [2.0**-12] * 60 + [0.5] * 30, dtype=torch.bfloat16)
    optimizer.step()
    total = last(monitor).total
    assert (total.zero, total.pair.lost) == (10, 100 * 60 / 90)
    assert total.raw_norm == pytest.approx(math.sqrt(60 * 2**-24 + 30 / 4))
    assert total.pair.norm == pytest.approx(math.sqrt(30 / 4))
    assert total.pair.edq == pytest.approx(30 / 4 / total.raw_norm)
    assert total.pair.ratio == pytest.approx(30 / 4 / total.raw_norm**2)


def test_a_skipped_step_has_no_record() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = collage_neuron.compile(torch.optim.AdamW([p]), nonfinite="skip")
    monitor = collage_neuron.monitor(optimizer)
    for i, gradient in enumerate((math.nan, 1.0, math.nan)):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
        assert (monitor.latest() is None) == (i == 0)
    assert collage_neuron.skipped_steps(optimizer) == 2
    assert (last(monitor).step, math.isfinite(last(monitor).total.raw_norm)) == (1, True)


# Records -------------------------------------------------------------------------------------------------------------


def test_numbers_are_there_for_groups_modules_parameters_and_whatever_is_under_a_name() -> None:
    model = mlp()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "lr": 1e-2}]
    model, optimizer = collage_neuron.compile(nn.Sequential(model), torch.optim.AdamW(groups, lr=1e-3))
    monitor = collage_neuron.monitor(optimizer, model)
    train(model, optimizer, [0])
    record = last(monitor)
    assert list(record.groups) == [0, 1]
    assert set(record.modules) == {"0.0", "0.2", "0.4"}
    assert record.parameters["0.2.bias"].group == 1
    assert record.under("0").elements == record.total.elements == sum(p.numel() for p in model.parameters())
    parts = [p.measures for p in record.parameters.values()]
    assert record.total.raw_norm == pytest.approx(math.hypot(*(m.raw_norm for m in parts)))
    assert record.total.sums["pair*raw"] == pytest.approx(sum(m.sums["pair*raw"] for m in parts))
    with pytest.raises(KeyError, match=r"no parameter of a module '0\.1' was updated in step 1"):
        record.under("0.1")


def test_names_are_the_models_or_the_optimizers_or_numbers() -> None:
    model = mlp().bfloat16()
    named = collage_neuron.compile(torch.optim.SGD(model.named_parameters(), lr=0.1))
    bare = collage_neuron.compile(torch.optim.SGD(model.parameters(), lr=0.1))
    found = {}
    for name, optimizer in {"named": named, "bare": bare}.items():
        monitor = collage_neuron.monitor(optimizer)
        train(model, optimizer, [0])
        found[name] = set(last(monitor).modules)
    assert found == {"named": {"0", "2", "4"}, "bare": {f"0.{i}" for i in range(6)}}
    outside = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = collage_neuron.compile(torch.optim.SGD([*model.parameters(), outside], lr=0.1))
    monitor = collage_neuron.monitor(optimizer, model)
    outside.grad = torch.ones_like(outside)
    optimizer.step()
    assert set(last(monitor).modules) == {"0", "2", "4", "0.6"}


def test_the_optimizer_of_a_model_that_was_compiled_alone_is_monitored_from_its_first_step(tmp_path: Path) -> None:
    model = collage_neuron.compile(gpt())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = collage_neuron.monitor(optimizer, to=JsonLog(tmp_path / "a.jsonl"))
    train(model, optimizer, [0, 1])
    assert [r.step for r in monitor.history] == [1, 2]
    assert set(last(monitor).modules) == {"embedding", "norm", "qkv"}
    monitor.close()
    assert read_log(tmp_path / "a.jsonl", "a").about["strategy"] == "split433"


# Training goes on as without -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
def test_a_monitored_run_keeps_the_same_bits(arithmetic: str) -> None:
    model, optimizer, monitor = trained("plus", arithmetic, every=2)
    monitor.close()
    train(model, optimizer, [3])
    other = gpt()
    other, plain = collage_neuron.compile(
        other, torch.optim.AdamW(other.parameters(), lr=1e-3), strategy="plus", arithmetic=arithmetic
    )
    train(other, plain, range(4))
    assert differences(snapshot(optimizer), snapshot(plain)) == []


def test_only_steps_that_are_due_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    kind = type(registry.choose("auto", torch.device("cpu")))
    run = kind.run

    def watched(self: Backend, launches: Sequence[Launch]) -> Sequence[Measure] | None:
        measured.append(any(launch.update.sums for launch in launches))
        return run(self, launches)

    monkeypatch.setattr(kind, "run", watched)
    monkeypatch.setattr(validate, "check", lambda *_: None)  # which runs steps of its own
    _, _, monitor = trained(steps=7, every=3)
    assert measured == [False, False, True, False, False, True, False]
    assert [r.step for r in monitor.history] == [3, 6]
    _, _, before = trained(steps=1, every=2)
    assert (before.latest(), before.history) == (None, [])


def test_on_xla_a_monitor_adds_one_program_and_leaves_the_other_as_it_was(xla: torch.device) -> None:
    import torch_xla
    import torch_xla.debug.metrics as met

    p = nn.Parameter(torch.ones(5, 41, dtype=torch.bfloat16, device="cpu").to(xla))
    p.grad = torch.ones(5, 41, dtype=torch.bfloat16).to(xla)
    # Without validation: of the update that measures itself too it runs a sample.
    optimizer = collage_neuron.compile(torch.optim.AdamW([p], lr=1e-3), validate="off")

    def compilations(steps: int) -> int:
        met.clear_all()
        for _ in range(steps):
            optimizer.step()
            torch_xla.sync(wait=True)
        return met.metric_data("CompileTime")[0] if met.metric_data("CompileTime") else 0

    assert compilations(2) >= 1
    assert compilations(2) == 0
    monitor = collage_neuron.monitor(optimizer, every=2)
    assert compilations(1) == 0
    assert compilations(7) == 1
    monitor.close()
    assert compilations(2) == 0
    assert [r.step for r in monitor.history] == [6, 8, 10, 12]


def test_it_outlives_a_checkpoint_a_scheduler_and_a_new_group() -> None:
    model, optimizer, monitor = trained(steps=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, [2])
    scheduler.step()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, [2])
    extra = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones_like(extra)
    train(model, optimizer, [3])
    assert [r.step for r in monitor.history] == [1, 2, 3, 3, 4]
    extra.grad = torch.ones_like(extra)
    optimizer.step()
    assert set(last(monitor).groups) == {0, 1}
    assert last(monitor).modules["1.0"].elements == 7


def test_closing_ends_it_and_makes_room_for_another() -> None:
    model, optimizer, monitor = trained()
    with pytest.raises(ValueError, match=r"AdamW is monitored already; close\(\) that monitor first"):
        collage_neuron.monitor(optimizer)
    monitor.close()
    train(model, optimizer, [4])
    assert len(monitor.history) == 3
    with collage_neuron.monitor(optimizer, model) as other:
        monitor.close()  # again, and not the other one's
        train(model, optimizer, [5])
    assert [r.step for r in other.history] == [5]
    assert bookkeeping(optimizer).watcher is None


@pytest.mark.parametrize("where", ["cpu", "xla"])
def test_a_backend_must_measure(where: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("xla") if where == "xla" else torch.device("cpu")
    other = registry.choose("auto", device).name
    optimizer = collage_neuron.compile(torch.optim.AdamW(mlp().to(device).parameters()))
    silent = registry.get("nki")
    monkeypatch.setattr(type(silent), "measures", False)
    monkeypatch.setattr(monitor, "choose", lambda choice, device: silent)
    with pytest.raises(
        ValueError, match=rf"param_groups\[0\] runs on backend 'nki', .*set group\['collage_backend'\] = '{other}'"
    ):
        collage_neuron.monitor(optimizer)
    assert bookkeeping(optimizer).watcher is None


def test_what_cannot_be_monitored_is_refused() -> None:
    optimizer = torch.optim.AdamW(mlp().parameters())
    with pytest.raises(TypeError, match=r"AdamW is not compiled, .*; call collage_neuron.compile\(optimizer\) first"):
        collage_neuron.monitor(optimizer)
    collage_neuron.compile(optimizer)
    wrong: list[tuple[str, Any, str]] = [("every", x, "a number of steps, 1 or more") for x in (0, -1, 2.5, "10", None)]
    wrong += [("keep", x, "a number of records, 0 or more, or None") for x in (-1, 1.5)]
    wrong += [("taken", -1, "a number of steps, 0 or more"), ("unread", 0, "a number of steps, 1 or more")]
    for name, value, said in wrong:
        with pytest.raises(ValueError, match=f"{name} is {value!r}; give {said}"):
            collage_neuron.monitor(optimizer, **{name: value})
    with pytest.raises(TypeError, match=r"Sequential is not an optimizer; write monitor\(optimizer, model\)"):
        collage_neuron.monitor(mlp(), optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the model is a str"):
        collage_neuron.monitor(optimizer, "mlp")  # type: ignore[arg-type]
    assert bookkeeping(optimizer).watcher is None


class HalfSteps(torch.optim.SGD):
    """Evaluates the gradient where a half step leads."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.01)
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.01)
        return loss


@pytest.mark.parametrize("make", [HalfSteps, partial(torch.optim.LBFGS, max_iter=3)])
def test_a_step_that_is_several_updates_is_not_measured(make: Any) -> None:
    params = [nn.Parameter(torch.ones(8))]
    optimizer = collage_neuron.compile(make(params, lr=0.01), verbose=False)
    measured = collage_neuron.monitor(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = params[0].float().square().sum()
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="is several updates: such steps are not measured"):
        optimizer.step(closure)
    optimizer.step(closure)
    assert measured.latest() is None


def test_parameters_of_equal_names_are_told_apart() -> None:
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    groups: list[Any] = [{"params": model.named_parameters()} for model in models]
    optimizer = collage_neuron.compile(torch.optim.SGD(groups, lr=0.01), verbose=False)
    measured = collage_neuron.monitor(optimizer)
    for model in models:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    optimizer.step()
    (record,) = measured.history
    assert list(record.parameters) == ["weight", "bias", "weight (1.0)", "bias (1.1)"]
    assert record.total.elements == 40
