"""Updates with sums on torch_xla's device: one program, without the host, with the bits of the reference on the CPU."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from items import Between
from pytorch_optimizer import Ranger
from rowed import Came, Factored
from staged import Decaying, Lamb, Lars, Novograd, StableAdamW
from torch.nn import Parameter
from torch.optim import Adafactor

import collage_neuron
from collage_neuron.errors import TranslationError
from collage_neuron.numerics.tensor_sums import norm_of
from collage_neuron.passes.backends.registry import get
from collage_neuron.passes.backends.xla import stages, sums
from collage_neuron.runtime import plan
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.validation import validate

torch_xla = pytest.importorskip("torch_xla")
met = pytest.importorskip("torch_xla.debug.metrics")

pytestmark = [
    pytest.mark.usefixtures("rejecting"),
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_optimizer"),
]

Shapes = tuple[tuple[int, ...], ...]


def both(xla: torch.device) -> tuple[tuple[Any, str], ...]:
    return (xla, "xla"), ("cpu", "reference")


def compiled(make: Any, shapes: Shapes, device: torch.device | str, **settings: Any) -> Any:
    g = torch.Generator().manual_seed(0)
    params = [Parameter((0.3 * torch.randn(shape, generator=g)).bfloat16().to(device)) for shape in shapes]
    return collage_neuron.compile(make(params), verbose=False, **{"validate": "off", **settings})


def run(optimizer: Any, steps: int, first: int = 0, special: float = 0.0) -> None:
    """Steps with the same gradients on each device; one element of each is `special`, unless that is 0."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number in range(first, first + steps):
        g = torch.Generator().manual_seed(1000 + number)
        for p in params:
            grad = (0.1 * torch.randn(p.shape, generator=g)).bfloat16()
            grad.reshape(-1)[:1] = special or grad.reshape(-1)[:1]
            p.grad = grad.to(p.device)
        optimizer.step()
        torch_xla.sync()


def bits(optimizer: Any) -> Any:
    """All bits but those of the sign and the payload of NaN."""
    params = [p.detach().cpu() for group in optimizer.param_groups for p in group["params"]]
    states = [
        {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        for state in optimizer.state_dict()["state"].values()
    ]
    return params, states


def differing(some: Any, others: Any) -> list[str]:
    """What is not the same in two optimizers."""
    (params, states), (other_params, other_states) = bits(some), bits(others)
    pairs = [(f"param {i}", x, y) for i, (x, y) in enumerate(zip(params, other_params, strict=True))]
    pairs += [
        (f"{name} {i}", x[name], y[name])
        for i, (x, y) in enumerate(zip(states, other_states, strict=True))
        for name in x | y
    ]
    return [
        name
        for name, x, y in pairs
        if not torch.equal(torch.as_tensor(x).nan_to_num(7), torch.as_tensor(y).nan_to_num(7))
    ]


CASES: dict[str, tuple[Any, str, Shapes]] = {
    "lamb": (Lamb, "full", ((33, 65), (1,), (0, 3))),
    "lars": (Lars, "stochastic", ((91, 91),)),
    "stable": (StableAdamW, "plus", ((8193,),)),
    "novograd": (Novograd, "split311", ((33, 300),)),
    "came": (Came, "full", ((33, 65),)),
    "factored": (Factored, "fp32", ((2, 66, 5),)),
    "ranger": (Ranger, "full", ((33, 65),)),
    "items": (Between, "plus", ((33, 65),)),
    "adafactor": (Adafactor, "full", ((33, 65), (17,))),
}


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_have_the_bits_of_the_reference(xla: torch.device, case: str) -> None:
    make, strategy, shapes = CASES[case]
    ours, theirs = (compiled(make, shapes, d, strategy=strategy, backend=b) for d, b in both(xla))
    for optimizer in (ours, theirs):
        run(optimizer, 10)
        assert not bookkeeping(optimizer).twin
    assert differing(ours, theirs) == []
    for optimizer in (ours, theirs):
        run(optimizer, 1, first=10, special=math.nan)
    assert differing(ours, theirs) == []


def test_xla_would_leave_out_roundings_that_are_not_kept(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "ROUNDING", frozenset())
    monkeypatch.setattr(get("xla"), "_lowered", {})
    ours, theirs = (compiled(Lamb, ((91, 91),), d, strategy="fp32", backend=b) for d, b in both(xla))
    run(ours, 3)
    run(theirs, 3)
    assert differing(ours, theirs) != []


SHAPES = ((13, 11), (17,))


def counted() -> list[int]:
    """How many programs were compiled, and how many run."""
    data = [met.metric_data(name) for name in ("CompileTime", "ExecuteTime")]
    return [0 if x is None else int(x[0]) for x in data]


def test_from_the_third_step_on_nothing_is_compiled_and_no_step_waits(xla: torch.device) -> None:
    torch_xla.sync(wait=True)
    met.clear_all()
    optimizer = compiled(Novograd, SHAPES, xla, strategy="full")
    run(optimizer, 2)
    torch_xla.sync(wait=True)
    before = counted()
    for rate in (0.0, 1.0, 0.02):
        optimizer.param_groups[0]["lr"] = rate
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full(p.shape, 0.1 + rate).bfloat16().to(xla)
        ran = counted()[1]
        optimizer.step()
        assert counted()[1] == ran
        torch_xla.sync(wait=True)
    assert counted()[0] == before[0]
    assert [name for name in met.counter_names() if name.startswith("aten::")] == []


def test_a_checkpoint_goes_from_one_device_to_the_other(xla: torch.device) -> None:
    ours, theirs = (compiled(Novograd, SHAPES, d, strategy="full") for d, _ in both(xla))
    run(ours, 3)
    saved = copy.deepcopy(ours.state_dict())
    for to, p in zip(theirs.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
        with torch.no_grad():
            to.copy_(p.cpu())
    theirs.load_state_dict(saved)
    run(ours, 2, first=3)
    run(theirs, 2, first=3)
    assert differing(ours, theirs) == []


def grouped(params: list[Parameter]) -> Novograd:
    return Novograd([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}])


def test_groups_missing_gradients_skipped_steps_and_a_monitor(xla: torch.device) -> None:
    found = []
    for device, backend in both(xla):
        optimizer = compiled(grouped, SHAPES, device, strategy="full", backend=backend, nonfinite="skip")
        monitor = collage_neuron.monitor(optimizer, every=1)
        run(optimizer, 2)
        frozen, *_ = (p for group in optimizer.param_groups for p in group["params"])
        frozen.requires_grad_(False)
        frozen.grad = None
        run(optimizer, 1, first=2, special=math.inf)
        assert "stage 1, numbers: v, reduced0 -> number0" in collage_neuron.explain(optimizer, graphs=True)
        assert monitor.latest() is not None
        found.append((optimizer, monitor))
    assert differing(found[0][0], found[1][0]) == []


@pytest.mark.parametrize("make", [Novograd, Came])
def test_native_code_on_lent_memory_has_the_same_bits(xla: torch.device, make: Any) -> None:
    ours, theirs = (compiled(make, ((40, 40),), d, backend=b) for d, b in ((xla, "xla_native"), ("cpu", "reference")))
    run(ours, 3)
    run(theirs, 3)
    assert differing(ours, theirs) == []


def test_validation_compares_all_and_notices_a_wrong_root(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = compiled(Lars, ((13, 11),), xla, backend="xla", validate="on")
    run(optimizer, 1)
    history = validate.history_of(optimizer)
    assert (history.compared, history.left_out) == (2 * 256, 0)
    monkeypatch.setitem(sums.FINISH, norm_of, lambda hlo, total, count: total)
    monkeypatch.setattr(get("xla"), "_lowered", {})
    with pytest.raises(TranslationError, match="of Lars was not taken"):
        run(optimizer, 1, first=1)


def test_devices_without_fp64_say_so(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = []
    for make in (Lamb, Decaying):
        optimizer = compiled(make, ((3,),), "cpu", backend="reference")
        run(optimizer, 1)
        updates += [job.update for job in plan.plan(make, optimizer, optimizer.param_groups[0], 0)]
    monkeypatch.setattr("torch_xla.runtime.device_type", lambda: "NEURON")
    reasons = [get("xla").supports(update) for update in updates]
    assert "in fp64, which NEURON devices do not have" in str(reasons[0])
    assert reasons[1] is None  # no sums
