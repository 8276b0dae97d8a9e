"""Capture: the optimizer's own step becomes a functional graph whose numbers are slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from as_written import Written
from planned import capture
from torch.optim import SGD, AdamW, Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.ir.update import Recording
from collage_neuron.states.visible_states import ParamShaped

pytestmark = pytest.mark.usefixtures("rejecting")

CASES: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda ps: AdamW(ps, lr=1e-2, weight_decay=0.1),
    "adamw_amsgrad_maximize": lambda ps: AdamW(ps, lr=1e-2, weight_decay=0.1, amsgrad=True, maximize=True),
    "adamw_lr_tensor": lambda ps: AdamW(ps, lr=torch.tensor(1e-2), weight_decay=0.1),
    "adamw_foreach": lambda ps: AdamW(ps, lr=1e-2, foreach=True),
    "sgd": lambda ps: SGD(ps, lr=1e-2),
    "sgd_momentum": lambda ps: SGD(ps, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "sgd_nesterov": lambda ps: SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
}


def record(optimizer: Optimizer, state: dict[str, Any] | None = None) -> Recording:
    group = optimizer.param_groups[0]
    return capture(type(optimizer), optimizer, group, group["params"][0], state or {})


def next_state(recording: Recording, p: torch.Tensor) -> dict[str, Any]:
    return recording.scalars | {name: ParamShaped(p) for name in recording.captured.states}


def parameter(*shape: int) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64))
    p.grad = torch.randn_like(p)
    return p


@pytest.mark.parametrize("name", CASES)
def test_the_captured_graph_replays_the_optimizer(name: str) -> None:
    """In float64, over steps whose learning rate changes, against the optimizer itself."""
    p = parameter(3, 4)
    twin = torch.nn.Parameter(p.detach().clone())
    real, shadowed = CASES[name]([p]), CASES[name]([twin])
    state: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for i in range(6):
        for optimizer in (real, shadowed):
            set_lr(optimizer, 1e-2 * (i + 1))
        p.grad = torch.randn_like(p)
        recording = record(shadowed, state)
        captured = recording.captured
        tensors |= {k: torch.full_like(p, v).detach() for k, v in captured.fresh.items() if k not in tensors}
        slots = {f"s{j}": v for j, v in enumerate(recording.slots)}
        tensors = replay(captured.graph, {"param": twin.detach(), "grad": p.grad, **tensors, **slots})
        twin.data = tensors.pop("param")
        state = next_state(recording, twin)
        real.step()
        torch.testing.assert_close(twin.detach(), p.detach(), rtol=1e-6, atol=0)  # lr as fp32 tensor: 2**-24


def set_lr(optimizer: Optimizer, lr: float) -> None:
    group = optimizer.param_groups[0]
    group["lr"] = torch.tensor(lr) if isinstance(group["lr"], torch.Tensor) else lr


def replay(graph: fx.Graph, values: dict[str, Any]) -> dict[str, torch.Tensor]:
    names = [n.target for n in graph.nodes if n.op == "placeholder"]
    result: dict[str, torch.Tensor] = fx.GraphModule(torch.nn.Module(), graph)(*(values[n] for n in names))
    return result


def test_the_first_adamw_step_and_all_others_are_one_graph() -> None:
    p = parameter(3)
    optimizer = CASES["adamw"]([p])
    first = record(optimizer)
    second = record(optimizer, next_state(first, p))
    assert first.captured.text == second.captured.text
    assert first.captured.fresh == {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    assert second.scalars["step"] == 2


def test_numbers_are_slots_so_no_setting_changes_the_graph() -> None:
    p = parameter(3)
    graphs = {record(AdamW([p], lr=lr, betas=(b, 0.99), eps=e)).captured.text for lr, b, e in
              [(0.0, 0.9, 1e-8), (1.0, 0.9, 1e-6), (0.1, 0.1, 0.1)]}  # fmt: skip
    assert len(graphs) == 1


def test_slots_are_doubles() -> None:
    slots = record(AdamW([parameter(3)], lr=1e-3, weight_decay=0.1)).slots
    assert slots[0] == 1 - 1e-3 * 0.1
    assert slots[3] == 1 - 0.999


def test_recording_leaves_the_optimizer_alone() -> None:
    p = parameter(3)
    optimizer = CASES["adamw"]([p])
    before = p.detach().clone()
    record(optimizer)
    assert torch.equal(p.detach(), before)
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == [p]


class Normed(Written):
    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g / g.norm(p=4, dim=0))


def test_a_norm_of_another_order_of_columns_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedUpdate, match=r"not elementwise: aten.linalg_vector_norm.*leave it uncompiled"):
        record(Normed([parameter(3, 4)]))
