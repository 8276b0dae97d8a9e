"""What cannot run as written is rejected and leaves everything as it was; so does a step that raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_written import Lamb, Muon, Prodigy, Shampoo, Written, compiled, everything, parameters, run
from torch.nn import Parameter

import collage_neuron
from collage_neuron.errors import StepInterrupted, UnsupportedUpdate
from collage_neuron.trace.placeholders import present
from collage_neuron.trace.step_kinds import Placeholders

State = dict[str, Any]


class Leaves(Written):
    """Reads a value, so that it runs as written, and then does `more`."""

    def __init__(self, params: Any, more: Callable[..., object]) -> None:
        super().__init__(params)
        self.more = more

    def update(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        p.sub_(g / float(g.norm() + 1), alpha=group["lr"])
        self.more(self, p, g, state)


REJECTED: dict[str, Callable[..., object]] = {
    r"an object of type list as optimizer\.state\[p\]": lambda o, p, g, state: o.state.update({p: [g.clone()]}),
    "a state called 'm_lo'": lambda o, p, g, state: state.update(m=g.clone(), m_lo=g.clone()),
    "a state called 'param'": lambda o, p, g, state: state.setdefault("param", torch.zeros(2)).add_(1),
    r"makes a parameter of shape \[24, 40\] one of shape \[1, 24, 40\]": (
        lambda o, p, g, state: setattr(p, "data", p.data[None])
    ),
    r"one of shape \[24, 40\] and type torch.float64": lambda o, p, g, state: setattr(p, "data", p.data.double()),
}
"""What a step leaves that cannot be stored, by what is said."""


@pytest.mark.parametrize("message", REJECTED)
def test_what_has_no_place_is_rejected_and_everything_restored(message: str) -> None:
    optimizer, params = compiled(lambda ps: Leaves(ps, REJECTED[message]), "plus")
    for p in params:
        p.grad = torch.ones_like(p)
    before, attributes = everything(optimizer), {k for k in vars(optimizer) if not k.startswith("_collage")}
    with pytest.raises(UnsupportedUpdate, match=message) as found:
        optimizer.step()
    assert "cannot run as written" in str(found.value)
    assert str(found.value).endswith("nothing was updated")
    assert everything(optimizer) == before
    assert {k for k in vars(optimizer) if not k.startswith("_collage")} == attributes
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in params)  # type: ignore[arg-type]


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("of", ["param", "m"])
@pytest.mark.parametrize("n", [40, 8192])
@pytest.mark.parametrize("is_counted", [True, False])
def test_so_is_what_it_writes_to_a_view_that_something_else_holds(
    is_counted: bool, n: int, of: str, reads: bool
) -> None:
    """Which has the words during the step; of large ones they are lost then."""
    views: list[torch.Tensor] = []

    class Writes(Written):
        def update(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
            state.setdefault("m", torch.zeros_like(p)).add_(g, alpha=1 + (float(g.norm()) if reads else 0.0))
            p.sub_(state["m"], alpha=group["lr"])
            for x in views:
                x[1:, :9].mul_(0.5)  # in the middle

    optimizer, (p,) = compiled(Writes, "split433", ((n,),))
    run(optimizer, 3)
    before = everything(optimizer)
    seen = p if of == "param" else optimizer.state[p][of]
    views.append((seen.detach() if is_counted else seen.data).view(2, -1))
    with pytest.raises(UnsupportedUpdate if n == 40 else StepInterrupted, match="by a name that has no fp32 value"):
        run(optimizer, 1)
    views.clear()
    if n == 40:
        assert everything(optimizer) == before
        run(optimizer, 1)


@pytest.mark.parametrize("n", [40, 8192])
def test_what_lies_beside_a_parameter_in_a_buffer_may_be_written(n: int) -> None:
    """It has the version of the parameter, too."""
    flat = torch.ones(n + 8).bfloat16()

    class Writes(Written):
        def update(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
            p.sub_(g, alpha=float(g.norm()) * 0 + group["lr"])
            flat[n:].add_(1)

    optimizer = collage_neuron.compile(Writes([p := Parameter(flat[:n])]), strategy="split433", verbose=False)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert flat[n:].eq(3).all()


class Curved(Muon):
    """Differentiates gradients."""

    def update(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        (curvature,) = torch.autograd.grad(g.sum(), [p])
        super().update(p, g * curvature, state, group)


def test_what_is_known_before_the_first_step_is_rejected_by_compile() -> None:
    def rejected(optimizer: Any, match: str, **settings: Any) -> None:
        kind = type(optimizer)
        with pytest.raises(UnsupportedUpdate, match=match):
            collage_neuron.compile(optimizer, **settings)
        assert type(optimizer) is kind

    params = parameters(torch.bfloat16)
    rejected(
        Muon(params), r"arithmetic='bf16', and a step as written computes in fp32", arithmetic="bf16", strategy="plus"
    )
    p = Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    (grad,) = torch.autograd.grad((p * p * p).sum(), [p], create_graph=True)
    p.grad = grad
    rejected(Curved([p]), "has a graph")


@pytest.mark.parametrize("make", [Muon, Lamb, Shampoo, Prodigy])
def test_a_step_that_raises_half_way_leaves_no_trace(make: type[Written], monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, params = compiled(make, "plus")
    run(optimizer, 2)
    other = copy.deepcopy(optimizer)
    params[-1].grad = torch.ones_like(params[-1])
    before, norm = everything(optimizer), getattr(optimizer, "norm", None)
    sub = torch.Tensor.sub_ if make is not Lamb and make is not Muon else torch.Tensor.add_

    def failing(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self is params[3]:  # not a copy's, which says what is known of the step before it
            raise ZeroDivisionError("in the middle")
        return sub(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, sub.__name__, failing)
        for p in params:
            p.grad = torch.ones_like(p)
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            optimizer.step()
    assert everything(optimizer) == before
    assert getattr(optimizer, "norm", None) == norm
    for o in (optimizer, other):
        run(o, 2, first=2)
    assert everything(optimizer) == everything(other)


@pytest.mark.parametrize("raises", [MemoryError, RuntimeError])
@pytest.mark.parametrize("at", [1, 2])
def test_an_error_while_values_are_exchanged_leaves_no_trace(
    at: int, raises: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First gradients get placeholders, then parameters and states."""
    optimizer, params = compiled(Muon, "plus")
    run(optimizer, 1)
    before, grads, calls = everything(optimizer), [p.grad for p in params], list[int]()

    def fails(waiting: Placeholders, pairs: Any) -> None:
        present(pairs)
        calls.append(1)
        if len(calls) == at:
            raise raises

    monkeypatch.setattr(Placeholders, "present", fails)
    with pytest.raises((raises, UnsupportedUpdate)):
        optimizer.step()
    assert everything(optimizer) == before
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    optimizer.step()


@pytest.mark.parametrize("resize", [True, False])
def test_a_step_that_raises_leaves_the_shapes_of_what_it_holds(resize: bool) -> None:
    """A history in a list, beside which there may be a tensor that has no memory of its own (a sparse one)."""

    class History(Written):
        fails = False

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            (x, _) = state.setdefault("l", [torch.zeros(1, *p.shape), torch.eye(3).to_sparse()])
            if resize:
                x.resize_(len(x) + 1, *p.shape)[-1] = g
            else:
                x.data = torch.cat([x, g[None]])
            p.sub_(x.mean(0), alpha=group["lr"])
            if self.fails:
                raise ZeroDivisionError

    optimizer, params = compiled(History, "plus")
    run(optimizer, 2)
    before, optimizer.fails = [optimizer.state[p]["l"][0].clone() for p in params], True
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert all(torch.equal(optimizer.state[p]["l"][0], x) for p, x in zip(params, before, strict=True))


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x.data, lambda x: x.numpy()])  # torch counts writes to the first
def test_what_cannot_be_undone_needs_a_checkpoint(of: Callable[[torch.Tensor], Any]) -> None:
    class Large(Written):
        fails = False

        def update(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
            large = of(state.setdefault("large", [torch.zeros(5000)])[0])
            large += float(g.norm())
            p.sub_(g)
            if self.fails:
                raise ZeroDivisionError("in the middle")

    optimizer, _ = compiled(Large)
    run(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.fails = True
    with pytest.raises(StepInterrupted, match=r"that cannot be restored .* load a checkpoint"):
        run(optimizer, 1)
    optimizer.fails = False
    with pytest.warns(UserWarning, match="this state_dict may be half written: .* load a checkpoint"):
        optimizer.state_dict()
    with pytest.raises(StepInterrupted, match="load a checkpoint"):
        run(optimizer, 1)
    optimizer.load_state_dict(saved)
    run(optimizer, 1)


def test_bytes_need_an_update_that_is_captured() -> None:
    with pytest.raises(UnsupportedUpdate, match="strategy"):
        collage_neuron.compile(Muon(parameters(torch.bfloat16)), bytes=10)


class Fails(Written):
    """Calls its closure in the middle of a step, and then raises."""

    moves = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"] if self.moves else ():
                p.mul_(0.5 / float(p.detach().norm() + 1))
        closure()
        raise ZeroDivisionError("after the closure")


@pytest.mark.parametrize("moves", [True, False])
def test_an_error_after_a_closure_in_the_middle_needs_a_checkpoint(moves: bool) -> None:
    """Unless nothing had been changed before it."""
    optimizer, _ = compiled(Fails, "plus")
    optimizer.moves = moves
    before = everything(optimizer)
    for _ in range(2):
        with pytest.raises(StepInterrupted if moves else ZeroDivisionError, match="after the closure"):
            optimizer.step(lambda: 1.0)
    assert (everything(optimizer)[:2] == before[:2]) == (not moves)
