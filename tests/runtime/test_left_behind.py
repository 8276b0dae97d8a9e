"""What a step leaves beside weights and states, and parameters that are exchanged: words that nobody may lose."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from case_arena import Base
from foreign import Lamb
from running import as_written_too
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import UnsupportedUpdate, exact_value

pytestmark = pytest.mark.usefixtures("rejecting")


# --- what a step leaves beside weights and states: the gradient that it wrote to, and words that nobody may lose ------


class Halves(Base):
    """Writes to the gradient, as older optimizers add their weight decay to it."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g.mul_(0.5), alpha=-group["lr"])


class Clears(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"])
        p.grad = None


class Exchanges(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"])
        p.grad = g * 0.25


class Drops(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        t = state["t"] = state.get("t", 0) + 1
        m = state.pop("m") if t == 3 else state.setdefault("m", torch.zeros_like(p))
        p.add_(m.add_(g), alpha=-group["lr"])


class Named(Base):
    """Keeps its momentum under the name in its settings, beside one called `m`."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        n = state.setdefault(group["name"], torch.zeros_like(p))
        p.add_(n.add_(m.add_(g)), alpha=-group["lr"])


class Forgets(Base):
    """Sets a tensor to None after three steps."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        t = state["t"] = state.get("t", 0) + 1
        m = state.setdefault("m", torch.zeros_like(p))
        p.add_(m.add_(g), alpha=-group["lr"])
        if t == 3:
            state["m"] = None


class KeepsObject(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        self.state[p] = SimpleNamespace(m=g.clone())
        p.add_(g, alpha=-group["lr"])


class KeepsGradient(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g - state.get("before", g), alpha=-group["lr"])
        state["before"] = g


class Restarts(Base):
    """Makes its states anew every five steps, in the memory of the old ones or in other memory."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        t = state.get("t", 0) + 1
        if t % 5 == 1:
            state.clear()
            state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["t"] = t
        p.addcdiv_(state["m"].lerp_(g, 0.1), state["v"].lerp_(g * g, 0.1).sqrt_().add_(1e-8), value=-group["lr"])


def made(cls: Callable[..., Optimizer], device: str = "cpu", **settings: Any) -> tuple[Parameter, Optimizer]:
    p = Parameter(torch.linspace(-1, 1, 12, device=device).reshape(3, 4))
    return p, collage_neuron.compile(cls([p]), **settings)


def given(p: Parameter, value: float = 1.0) -> torch.Tensor:
    p.grad = torch.full(p.shape, value, dtype=p.dtype, device=p.device)
    return p.grad


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("strategy", ["plus", "fp32", "bf16", "stochastic"])
def test_a_gradient_that_the_step_writes_to_is_written(strategy: str, device: str) -> None:
    """In its own memory: the next backward adds to it where nobody clears it."""
    if device == "xla":
        pytest.importorskip("torch_xla")
    p, optimizer = made(Halves, device, strategy=strategy)
    grad = given(p)
    optimizer.step()
    assert p.grad is grad
    assert torch.equal(grad.cpu(), torch.full((3, 4), 0.5).bfloat16())


@as_written_too()
def test_an_expanded_gradient_is_exchanged() -> None:
    p, optimizer = made(Halves)
    p.grad = torch.ones(1, dtype=p.dtype).expand(3, 4)
    optimizer.step()
    assert torch.equal(p.grad, torch.full((3, 4), 0.5).bfloat16())


@as_written_too()
def test_a_gradient_that_the_step_clears_or_exchanges() -> None:
    p, optimizer = made(Clears)
    given(p)
    optimizer.step()
    assert p.grad is None
    p, optimizer = made(Exchanges)
    given(p)
    optimizer.step()
    assert torch.equal(p.grad, torch.full((3, 4), 0.25).bfloat16())  # type: ignore[arg-type]  # it is there


@pytest.mark.parametrize("cls", [Drops, Forgets])
def test_a_state_that_is_deleted_or_none_is_rejected_before_anything_changes(cls: Any) -> None:
    p, optimizer = made(cls)
    for _ in range(2):
        given(p)
        optimizer.step()
    before = copy.deepcopy((p, optimizer.state_dict()))
    given(p)
    with pytest.raises(UnsupportedUpdate, match=r"deletes optimizer.state\[p\]\['m'\].*set it to zeros"):
        optimizer.step()
    assert torch.equal(p, before[0])
    assert str(optimizer.state_dict()) == str(before[1])


@pytest.mark.parametrize("name", ["exp.avg", "a b", "class", "", ("m", 0), "m_lo", "param_master"])
def test_a_name_that_no_state_can_have_is_rejected(name: Any) -> None:
    optimizer = Named([Parameter(torch.ones(3))], name=name)
    with pytest.raises(UnsupportedUpdate, match=r"has a state called .*; rename it"):
        collage_neuron.compile(optimizer)


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (KeepsObject, r"type SimpleNamespace as optimizer.state\[p\]; keep a dictionary"),
        (KeepsGradient, r"a state shares the memory of its parameter, its gradient or another state; clone\(\) it"),
    ],
)
def test_what_a_state_cannot_be_is_said(cls: Any, sentence: str) -> None:
    with pytest.raises(UnsupportedUpdate, match=sentence):
        made(cls)


def test_states_that_are_made_anew_are_those_of_their_own_parameter() -> None:
    """Whatever memory they get: tensors of a recording that is over, or that code has let go of, lie there no more."""
    for _ in range(5):
        ps = [Parameter(torch.linspace(-1, 1, n).bfloat16().float()) for n in (4, 6, 4, 6)]
        qs = [Parameter(p.detach().double()) for p in ps]
        optimizer, truth = collage_neuron.compile(Restarts(ps), strategy="fp32"), Restarts(qs)
        for i in range(12):
            for p, q in zip(ps, qs, strict=True):
                p.grad, q.grad = torch.full_like(p, 0.5 + i), torch.full_like(q, 0.5 + i)
            optimizer.step()
            truth.step()
        for p, q in zip(ps, qs, strict=True):
            torch.testing.assert_close(exact_value(optimizer, p).double(), q.detach(), rtol=1e-5, atol=1e-6)


FORGET: dict[str, Callable[[Optimizer], object]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "exchange": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "delete": lambda optimizer: [optimizer.state.pop(p) for p in list(optimizer.state)],
    "empty": lambda optimizer: [state.clear() for state in optimizer.state.values()],
}


@pytest.mark.parametrize("forget", FORGET.values(), ids=FORGET)
@pytest.mark.parametrize("strategy", ["light", "plus", "full", "fp32"])
def test_clearing_the_state_forgets_moments_and_no_bit_of_a_weight(
    strategy: str, forget: Callable[[Optimizer], object]
) -> None:
    p, optimizer = made(torch.optim.AdamW, strategy=strategy)
    for i in range(3):
        given(p, 1.0 + i)
        optimizer.step()
    before = exact_value(optimizer, p)
    assert not torch.equal(before, p.float())
    forget(optimizer)
    assert torch.equal(exact_value(optimizer, p), before)
    forget(optimizer)
    assert [k for k in optimizer.state_dict()["state"][0] if not k.startswith("param_")] == []
    given(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert torch.equal(exact_value(optimizer, p), before)
    assert optimizer.state[p]["step"] == 1


def test_a_parameter_that_was_out_of_its_group_meanwhile_has_its_words() -> None:
    """`append`, and not `add_param_group`, tells nobody."""
    params = [Parameter(torch.linspace(0.1, 1, 16)) for _ in range(2)]
    optimizer = collage_neuron.compile(AdamW(params), verbose=False)
    group, back = optimizer.param_groups[0], params[1]

    def step(rate: float) -> None:
        group["lr"], back.grad = rate, torch.ones_like(back)
        params[0].grad = torch.ones_like(back)
        optimizer.step()

    step(1e-3)
    before = exact_value(optimizer, back)
    group["params"].pop()
    optimizer.state.clear()
    step(1e-3)
    group["params"].append(back)
    step(0.0)
    assert not torch.equal(before, back.float())
    assert torch.equal(exact_value(optimizer, back), before)


def test_a_plain_checkpoint_still_takes_the_words_away() -> None:
    """Loaded weights are what they are: no word of the run before comes back."""
    p, optimizer = made(torch.optim.AdamW)
    given(p)
    optimizer.step()
    plain = Parameter(p.detach().float())
    of_torch = torch.optim.AdamW([plain])
    given(plain)
    of_torch.step()
    with torch.no_grad():
        p.copy_(plain)
    optimizer.load_state_dict(of_torch.state_dict())
    assert torch.equal(exact_value(optimizer, p), p.float())


# --- A parameter that is exchanged for a new one, with its state, as code does that adds and removes rows (splatting) -


def trained(make: Any, strategy: str = "split433") -> tuple[Any, torch.Tensor]:
    """An optimizer after three steps, and a weight that its high word does not hold."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * 0.3) for shape in ((3,), (6, 5))]
    optimizer = collage_neuron.compile(make(params, lr=0.01), strategy=strategy, verbose=False)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert not torch.equal(exact_value(optimizer, params[1]), params[1].detach().float())
    return optimizer, params[1]


def grown(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(2, *x.shape[1:])])


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "grown": grown,
    "cut": lambda x: x[1:4].clone(),
    "in fp32": lambda x: x.float() + 2.0**-20,
    "other values": lambda x: torch.full_like(x, 3e-4),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [AdamW, Lamb])
@pytest.mark.parametrize("strategy", ["split433", "plus"])
@pytest.mark.whole
@as_written_too()
def test_low_words_of_another_parameter_do_not_count(strategy: str, make: Any, change: str) -> None:
    optimizer, old = trained(make, strategy)
    state = optimizer.state.pop(old)
    if change in ("grown", "cut"):
        state.update({k: CHANGES[change](x) for k, x in state.items() if k in ("exp_avg", "exp_avg_sq", "m", "v")})
    new = optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(CHANGES[change](old.detach()))
    optimizer.state[new], written, new.grad = state, new.detach().float().clone(), torch.zeros_like(new)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    with pytest.warns(UserWarning, match=r"has the state of an earlier one, .*param_lo.* were dropped"):
        optimizer.step()
    assert torch.equal(exact_value(optimizer, new), written)


@pytest.mark.parametrize("make", [AdamW, Lamb])
@as_written_too()
def test_one_that_is_the_same_keeps_them(make: Any) -> None:
    optimizer, old = trained(make)
    value, state = exact_value(optimizer, old), optimizer.state.pop(old)
    new = optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(old.detach().clone())
    optimizer.state[new], new.grad = state, torch.zeros_like(new)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    optimizer.step()
    assert torch.equal(exact_value(optimizer, new), value)


@pytest.mark.parametrize("make", [AdamW, Lamb])
def test_a_parameter_that_gets_another_shape_is_rejected(make: Any) -> None:
    optimizer, p = trained(make)
    p.grad = None
    p.data = grown(p.detach())
    p.grad = torch.zeros_like(p)
    with pytest.raises(
        ValueError, match=r"another shape than its state 'param_lo'.*give the optimizer a new parameter"
    ):
        optimizer.step()


def test_one_without_a_state_in_plain_torch_leaves_its_group_and_comes_back() -> None:
    params = [Parameter(torch.full((8,), 1 + 2.0**-12)) for _ in range(2)]
    optimizer = collage_neuron.compile(torch.optim.SGD(params, lr=2.0**-12), verbose=False)
    group = optimizer.param_groups[0]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    group["params"] = params[:1]
    assert list(optimizer.state_dict()["state"]) == [0]  # torch has no number for the other one
    group["params"].append(params[1])
    assert list(optimizer.state_dict()["state"]) == [0, 1]
    optimizer.step()
    assert all(exact_value(optimizer, p)[0] == 1 - 2.0**-12 for p in params)


def drawn(count: int) -> list[Parameter]:
    return [Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(i))) for i in range(count)]


def moved(params: list[Any], optimizers: list[Any]) -> None:
    first, second = (optimizer.param_groups[0]["params"] for optimizer in optimizers)
    second.append(first.pop(0))


def back(params: list[Any], optimizers: list[Any]) -> None:
    first, second = (optimizer.param_groups[0]["params"] for optimizer in optimizers)
    first.insert(0, second.pop())


def exchanged(params: list[Any], optimizers: list[Any]) -> None:
    state = optimizers[0].state
    state[params[0]], state[params[1]] = state[params[1]], state[params[0]]


def exchanged_with_memory(params: list[Any], optimizers: list[Any]) -> None:
    exchanged(params, optimizers)
    params[0].data, params[1].data = params[1].data, params[0].data


def taken_over(params: list[Any], optimizers: list[Any]) -> None:
    """The second one begins anew, with its old low words as far as they fit: none may be the first one's too."""
    state = optimizers[0].state
    params[0].data, state[params[0]] = params[1].data, state.pop(params[1])
    params[1].data = torch.ones_like(params[1])


@pytest.mark.parametrize("strategy", ["split433", "split423", "fp32"])
@pytest.mark.parametrize("edits", [[moved], [moved, back], [exchanged], [exchanged_with_memory], [taken_over]])
def test_a_parameter_keeps_its_value_whatever_becomes_of_lists_and_states(edits: list[Any], strategy: str) -> None:
    ends: list[list[torch.Tensor]] = []
    for is_compiled in (False, True):
        params = drawn(4)
        made: list[Any] = [AdamW(params[:2], lr=1e-3), AdamW(params[2:], lr=1e-3)]
        if is_compiled:
            made = [collage_neuron.compile(each, strategy=strategy, verbose=False) for each in made]
        for edit in (None, *edits):
            if edit is not None:
                edit(params, made)
            for i in range(3):
                for place, p in enumerate(params):
                    p.grad = torch.full_like(p, 0.5 * (1 + i + place))
                for optimizer in reversed(made):  # the one that a parameter has left steps last
                    optimizer.step()
        own = {p: x for x in made for group in x.param_groups for p in group["params"]}
        ends.append([exact_value(own[p], p) if is_compiled else p.detach() for p in params])
    for plain, ours in zip(*ends, strict=True):
        bound = 2.0**-8 if taken_over in edits and strategy != "fp32" else 2.0**-18  # an old low word, or what there is
        torch.testing.assert_close(ours, plain, rtol=0.0, atol=bound)


@pytest.mark.parametrize("make", [AdamW, torch.optim.SGD])
def test_what_other_code_keeps_in_a_state_stays(make: Any) -> None:
    """A log in a list, an object, another tensor than the parameter's: the step of a class of torch's has none."""
    p = Parameter(torch.linspace(0.1, 1, 4096 * 2))
    optimizer = collage_neuron.compile(make([p], lr=1e-3), verbose=False)
    log, thing = list[Any](), SimpleNamespace()
    for step in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.state[p].update(log=log, thing=thing)
        log.append(p.detach().clone() if step == 1 else step)
    assert optimizer.state[p]["log"] is log
    assert optimizer.state[p]["thing"] is thing
    assert len(optimizer.state_dict()["state"][0]["log"]) == 5
    assert log[1].sum() > 0
