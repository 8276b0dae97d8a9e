"""What an optimizer holds besides its parameters and states: views, shared tensors, attributes of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from as_written import Written, compiled, everything, parameters, run
from torch.nn import Parameter

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate

State = dict[str, Any]
Hold = Callable[[Any, list[Parameter]], Any]


class Normed(Written):
    """Reads a value, so that it runs on copies; `hold` says what it holds besides, `use` what it does in a step."""

    def __init__(self, params: Any, hold: Hold | None = None, use: Callable[..., Any] | None = None) -> None:
        super().__init__(params)
        self.use = use
        if hold is not None:
            self.held = hold(self, self.param_groups[0]["params"])

    def update(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        p.sub_(g / float(g.norm() + 1), alpha=group["lr"])
        if self.use is not None:
            self.use(self, p, g, state)


def _in_states(make: Callable[[Parameter, int], Any]) -> Hold:
    return lambda o, params: [o.state[p].update(make(p, i)) for i, p in enumerate(params)] and None


VIEWS: dict[str, Hold] = {
    "p.data": lambda o, params: [p.data for p in params],
    "one": lambda o, params: params[0].detach(),
    "reshaped": lambda o, params: {"rows": [p.detach().reshape(-1) for p in params]},
    "array": lambda o, params: [params[0].detach().numpy()],
    "state": _in_states(lambda p, i: {"z": p.data}),
}


def in_fp32() -> list[Parameter]:
    return [Parameter(torch.ones(6, 8)), Parameter(torch.ones(8))]


@pytest.mark.parametrize("hold", VIEWS)
@pytest.mark.parametrize("unsupported", ["twin", "error"])
def test_a_view_of_a_parameter_that_compile_moves_is_rejected(hold: str, unsupported: str) -> None:
    params = in_fp32()
    optimizer = Normed(params, VIEWS[hold])
    with pytest.raises(UnsupportedUpdate, match=r"Normed cannot be compiled: it holds a view of a float32 parameter"):
        collage_neuron.compile(optimizer, unsupported=unsupported)
    assert type(optimizer) is Normed
    assert all(p.dtype == torch.float32 for p in params)


def test_a_captured_optimizer_that_holds_a_view_is_rejected_too() -> None:
    params = in_fp32()
    optimizer: Any = torch.optim.AdamW(params)
    optimizer.masters = [p.data for p in params]
    with pytest.raises(UnsupportedUpdate, match="AdamW cannot be compiled: it holds a view"):
        collage_neuron.compile(optimizer)


@pytest.mark.parametrize("hold", VIEWS)
def test_the_views_are_known_when_the_model_was_compiled_before(hold: str) -> None:
    model = torch.nn.Linear(8, 6)
    optimizer = Normed(model.parameters(), VIEWS[hold])
    collage_neuron.compile(model)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
    with pytest.raises(UnsupportedUpdate, match="it holds a view of a float32 parameter"):
        optimizer.step()


def test_parameters_themselves_may_be_held() -> None:
    params = in_fp32()
    collage_neuron.compile(Normed(params, lambda o, ps: {"all": list(ps), "first": ps[0]}))


def _common(shared: torch.Tensor) -> Hold:
    return _in_states(lambda p, i: {"m": shared} if p.shape == shared.shape else {})


def _twice(p: Parameter, i: int) -> State:
    m = torch.zeros_like(p)
    return {"m": m, "n": m.view(p.shape)}


PARAM, M = "a parameter", r"optimizer.state\[p\]\['m'\]"
SHARED: dict[str, tuple[Hold, str]] = {
    "two names": (_in_states(_twice), rf"{M} and optimizer.state\[p\]\['n'\] share memory"),
    "one for all": (_common(torch.zeros(16)), f"{M} and {M} share memory"),
    "the parameter": (_in_states(lambda p, i: {"m": p}), f"{PARAM} and {M} share memory"),
    "another": (lambda o, ps: [o.state[p].update(m=ps[2]) for p in ps] and None, f"{PARAM} and {M} share memory"),
    "a list": (lambda o, ps: [o.state[p].setdefault("m", torch.zeros_like(p)) for p in ps], "it holds a view of a"),
    "rows": (lambda o, ps: [o.state[p].setdefault("m", torch.zeros_like(p))[:1] for p in ps[:2]], "it holds a view of"),
}


@pytest.mark.parametrize("kind", SHARED)
def test_states_that_the_constructor_lets_share_memory_are_rejected(kind: str) -> None:
    hold, match = SHARED[kind]
    for dtype in (torch.bfloat16, torch.float32):
        params = [Parameter(torch.ones(16, dtype=dtype)) for _ in range(3)]
        with pytest.raises(UnsupportedUpdate, match=match):
            collage_neuron.compile(Normed(params, hold), strategy="plus")


@pytest.mark.parametrize("hold", [lambda p, m: p.data, lambda p, m: m, lambda p, m: p.grad])
def test_what_other_code_lets_the_optimizer_hold_is_rejected_by_the_next_step(hold: Callable[..., Any]) -> None:
    optimizer, params = compiled(lambda ps: Normed(ps, use=lambda o, p, g, s: s.setdefault("m", g.clone())), "plus")
    run(optimizer, 3)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.late = [hold(params[0], optimizer.state[params[0]]["m"])]
    before = everything(optimizer)
    with pytest.raises(UnsupportedUpdate, match=r"before step.. .* and a tensor that the optimizer holds elsewhere"):
        optimizer.step()
    assert everything(optimizer) == before


def _keep_gradient(o: Any, p: Any, g: torch.Tensor, state: State) -> None:
    o.grads = [*getattr(o, "grads", []), g]


def _keep_in_state(o: Any, p: Any, g: torch.Tensor, state: State) -> None:
    state.setdefault("g", [g])


def _keep_on_parameter(o: Any, p: Any, g: torch.Tensor, state: State) -> None:
    p.last = g


def _keep_state(o: Any, p: Any, g: torch.Tensor, state: State) -> None:
    o.moments = [*getattr(o, "moments", []), state.setdefault("m", torch.zeros_like(p))]


@pytest.mark.parametrize("use", [_keep_gradient, _keep_in_state, _keep_on_parameter, _keep_state])
def test_a_copy_that_the_step_keeps_is_rejected(use: Callable[..., Any]) -> None:
    optimizer, _ = compiled(lambda ps: Normed(ps, use=use), "plus")
    what = "a gradient" if use is not _keep_state else r"optimizer.state\[p\]\['m'\]"
    with pytest.raises(UnsupportedUpdate, match=f"after step.. {what} and a tensor that the optimizer holds elsewhere"):
        run(optimizer, 1)


class Pair(NamedTuple):
    first: Any
    second: Any


def _in_array(x: Any, y: Any) -> Any:
    array = np.empty(2, dtype=object)
    array[:] = [x, [y]]
    return array


FROZEN: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda x, y: (x, y),
    "of tuples": lambda x, y: ((y, (x,)),),
    "of a list": lambda x, y: ((y, [x]),),
    "named": Pair,
    "set": lambda x, y: frozenset([x, y]),
    "mapping": lambda x, y: MappingProxyType({"x": x, "y": y}),
    "mapping of tuples": lambda x, y: MappingProxyType({"x": (x, y)}),
    "values": lambda x, y: {"x": x, "y": y}.values(),
    "array": _in_array,
}
KEPT: dict[str, tuple[Callable[[Any, Any, State], Any], str]] = {
    "state": (lambda p, g, state: state["m"], M),
    "gradient": (lambda p, g, state: g, "a gradient"),
    "view": (lambda p, g, state: p.data, "a parameter"),
}


@pytest.mark.parametrize("what", KEPT)
@pytest.mark.parametrize("kind", FROZEN)
def test_a_copy_in_what_cannot_change_is_rejected(kind: str, what: str) -> None:
    """The step that made the pair would have one tensor in two places, and the next step two."""
    kept, named = KEPT[what]

    def use(o: Any, p: Any, g: torch.Tensor, state: State) -> None:
        state.setdefault("m", torch.zeros_like(p)).add_(g)
        if "pair" not in state:
            state["pair"] = FROZEN[kind](kept(p, g, state), torch.zeros(3))

    optimizer, _ = compiled(lambda ps: Normed(ps, use=use), "plus")
    before = everything(optimizer)
    with pytest.raises(UnsupportedUpdate, match=f"after step.. {named} and a tensor that the optimizer holds"):
        run(optimizer, 1)
    assert everything(optimizer) == before


@pytest.mark.parametrize("kind", FROZEN)
def test_none_of_these_is_captured(kind: str) -> None:
    class Captured(Written):
        def update(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
            m = state.setdefault("m", torch.zeros_like(p)).add_(g)
            state.setdefault("pair", FROZEN[kind](m, torch.zeros(3)))
            p.sub_(m, alpha=0.1)

    with pytest.raises(UnsupportedUpdate, match=r"cannot be (compiled|captured)"):
        collage_neuron.compile(Captured(parameters(torch.bfloat16)), unsupported="error")


@pytest.mark.parametrize("kind", [kind for kind in FROZEN if kind != "set"])
def test_a_parameter_in_what_cannot_change_is_its_copy_during_steps(kind: str) -> None:
    def use(o: Any, p: Any, g: torch.Tensor, state: State) -> None:
        pair = state.setdefault("pair", FROZEN[kind](p, torch.zeros(3)))
        assert any(x is p for x in leaves(pair))

    def leaves(x: Any) -> list[Any]:
        x = list(x.values()) if isinstance(x, MappingProxyType) else x
        return [x] if isinstance(x, torch.Tensor) else [z for y in x for z in leaves(y)]

    optimizer, params = compiled(lambda ps: Normed(ps, use=use), "plus")
    run(optimizer, 3)
    assert all(any(x is p for x in leaves(optimizer.state[p]["pair"])) for p in params)


def _state_called_param(o: Any, p: Any, g: torch.Tensor, state: State) -> None:
    state.setdefault("param", torch.zeros_like(p)).add_(g)


@pytest.mark.parametrize("shape", ["alike", "other"])
def test_a_state_called_param_is_rejected(shape: str) -> None:
    def other(o: Any, p: Any, g: torch.Tensor, state: State) -> None:
        state.setdefault("param", torch.zeros(2)).add_(1)

    optimizer, params = compiled(lambda ps: Normed(ps, use=_state_called_param if shape == "alike" else other))
    for p in params:
        p.grad = torch.ones_like(p)
    before = everything(optimizer)
    with pytest.raises(UnsupportedUpdate, match="a state called 'param'"):
        optimizer.step()
    assert everything(optimizer) == before


class CalledParam(Written):
    name = "param"

    def update(self, p: Any, g: torch.Tensor, state: State, group: State) -> None:
        p.sub_(state.setdefault(self.name, torch.zeros_like(p)).add_(g), alpha=0.1)


class CalledGrad(CalledParam):
    name = "grad"


@pytest.mark.parametrize("make", [CalledParam, CalledGrad])
def test_a_captured_update_has_no_state_of_these_names(make: Callable[..., Any]) -> None:
    optimizer = make(parameters(torch.bfloat16))
    with pytest.raises(UnsupportedUpdate, match=f"a state called '{make.name}', a name that"):  # type: ignore[attr-defined]
        collage_neuron.compile(optimizer, unsupported="error")


CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "pop": lambda params: params.pop(),
    "append": lambda params: params.append(Parameter(torch.zeros(3))),
    "slice": lambda params: params.__setitem__(slice(None), params[:1]),
    "reverse": lambda params: params.reverse(),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_list_of_parameters_that_is_changed_in_place_is_rejected(kind: str) -> None:
    def use(o: Any, p: Any, g: torch.Tensor, state: State) -> None:
        params = o.param_groups[0]["params"]
        if p is params[-1] and len(params) == 5:
            CHANGES[kind](params)

    optimizer, params = compiled(lambda ps: Normed(ps, use=use))
    with pytest.raises(UnsupportedUpdate, match=r"changes the list param_groups\[0\]\['params'\]"):
        run(optimizer, 1)
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, params))


def test_what_a_step_does_to_the_parameter_object_arrives() -> None:
    def use(o: Any, p: Any, g: torch.Tensor, state: State) -> None:
        if hasattr(p, "warm"):
            del p.warm
        p.count += 1
        p.requires_grad_(False)

    def hold(o: Any, params: list[Parameter]) -> None:
        for p in params:
            p.warm, p.count = True, torch.zeros(3)  # type: ignore[attr-defined]

    optimizer, params = compiled(lambda ps: Normed(ps, hold, use))
    run(optimizer, 2)
    assert not any(hasattr(p, "warm") or p.requires_grad for p in params)
    assert [p.count.tolist() for p in params] == [[2.0] * 3] * 5  # type: ignore[attr-defined]
    before = [copy.deepcopy(vars(p)) for p in params]

    def failing(o: Any, p: Any, g: torch.Tensor, state: State) -> None:
        use(o, p, g, state)
        raise ZeroDivisionError("in the middle")

    optimizer.use = failing
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        run(optimizer, 1)
    assert all(torch.equal(vars(p)["count"], b["count"]) for p, b in zip(params, before, strict=True))


def test_bytes_of_a_state_that_begins_like_the_parameters_words() -> None:
    def use(o: Any, p: Any, g: torch.Tensor, state: State) -> None:
        state.setdefault("param_ema", torch.zeros_like(p))

    optimizer, _ = compiled(lambda ps: Normed(ps[:1], use=use), "plus")
    run(optimizer, 1)
    assert collage_neuron.bytes_per_parameter(optimizer) == 10.0


def test_a_tensor_whose_memory_was_given_back_is_not_read() -> None:
    """As the buffers of FSDP1 are, between steps: reading one ends the process."""

    class Holds(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.buffer = torch.ones(64)
            self.buffer.untyped_storage().resize_(0)

    p = torch.nn.Parameter(torch.ones(4))
    optimizer = collage_neuron.compile(Holds([p]))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.buffer.untyped_storage().nbytes() == 0


@pytest.mark.parametrize(
    "share", [lambda p: p.data, lambda p: p.detach().view(p.shape), lambda p: p.data.flatten().view(p.shape)]
)
def test_a_gradient_in_the_memory_of_what_is_stored_is_rejected(share: Callable[..., Any]) -> None:
    """The step would write the gradient back there, over what it has stored."""
    optimizer, params = compiled(lambda ps: Normed(ps, use=lambda o, p, g, s: s.setdefault("m", g.clone())), "bf16")
    run(optimizer, 2)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = share(p)
    with pytest.raises(UnsupportedUpdate, match=r"before step\(\) a gradient and a parameter or a state share memory"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


def test_states_that_other_code_lets_overlap_are_rejected() -> None:
    optimizer, params = compiled(lambda ps: Normed(ps, use=lambda o, p, g, s: s.setdefault("m", g.clone())), "plus")
    run(optimizer, 2)
    state = optimizer.state[params[0]]
    flat = torch.zeros(state["m"].numel() + 1)
    state["m"] = flat[1:].view_as(state["m"])
    state["n"] = flat[:-1].view_as(state["m"])
    with pytest.raises(
        UnsupportedUpdate, match=r"optimizer.state\[p\]\['m'\] and optimizer.state\[p\]\['n'\] share memory"
    ):
        run(optimizer, 1)


def test_gradients_may_share_one_buffer_with_each_other() -> None:
    optimizer, params = compiled(lambda ps: Normed(ps), "plus")
    flat = torch.zeros(sum(p.numel() for p in params), dtype=torch.bfloat16)
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view(p.shape)
    optimizer.step()


def test_gradients_that_share_elements_are_rejected() -> None:
    """Each copy would have one of its own, and what the step writes to the one would not be in the other."""
    optimizer, params = compiled(lambda ps: Normed(ps), "plus")
    for p in params:
        p.grad = torch.ones_like(p)
    flat = torch.ones(2 * params[0].numel(), dtype=torch.bfloat16)
    params[0].grad = flat[: params[0].numel()].view(params[0].shape)
    params[1].grad = flat[1 : 1 + params[1].numel()].view(params[1].shape)
    with pytest.raises(UnsupportedUpdate, match="a gradient and another gradient share memory"):
        optimizer.step()
