"""Updates with sums and in other shapes on torch_xla's device: one program, with the bits of the reference."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from headed import ALL, Flat, Fused, Mini, Moments, Vectors
from planned import plan
from pytorch_optimizer import Ranger
from rowed import Came, Factored
from staged import Decaying, Lamb, Lars, Novograd, StableAdamW
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adafactor
from xla_runs import Shapes, both, compiled, counted, differing, met, run, torch_xla

import collage_neuron
from collage_neuron.errors import TranslationError, UnsupportedUpdate
from collage_neuron.numerics.reductions import mean_to, norm_of
from collage_neuron.passes.backends.protocol import check_supported
from collage_neuron.passes.backends.registry import get
from collage_neuron.passes.backends.xla import sums
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.trace.step_reads import StepReads
from collage_neuron.validation import validate

pytestmark = [pytest.mark.usefixtures("rejecting"), pytest.mark.filterwarnings("ignore::UserWarning:pytorch_optimizer")]


# --- updates with sums on torch_xla's device: one program, without the host, with the bits of the reference on the CPU

CASES: dict[str, tuple[Any, str, Shapes]] = {
    "lamb": (Lamb, "full", ((33, 65), (1,), (0, 3))),
    "lars": (Lars, "stochastic", ((91, 91),)),
    "stable": (StableAdamW, "plus", ((8193,),)),
    "novograd": (Novograd, "split311", ((33, 300),)),
    "came": (Came, "full", ((33, 65),)),
    "factored": (Factored, "fp32", ((2, 66, 5),)),
    "ranger": (Ranger, "full", ((33, 65),)),
}


@pytest.mark.sampled(of=3, each=False)  # XLA compiles for seconds what test_stages.py and test_rows.py have whole
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_have_the_bits_of_the_reference(xla: torch.device, case: str) -> None:
    check_ten_steps(xla, *CASES[case])


def test_with_numbers_of_the_host_so_has_one_that_reads(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # A number that is read is the device's own, by XLA's order of additions, as in plain torch. All else is ours.
    copied = StepReads._copied
    monkeypatch.setattr(StepReads, "_copied", lambda self, place: copied(self, place).cpu())
    check_ten_steps(xla, Adafactor, "full", ((33, 65), (17,)))


def test_numbers_of_the_device_are_those_of_the_host_but_for_roundings(xla: torch.device) -> None:
    ours, theirs = (compiled(Adafactor, ((33, 65), (17,)), d, strategy="full", backend=b) for d, b in both(xla))
    for optimizer in (ours, theirs):
        run(optimizer, 10)
        assert not bookkeeping(optimizer).as_written
    for p, q in zip(exact(ours), exact(theirs), strict=True):
        assert torch.allclose(p, q, rtol=0.0, atol=2**-18)


def exact(optimizer: Any) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [collage_neuron.exact_value(optimizer, p).cpu() for p in params]


def check_ten_steps(xla: torch.device, make: Any, strategy: str, shapes: Shapes) -> None:
    ours, theirs = (compiled(make, shapes, d, strategy=strategy, backend=b) for d, b in both(xla))
    for optimizer in (ours, theirs):
        run(optimizer, 10)
        assert not bookkeeping(optimizer).as_written
    assert differing(ours, theirs) == []
    for optimizer in (ours, theirs):
        run(optimizer, 1, first=10, special=math.nan)
    assert differing(ours, theirs) == []


SHAPES = ((13, 11), (17,))
HEADS = ((6, 10), (2, 6, 130))


@pytest.mark.parametrize(("make", "shapes"), [(Novograd, SHAPES), (Mini, ((6, 10), (8, 8)))])
def test_from_the_third_step_on_nothing_is_compiled_nor_waits(make: Any, shapes: Shapes, xla: torch.device) -> None:
    """Each component is written into its own buffer: views would not hinder it either, but add nodes to each step."""
    torch_xla.sync(wait=True)
    met.clear_all()
    optimizer = compiled(make, shapes, xla, strategy="full")
    run(optimizer, 2)
    torch_xla.sync(wait=True)
    (compilations, _), reused = counted(), met.metric_data("InputOutputAliasCount")
    for rate in (0.0, 1.0, 0.02):
        optimizer.param_groups[0]["lr"] = rate
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full(p.shape, 0.1 + rate).bfloat16().to(xla)
        ran = counted()[1]
        optimizer.step()
        assert counted()[1] == ran
        torch_xla.sync(wait=True)
    assert counted()[0] == compilations
    assert [name for name in met.counter_names() if name.startswith("aten::")] == []
    assert [count for _, count, *_ in reused[2]][-1] == 2 * 5  # param, m, their low words, one number


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
    # A traced step runs the optimizer's code, so that the host waits for the answer, and a skipped one counts nowhere.
    assert differing(found[0][0], found[1][0]) == []


@pytest.mark.validated
@pytest.mark.parametrize(
    ("make", "shapes", "ending", "steps", "compared"),
    [(Lars, ((13, 11),), norm_of, 1, 2 * 256), (Mini, ((6, 10),), mean_to, 2, 2 * (2 * 60 + 4))],
)
def test_validation_compares_all_and_notices_a_wrong_ending(
    make: Any,
    shapes: Shapes,
    ending: Any,
    steps: int,
    compared: int,
    xla: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of states in shapes of their own in the second step too."""
    optimizer = compiled(make, shapes, xla, backend="xla", validate="on")
    run(optimizer, steps)
    history = validate.history_of(optimizer)
    assert (history.compared, history.left_out, history.not_covered) == (compared, 0, 0)
    monkeypatch.setitem(sums.FINISH, ending, lambda hlo, total, count: total)
    monkeypatch.setattr(get("xla"), "_lowered", {})
    with pytest.raises(TranslationError, match=f"of {make.__name__} was not taken"):
        run(optimizer, 2, first=steps)


def test_devices_without_fp64_say_so(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = []
    for make in (Lamb, Decaying):
        optimizer = compiled(make, ((3,),), "cpu", backend="reference")
        run(optimizer, 1)
        updates += [job.update for job in plan(make, optimizer, optimizer.param_groups[0], 0)]
    monkeypatch.setattr("torch_xla.runtime.device_type", lambda: "NEURON")
    reasons = [get("xla").supports(update) for update in updates]
    assert "in fp64, which NEURON devices do not have" in str(reasons[0])
    with pytest.raises(UnsupportedUpdate, match=r"devices do not have: choose another strategy, or leave"):
        check_supported(get("xla"), updates[0], xla)
    assert reasons[1] is None  # no sums


# --- updates that see a parameter in another shape (Adam-mini), on torch_xla's device: captured, reshaped in the HLO --

HEAD_CASES = [*((make, "split433") for make in ALL), (Mini, "plus"), (Flat, "stochastic"), (Moments, "full")]


@pytest.mark.sampled(of=3, each=False)  # XLA compiles for seconds what test_heads.py has whole
@pytest.mark.parametrize(("make", "strategy"), HEAD_CASES)
def test_steps_have_the_bits_and_the_shapes_of_the_reference(xla: torch.device, make: Any, strategy: str) -> None:
    shapes = (*HEADS, (40, 1)) if make is Vectors else HEADS  # heads of ten elements, of which each row has one
    ours, theirs = (compiled(make, shapes, d, strategy=strategy, backend=b) for d, b in both(xla))
    for optimizer in (ours, theirs):
        run(optimizer, 3)
        assert not bookkeeping(optimizer).as_written
    assert differing(ours, theirs) == []
    for optimizer in (ours, theirs):
        run(optimizer, 1, first=3, special=math.nan)
    assert differing(ours, theirs) == []
    for p, q in zip(*(o.param_groups[0]["params"] for o in (ours, theirs)), strict=True):
        assert torch.equal(p.grad.cpu().nan_to_num(7), q.grad.nan_to_num(7))


@pytest.mark.sampled(of=3, each=False)
@pytest.mark.parametrize(("make", "strategy"), [(Mini, "full"), (Fused, "split433"), (Novograd, "full")])
def test_a_checkpoint_goes_from_one_device_to_another_and_resumes(xla: torch.device, make: Any, strategy: str) -> None:
    ours, again, theirs = (compiled(make, HEADS[:2], d, strategy=strategy) for d in (xla, xla, "cpu"))
    run(ours, 2)
    saved = ours.state_dict()
    saved["state"] = {i: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in s.items()}
                      for i, s in saved["state"].items()}  # fmt: skip
    for other in (again, theirs):
        for to, p in zip(other.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
            with torch.no_grad():
                to.copy_(p.cpu())
        other.load_state_dict(saved)
    for optimizer in (ours, again, theirs):
        run(optimizer, 1, first=2)
    assert differing(ours, again) == []
    assert differing(ours, theirs) == []


# --- A copied optimizer on XLA may step first: what it was copied from keeps its states -------------------------------

Pair = tuple[Parameter, Any]


def _stepped(pair: Pair, steps: int = 1) -> Parameter:
    p, optimizer = pair
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        optimizer.step()
    return p


def _made(device: torch.device) -> Pair:
    p = Parameter(torch.ones(4, 8, dtype=torch.bfloat16).to(device))
    optimizer = torch.optim.AdamW([p], lr=1e-2)
    return p, collage_neuron.compile(optimizer, strategy="full", backend="xla", verbose=False)


def _loaded(pair: Pair, device: torch.device) -> Pair:
    p, optimizer = _made(device)
    p.data.copy_(pair[0].data)
    optimizer.load_state_dict(copy.deepcopy(pair[1].state_dict()))
    return p, optimizer


@pytest.mark.parametrize("copied", [_loaded, lambda pair, device: copy.deepcopy(pair)])
def test_the_copy_may_step_first(copied: Callable[[Pair, torch.device], Pair], xla: torch.device) -> None:
    pair = _made(xla)
    _stepped(pair, 3)
    torch_xla = pytest.importorskip("torch_xla")
    torch_xla.sync()
    other = copied(pair, xla)
    found = []
    for each in (other, pair, pair, other):
        found.append(_stepped(each).detach().cpu().clone())
        torch_xla.sync()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[1], found[2])
