"""States that a later step makes, and such as torch's own classes have not, go through checkpoints as in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.checkpoint import from_tensors, get_fp32_state_dict, set_fp32_state_dict, to_tensors

pytestmark = pytest.mark.filterwarnings("ignore::collage_neuron.RunsAsWritten")


def of_all(optimizer: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    """A number that all parameters share."""
    whole: dict[str, Any] = optimizer.state["all"]  # type: ignore[index]
    whole["sum"] = 0.5 * whole.get("sum", 0.0) + 1.0
    return whole["sum"] * torch.ones_like(p)


def in_a_list(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    (kept,) = state.setdefault("list", [torch.zeros_like(p)])
    return kept.mul_(0.9).add_(p.grad)


def masked(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    return p.grad * state.setdefault("mask", p.grad > 0)


def counted(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    return p.grad * state.setdefault("count", torch.zeros(p.shape, dtype=torch.int64)).add_(1)


def history(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    kept = state.setdefault("history", torch.zeros(3, *p.shape))
    kept.copy_(kept.roll(1, 0))
    kept[0] = p.grad
    return kept.sum(0)


def numbered(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    return state.setdefault(7, torch.zeros_like(p)).mul_(0.9).add_(p.grad)


def scaled(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    state["lr_scale"] = 0.9 * state.get("lr_scale", 1.0)
    return p.grad * state["lr_scale"]


def shared(optimizer: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    """One tensor is a state of both parameters."""
    first = optimizer.state[optimizer.param_groups[0]["params"][0]]
    kept = state.setdefault("shared", first.setdefault("shared", torch.zeros(2)))
    return p.grad * kept.mul_(0.5).add_(p.grad.sum()).sum()


def narrow(optimizer: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    """A state in bf16 on purpose, of the first parameter alone; it is fp32 after a load in plain torch."""
    is_first = p is optimizer.param_groups[0]["params"][0]
    kept = state.setdefault("n", torch.zeros(p.shape, dtype=torch.bfloat16 if is_first else torch.float32))
    return kept.mul_(0.5).add_(p.grad).float()


def quantized(optimizer: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    is_first = p is optimizer.param_groups[0]["params"][0]
    kept = state.setdefault("q", torch.zeros(p.shape, dtype=torch.int8 if is_first else torch.float32))
    return kept.copy_((100 * p.grad).round().clamp(-127, 127)) * 0.01


def double(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    return state.setdefault("d", torch.zeros(p.shape, dtype=torch.float64)).mul_(0.9).add_(p.grad).float()


def called_as_words(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    mask = state.setdefault("x_scale", p.grad > 0)
    return mask * state.setdefault("y_lo", torch.zeros_like(p)).mul_(0.5).add_(p.grad)


def widened(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    """A state that is bf16 on purpose for two steps, and then is fp32."""
    kept = state.setdefault("w", torch.ones_like(p, dtype=torch.bfloat16))
    if state["t"] == 5:
        state["w"] = torch.full_like(p, 1 + 2.0**-10)
    rows = p.grad.reshape(p.shape[0], -1)
    return (rows @ rows.t() @ rows).view(p.shape) * (1.0 if state["t"] < 6 else 1e3 * (kept - 1.0))


class Late(Optimizer):
    """Momentum, and from its third step on something else."""

    def __init__(self, params: Any, late: Callable[..., Any]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.late = late

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["t"] = state.get("t", 0) + 1
            update = state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            p.sub_(update, alpha=0.01)
            if state["t"] > 2:
                p.sub_(self.late(self, p, state), alpha=0.01)


def made(late: Any, strategy: str | None) -> tuple[Any, Any]:
    model = nn.Linear(4, 3)
    optimizer = Late(model.parameters(), late)
    if strategy is None:
        return model, optimizer
    return collage_neuron.compile(model, optimizer, strategy=strategy, verbose=False)


def run(late: Any, strategy: str | None, load: Callable[[Any, Any, Any, Any], Any] | None) -> list[torch.Tensor]:
    """The weights of a run that goes on in another optimizer after four steps, if there is a way to `load`."""
    torch.manual_seed(0)
    model, optimizer = made(late, strategy)
    other = made(late, strategy)
    for step in range(8):
        if step == 4 and load is not None:
            model, optimizer = load(model, optimizer, *other) or other
        for i, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + i)
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        optimizer.step()
    return [p.detach() if strategy is None else collage_neuron.exact_value(optimizer, p) for p in model.parameters()]


def loaded_before(model: Any, optimizer: Any, _: Any, its: Any) -> Any:
    """Loads into an ordinary optimizer, and compiles that."""
    other, plain = made(its.late, None)
    loaded(model, optimizer, other, plain)
    strategy = its.param_groups[0].get("collage_strategy")
    return collage_neuron.compile(other, plain, strategy=strategy, verbose=False) if strategy else (other, plain)


def loaded_again(model: Any, optimizer: Any, other: Any, its: Any) -> None:
    """Loads into an optimizer that has such states already."""
    loaded(model, optimizer, other, its)
    for p in other.parameters():
        p.grad = torch.ones_like(p)
    its.step()
    loaded(model, optimizer, other, its)


def loaded(model: Any, optimizer: Any, other: Any, its: Any) -> None:
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))


OWN = [narrow, quantized, double, called_as_words]
LATE = [of_all, in_a_list, masked, counted, history, numbered, scaled, shared]


@pytest.mark.parametrize("load", [loaded, loaded_before])
@pytest.mark.parametrize("strategy", ["fp32", "split433"])
@pytest.mark.parametrize("late", [*LATE, widened])
def test_a_run_goes_on_as_in_plain_torch(late: Any, strategy: str, load: Any) -> None:
    for plain, ours in zip(run(late, None, load), run(late, strategy, load), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0.0, atol=1e-6 if strategy == "fp32" else 1e-4)


@pytest.mark.parametrize("load", [loaded, loaded_again])
@pytest.mark.parametrize("late", [*LATE, *OWN])
def test_a_run_goes_on_bit_for_bit(late: Any, load: Any) -> None:
    for ours, whole in zip(run(late, "split433", load), run(late, "split433", None), strict=True):
        assert torch.equal(ours, whole)


def tensors_in(saved: Any) -> list[torch.Tensor]:
    return [x for state in saved["state"].values() for x in state.values() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("late", [called_as_words, history, double])
def test_a_checkpoint_of_plain_torch_has_no_words(late: Any) -> None:
    saved: list[Any] = []

    def noted(model: Any, optimizer: Any, *_: Any) -> Any:
        saved.extend(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        return model, optimizer

    def of_plain(_: Any, __: Any, other: Any, its: Any) -> None:
        set_fp32_state_dict(other, its, model_state_dict=saved[0], optim_state_dict=saved[1])

    plain = run(late, None, noted)
    for ours, want in zip(run(late, "fp32", of_plain), plain, strict=True):
        torch.testing.assert_close(ours, want, rtol=0.0, atol=1e-6)


def test_safetensors_have_a_tensor_of_several_parameters_once_and_no_names_that_are_no_text() -> None:
    def through(model: Any, optimizer: Any, other: Any, its: Any) -> None:
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        its.load_state_dict(from_tensors(*to_tensors(optimizer.state_dict())))

    for ours, whole in zip(run(shared, "split433", through), run(shared, "split433", None), strict=True):
        assert torch.equal(ours, whole)
    for late in (of_all, numbered):
        with pytest.raises(ValueError, match="has names that are no text, or is that of no parameter, and"):
            run(late, "split433", through)


@pytest.mark.parametrize("late", LATE)
def test_an_export_has_what_plain_torch_would_have(late: Any) -> None:
    exports: list[Any] = []

    def exported(model: Any, optimizer: Any, *_: Any) -> None:
        exports.append(get_fp32_state_dict(model, optimizer) if exports else (None, optimizer.state_dict()))
        raise InterruptedError

    for strategy in (None, "fp32"):
        with pytest.raises(InterruptedError):
            run(late, strategy, exported)
    (_, plain), (_, ours) = exports
    assert len(set(map(id, tensors_in(ours)))) == len(set(map(id, tensors_in(plain))))
    for key, state in plain["state"].items():
        torch.testing.assert_close(dict(ours["state"][key]), dict(state), rtol=0.0, atol=1e-6)
