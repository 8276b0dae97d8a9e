"""On XLA a step is compiled once, whatever its numbers are, in place, on the device, and never taken for another.

Each case has parameter shapes of its own: the compilation cache is the process's, and a case that found its graph in
it would count nothing. What validation compiles (one small graph an update, the same in all cases) is counted apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import foreign
import pytest
import torch
from as_written import Written
from planned import plan_update

import collage_neuron
from collage_neuron import TranslationError
from collage_neuron.numerics.eft import round_to
from collage_neuron.passes import pipeline
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.backends.registry import get
from collage_neuron.passes.backends.xla.backend import Xla
from collage_neuron.passes.rewrite.rules import RULES
from collage_neuron.runtime.rounding_probe import require_sound
from collage_neuron.states.inner_optimizers import base_of
from collage_neuron.validation import validate

torch_xla = pytest.importorskip("torch_xla")
met = pytest.importorskip("torch_xla.debug.metrics")

pytestmark = pytest.mark.validated

# 0 and 1 are the values torch_xla would make constants of; 0.1 and 0.9 equal the weight decay and the betas (or
# momentum) below, which torch_xla would send only once; some repeat, one is an integer, as LambdaLR may yield.
SCHEDULE = [0.0, 0.5, 1.0, 1e-3, 1e-3, 0.1, 0.9, 1, 0, 0.0]
SHAPES = ((5, 3), (7,), (2, 3, 2))

_taken = iter(range(11, 10_000))


validations: list[tuple[int, int]] = []
"""For each validation of a case how many graphs had been compiled before it, and after it."""


@pytest.fixture(autouse=True)
def _counters_at_zero(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    require_sound(get("xla"), xla, "split433")  # compiles its own graphs, once a process
    torch_xla.sync(wait=True)  # what other tests left undone is not ours to count
    met.clear_all()
    validations.clear()
    check = validate.check

    def counted(*arguments: Any) -> None:
        before = all_compilations()
        check(*arguments)
        validations.append((before, all_compilations()))

    monkeypatch.setattr(validate, "check", counted)
    yield
    torch_xla.sync(wait=True)


def fresh_parameters(device: torch.device, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.nn.Parameter]:
    """bf16 parameters on the device; their last dimension is one that no other case of this process has had."""
    unique = next(_taken)
    torch.manual_seed(unique)
    return [torch.nn.Parameter(torch.randn(*s[:-1], s[-1] + unique).bfloat16().to(device)) for s in shapes]


def one_step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape).bfloat16().to(p.device)
    optimizer.step()
    torch_xla.sync(wait=True)


def run_schedule(optimizer: torch.optim.Optimizer, schedule: Sequence[float] = SCHEDULE) -> None:
    for lr in schedule:
        for group in optimizer.param_groups:
            group["lr"] = lr
        one_step(optimizer)


def all_compilations() -> int:
    data = met.metric_data("CompileTime")
    assert data is None or data[0] == met.counter_value("UncachedCompile")
    return 0 if data is None else int(data[0])


def compilations() -> int:
    return all_compilations() - sum(after - before for before, after in validations)


def donated() -> list[int]:
    """Buffers donated, one number for each compiled graph."""
    data = met.metric_data("InputOutputAliasCount")
    found = [] if data is None else [int(value) for _, value in data[2]]
    own = {i for before, after in validations for i in range(before, after)}
    return [n for i, n in enumerate(found) if i not in own]


def adamw(params: list[torch.nn.Parameter], options: Any = (), **settings: Any) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.9), weight_decay=0.1, **dict(options))
    collage_neuron.compile(optimizer, **settings)
    return optimizer


def transfers() -> int:
    data = met.metric_data("TransferFromDeviceTime")
    return 0 if data is None else int(data[0])


@pytest.mark.parametrize("make", [foreign.Lion])
def test_a_traced_step_is_compiled_once_and_waits_for_no_value(xla: torch.device, make: Any) -> None:
    """Validation looks at results in steps 1, 2, 4 and 8."""
    optimizer = collage_neuron.compile(make(fresh_parameters(xla), lr=1e-3), strategy="plus")
    run_schedule(optimizer, SCHEDULE[:4])
    before = transfers()
    run_schedule(optimizer, SCHEDULE[4:7])
    assert transfers() == before
    assert compilations() == 1


def stored_components(optimizer: torch.optim.Optimizer) -> int:
    """Tensors of the parameters' shape that training keeps: the parameters themselves and everything of their state."""
    return sum(
        1 + sum(isinstance(x, torch.Tensor) and x.shape == p.shape for x in optimizer.state[p].values())
        for group in optimizer.param_groups
        for p in group["params"]
    )


COMPONENTS = {"bf16": 3, "light": 4, "plus": 5, "full": 6, "fp32": 4, "fp32_states": 3}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    **{strategy: ({}, {"strategy": strategy}, count) for strategy, count in COMPONENTS.items()},
    "plus in bf16": ({}, {"strategy": "plus", "arithmetic": "bf16"}, 5),
    "amsgrad in bf16": ({"amsgrad": True}, {"arithmetic": "bf16"}, 6),
}
"""Options of AdamW, settings, and tensors that are stored for a parameter."""


@pytest.mark.sampled(of=3, each=False)  # XLA asks how many there are, and not of which strategy
@pytest.mark.parametrize("case", CASES)
def test_adamw_compiles_once_through_a_schedule_and_donates_every_component(xla: torch.device, case: str) -> None:
    """So a step needs no memory for new states: XLA writes each over its old value."""
    options, settings, components = CASES[case]
    optimizer = adamw(fresh_parameters(xla), options, **settings)
    run_schedule(optimizer)
    assert compilations() == 1
    assert donated() == [stored_components(optimizer)] == [components * len(SHAPES)]


def test_groups_with_equal_and_other_numbers_and_a_rate_that_is_a_tensor_compile_once(xla: torch.device) -> None:
    first, second, third = fresh_parameters(xla)
    rate = torch.tensor(1e-3)
    groups: list[dict[str, Any]] = [{"params": [first, second]}, {"params": [third], "weight_decay": 0.1, "lr": rate}]
    optimizer = collage_neuron.compile(torch.optim.AdamW(groups, weight_decay=0.1))
    for a, b in zip(SCHEDULE, reversed(SCHEDULE), strict=True):
        optimizer.param_groups[0]["lr"] = a
        rate.fill_(b)
        one_step(optimizer)
    assert compilations() == 1


def test_a_training_loop_compiles_nothing_after_its_second_step(xla: torch.device) -> None:
    """Forward, backward and update are one graph; the first step's differs, as with torch's own AdamW on torch_xla.

    States that are moved to the device while a graph is traced change how the backward's views of weights are traced.
    """
    width = next(_taken)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.GELU(), torch.nn.Linear(width, 1)).to(xla)
    model, optimizer = collage_neuron.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    torch_xla.sync(wait=True)
    met.clear_all()
    counts = []
    for lr in [3e-4, 1e-3, 0.0, 1, 0.5]:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        model(torch.randn(16, 8).bfloat16().to(xla)).float().pow(2).mean().backward()
        optimizer.step()
        torch_xla.sync(wait=True)
        counts.append(compilations())
    assert counts[0] == 1
    assert counts[1] <= 2
    assert counts[-1] == counts[1]


def step_hlo(optimizer: torch.optim.Optimizer) -> str:
    """The HLO of one step that has been traced and not run, as text."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros(p.shape, dtype=torch.bfloat16, device="cpu").to(p.device)
    torch_xla.sync(wait=True)
    optimizer.step()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [x for p in params for x in (p, *optimizer.state[p].values()) if x.device.type == "xla"]
    text: str = torch_xla._XLAC._get_xla_tensors_hlo(tensors)
    return text


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
def test_a_step_runs_on_the_device_and_keeps_every_rounding(xla: torch.device, arithmetic: str) -> None:
    optimizer = adamw(fresh_parameters(xla), strategy="full", arithmetic=arithmetic)
    run_schedule(optimizer, SCHEDULE[:2])
    text = step_hlo(optimizer)
    group = optimizer.param_groups[0]
    update = plan_update(base_of(type(optimizer)), optimizer, group, group["params"][:1]).update
    per_parameter = sum(n.target is round_to for n in update.graph.graph.nodes)
    assert per_parameter >= 6  # full stores three pairs
    # torch_xla may write one parameter's computation once for every call of it: all shapes differ here.
    assert len(re.findall(r"reduce-precision\(", text)) == per_parameter * len(SHAPES)
    assert "custom-call" not in text
    assert [name for name in met.counter_names() if name.startswith("aten::")] == []


class ProductThenSum(Written):
    """param <- param * grad + grad."""

    def left(self, p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return g

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.copy_(p * self.left(p, g) + g)


class SquareThenSum(ProductThenSum):
    """param <- param * param + grad: the same operations, wired otherwise."""

    def left(self, p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return p


def results_of_both(device: torch.device, size: int, validated: str = "on") -> list[torch.Tensor]:
    """What the two make of small integers, on which every operation is exact in bf16, whoever contracts it."""
    torch.manual_seed(0)
    value, grad = (torch.randint(-8, 9, (size,)).bfloat16() for _ in range(2))
    found = []
    for cls in (ProductThenSum, SquareThenSum):
        p = torch.nn.Parameter(value.to(device, copy=True))
        p.grad = grad.to(device)
        collage_neuron.compile(cls([p]), strategy="bf16", validate=validated).step()
        if device.type == "xla":
            torch_xla.sync(wait=True)
        found.append(p.detach().cpu())
    return found


def test_updates_of_equal_operations_and_other_wiring_are_not_taken_for_one_another(xla: torch.device) -> None:
    """pytorch/xla issue 8353: torch_xla hashes operations without their wiring; a user computation is hashed whole."""
    size = next(_taken)
    product, square = results_of_both(torch.device("cpu"), size)
    assert not torch.equal(product, square)
    found = results_of_both(xla, size)
    assert torch.equal(found[0], product)
    assert torch.equal(found[1], square)


def test_the_same_updates_as_lazy_operations_are_taken_for_one_another(
    xla: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the hazard is there in torch_xla 2.9, and the test above would see it."""
    size = next(_taken)
    product, square = results_of_both(torch.device("cpu"), size)
    monkeypatch.setattr(Xla, "lowered", lambda self, update: lambda *given: ReferenceUpdate(update)(*given[:2]))
    found = results_of_both(xla, size, validated="off")
    assert torch.equal(found[0], product)
    assert not torch.equal(found[1], square)
    with pytest.raises(TranslationError, match="of SquareThenSum was not taken"):
        results_of_both(xla, size)


def test_validation_runs_one_small_graph_alone(xla: torch.device) -> None:
    """What is pending stays pending: a step that waits for its gradients is validated without them."""
    optimizer = adamw(fresh_parameters(xla), strategy="full", arithmetic="bf16")
    torch_xla.sync(wait=True)
    params = optimizer.param_groups[0]["params"]
    for step in range(1, 9):
        for p in params:
            p.grad = p.detach() * 0.5
        optimizer.step()
        before, after = validations.pop() if validations else (0, 0)  # a step like an earlier one is not asked
        assert after - before <= (1 if step == 1 else 0)
        assert all(torch_xla._XLAC._check_tensor_need_materialization([p.grad for p in params]))
        torch_xla.sync(wait=True)
    assert validate.history_of(optimizer).compared > 0


def test_on_xla_too_a_wrong_rule_is_found(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_updates", {})
    monkeypatch.setitem(RULES, torch.ops.aten.addcdiv.default, RULES[torch.ops.aten.addcmul.default])
    with pytest.raises(TranslationError, match="of AdamW was not taken"):
        one_step(adamw(fresh_parameters(xla)))
