"""Memory that is two things, set between steps: a step is as in plain torch, or rejected before anything changes.

torch writes to both. The rule is one for recorded, traced and written steps (`states/shared_memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from case_arena import Ball
from torch.nn import Parameter
from traced_updates import error

import collage_neuron
from collage_neuron.numerics.formats import is_component


class AsWritten(Ball):
    """The same, which is not traced: it looks at a number that NumPy computes."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=0.0 * float(g.detach().numpy().sum()))
        super().update(p, g, state, group)


MAKES: dict[str, Callable[..., Any]] = {
    **{
        name: partial(getattr(torch.optim, name), **options)
        for name, options in (
            ("ASGD", {}), ("Adadelta", {}), ("Adagrad", {}), ("Adam", {"fused": True}), ("AdamW", {"foreach": True}),
            ("Adamax", {}), ("NAdam", {}), ("RAdam", {}), ("RMSprop", {"foreach": True}), ("Rprop", {}),
            ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        )
    },
    "Ball": Ball,
    "AsWritten": AsWritten,
}  # fmt: skip
"""The classes whose steps are recorded, and one that is traced, and one whose steps run as written."""

Change = Callable[[Any, Any, dict[str, Any], str], object]
"""Of the optimizer, two parameters, the state of the first, and the name of what is in it."""


def _in_state(value: Callable[[Any, Any], Any]) -> Change:
    return lambda o, pair, state, name: state.update({name: value(*pair)})


def _of_other(o: Any, pair: Any, state: dict[str, Any], name: str, view: bool | None) -> None:
    if view is None:
        o.state[pair[1]][name].data = state[name].data
    else:
        o.state[pair[1]][name] = state[name].detach() if view else state[name]


def _with_its_id(o: Any, pair: Any, state: dict[str, Any], name: str) -> None:
    """The new object may get the id of the one that goes."""
    state[name] = None
    state[name] = o.state[pair[1]][name].detach()


def _in_one_buffer(o: Any, pair: Any, state: dict[str, Any], name: str, what: str) -> None:
    """Rows of the second begin in the middle of the first."""
    n = pair[0].numel()
    flat = torch.cat([getattr(p, what).flatten() for p in pair])
    for p, part in zip(pair, (flat[:n], flat[3 : n + 3]), strict=True):
        setattr(p, what, part.view_as(p))


def _in_two_storages(first: torch.Tensor, second: torch.Tensor) -> None:
    """Two arrays of NumPy, which are storages of torch's, over bytes that overlap."""
    whole = np.zeros(2 * first.nbytes, np.uint8)
    for x, start in ((first, 0), (second, first.nbytes // 2)):
        own = torch.from_numpy(whole[start : start + x.nbytes]).view(x.dtype).view(x.shape)
        x.data = own.copy_(x.detach())


WRITTEN: dict[str, Change] = {
    "a state is its gradient, seen anew": _in_state(lambda p, q: p.grad.detach()),
    "a state is its parameter, seen anew": _in_state(lambda p, q: p.detach()),
    "a state is another parameter": _in_state(lambda p, q: q.detach()),
    "two parameters have one state": lambda o, pair, state, name: o.state.__setitem__(pair[1], state),
    "two states are one memory": partial(_of_other, view=True),
    "two states are one memory, by another object": _with_its_id,
    "two states are one memory, by their data": partial(_of_other, view=None),
    "two parameters are one memory of two storages": lambda o, pair, state, name: setattr(
        pair[0], "data", torch.utils.dlpack.from_dlpack(pair[1].detach())
    ),
    "two parameters overlap in two storages": lambda o, pair, state, name: _in_two_storages(*pair),
    "two states overlap in two storages": lambda o, pair, state, name: _in_two_storages(
        state[name], o.state[pair[1]][name]
    ),
    "two parameters are one memory": lambda o, pair, state, name: setattr(pair[0], "data", pair[1].data),
    "two parameters overlap": partial(_in_one_buffer, what="data"),
    "a gradient is its parameter": lambda o, pair, state, name: setattr(pair[0], "grad", pair[0].detach()),
    "a gradient is another parameter": lambda o, pair, state, name: setattr(pair[0], "grad", pair[1].detach()),
    "a gradient is a state of another": lambda o, pair, state, name: setattr(
        pair[1], "grad", state[name].detach().view(pair[1].dtype)
    ),
}
ONE_OBJECT: dict[str, Change] = {
    "a state is its gradient": _in_state(lambda p, q: p.grad),
    "a state is its parameter": _in_state(lambda p, q: p),
    "two states are one": partial(_of_other, view=False),
}
"""What code itself does that is not recorded: one object is one value."""
READ: dict[str, Change] = {
    "two gradients are one": lambda o, pair, state, name: setattr(pair[1], "grad", pair[0].grad),
    "two gradients are one memory": lambda o, pair, state, name: setattr(pair[1], "grad", pair[0].grad.detach()),
    "two gradients overlap": partial(_in_one_buffer, what="grad"),
}


def played(name: str, change: Change, strategy: str | None, is_rejected: bool) -> tuple[Any, ...]:
    """The values after some steps, with a change before the fifth, if it is not rejected."""
    draws = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(4, 3, generator=draws).bfloat16().float()) for _ in range(3)]
    before, optimizer = [p.detach().clone() for p in params], MAKES[name](params, lr=0.01)
    if strategy is not None:
        collage_neuron.compile(optimizer, strategy=strategy, verbose=False)
    for t in range(1, 9):
        for p in params:
            p.grad = torch.randn(4, 3, generator=draws).bfloat16().to(p.dtype)
        state = optimizer.state[params[0]]
        own = (k for k, x in state.items() if x.dim() and not is_component(k, state))
        changing = partial(change, optimizer, params[:2], state, next(own, ""))
        if t == 5 and not is_rejected:
            changing()
        if t == 5 and is_rejected and strategy is not None:
            check_rejected(changing, params, optimizer)
        optimizer.step()
    found = [p.detach() if strategy is None else collage_neuron.exact_value(optimizer, p) for p in params]
    return found, before


def check_rejected(changing: Callable[[], object], params: list[Any], optimizer: Any) -> None:
    own = [(p, p.data, p.grad, dict(optimizer.state[p])) for p in params]
    data = [(x, x.data) for p in params for x in optimizer.state[p].values()]
    changing()
    tensors = [x for p in params for x in (p, p.grad, *optimizer.state[p].values())]
    before = [x.detach().clone() for x in tensors]
    for _ in range(2):  # it is looked for again
        with pytest.raises(ValueError, match=r"share memory.*nothing was updated"):
            optimizer.step()
    assert all(map(torch.equal, tensors, before))
    for x, before in data:
        x.data = before
    for p, values, grad, state in own:
        p.data, p.grad, optimizer.state[p] = values, grad, state


RECORDED = sorted(MAKES.keys() - {"Ball", "AsWritten"})
CASES = [
    *((name, change, True) for change in WRITTEN for name in MAKES),
    *((name, change, name in RECORDED) for change in ONE_OBJECT for name in MAKES),
    *((name, change, False) for change in READ for name in MAKES),
]


@pytest.mark.sampled(of=4)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("strategy", ["plus", "split433"])
@pytest.mark.parametrize(("name", "change", "is_rejected"), CASES)
def test_as_in_torch_or_rejected(name: str, change: str, is_rejected: bool, strategy: str) -> None:
    play = partial(played, name, (WRITTEN | ONE_OBJECT | READ)[change], is_rejected=is_rejected)
    (found, _), (exact, start) = play(strategy), play(None)
    assert error(found, exact, start) < {"plus": 2**-6, "split433": 2**-8}[strategy]


def test_one_object_is_not_two_states_in_codes() -> None:
    """Each would be read with scales of its own."""
    params = [Parameter(torch.ones(4, 3)) for _ in range(2)]
    optimizer = collage_neuron.compile(Ball(params, lr=0.01), strategy="split422", verbose=False)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    optimizer.state[params[0]]["m"] = optimizer.state[params[1]]["m"]
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step()


BESIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "meta": lambda x: x.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "mkldnn": lambda x: x.to_mkldnn(),
}
"""Tensors without addresses, in the state of a third parameter."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("what", "name"),
    [("count", "AdamW"), ("()", "SGD"), ("()", "Ball"), *product(BESIDE, ("Ball", "AsWritten"))],
)
def test_other_data_is_noticed_whatever_a_tensor_is_or_lies_beside(what: str, name: str) -> None:
    params = [Parameter(torch.ones(() if what == "()" else (4, 3))) for _ in range(3)]
    optimizer = collage_neuron.compile(MAKES[name](params, lr=0.01), verbose=False)
    for t in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        if t == 0 and what in BESIDE:
            optimizer.state[params[2]]["other"] = BESIDE[what](torch.ones(4, 4))
    first, second = (optimizer.state[p] for p in params[:2])
    key = next(k for k in first if not is_component(k, first) and (what == "count") == (k == "step"))
    first[key].data = second[key].data
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step()


@pytest.mark.parametrize("name", ["SGD", "Ball"])
@pytest.mark.parametrize("what", ["two states", "a state and a weight", "two weights"])
def test_other_data_is_noticed_on_xla(what: str, name: str, xla: torch.device) -> None:
    """By storages: to ask for an address there may end the process."""
    params = [Parameter(torch.ones(4, 3, device=xla)) for _ in range(2)]
    optimizer = collage_neuron.compile(MAKES[name](params, lr=0.01), verbose=False, strategy="split433")
    for t in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
        if t < 3:
            optimizer.step()
    states = [optimizer.state[p] for p in params]
    first, second = (next(x for k, x in s.items() if x.dim() and not is_component(k, s)) for s in states)
    one, other = params if what == "two weights" else (first, second if what == "two states" else params[1])
    one.data = other.data
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step()


def test_parts_of_a_buffer_on_xla_are_told_apart_between_steps(xla: torch.device) -> None:
    flat, params = torch.ones(8, device=xla).bfloat16(), [Parameter(torch.ones(4, device=xla).bfloat16()) for _ in "ab"]
    optimizer = collage_neuron.compile(torch.optim.SGD(params, lr=0.1), verbose=False)
    for p in params:
        p.grad = torch.ones_like(p)
    params[0].data, params[1].data = flat[:4], flat[4:]
    optimizer.step()
    params[0].data, params[1].data = flat[:4], flat[2:6]
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["Ball", "AsWritten"])
def test_a_state_that_was_its_gradient_is_not_taken_for_apart_from_it(name: str) -> None:
    p = Parameter(torch.ones(4, 3))
    optimizer = collage_neuron.compile(MAKES[name]([p], lr=0.01), verbose=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    key = next(k for k, x in optimizer.state[p].items() if x.dim())
    own = optimizer.state[p][key] = p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    p.grad = own.detach()
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["SGD", "Ball", "AsWritten"])
def test_what_has_no_gradient_may_have_the_memory_of_something_else(name: str) -> None:
    params = [Parameter(torch.full((4, 3), 2.0)) for _ in range(2)]
    optimizer = collage_neuron.compile(MAKES[name](params, lr=0.5), verbose=False)
    for _ in range(3):
        params[0].grad, params[1].data = torch.ones_like(params[0]), params[0].data
        optimizer.step()
    assert torch.equal(*params)
    assert not params[0].eq(2).any()


@pytest.mark.parametrize("how", ["held", "overlapping", "with room", "expanded", "apart"])
def test_parameters_on_xla_that_would_be_trained_apart_are_rejected(how: str, xla: torch.device) -> None:
    """By torch's notes of views, by sizes, and by how many refer to a storage."""
    flat = torch.ones(8, device=xla)
    held = [flat] if how == "held" else []
    parts = {"overlapping": (flat[:6], flat[2:]), "with room": (flat[:4], flat[2:6].view(2, 2))}
    parts |= {"expanded": (flat[:1].expand(8) * 1, torch.ones(1, device=xla))}
    params = [Parameter(x) for x in parts.get(how, (flat[:4], flat[4:]))]
    if how == "expanded":
        params[1].data = params[1].data.expand(6)
    del flat, parts
    if how == "apart":
        collage_neuron.compile(torch.optim.SGD(params, lr=0.1), verbose=False)
        return
    with pytest.raises(ValueError, match="shares its memory with"):
        collage_neuron.compile(torch.optim.SGD(params, lr=0.1), verbose=False)
    assert len(held) == (how == "held")
