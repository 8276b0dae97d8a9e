"""What an optimizer holds besides its parameters and states: aliases, views, arrays, lists; as in plain fp32 torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from as_written import Written, compiled, equal, everything, in_fp32, run, values
from torch import Tensor
from torch.nn import Parameter

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate

State = dict[str, Any]
Hold = Callable[[Any, list[Parameter]], Any]


class Normed(Written):
    """Reads a value, so that it runs as written; `hold` says what it holds besides, `use` what it does in a step."""

    hold: Hold | None = None
    use: Callable[..., Any] | None = None

    def __init__(self, params: Any, hold: Hold | None = None, use: Callable[..., Any] | None = None) -> None:
        super().__init__(params)
        if use is not None:
            self.use = use
        self.hold = hold or type(self).hold
        if self.hold is not None:
            self.held = self.hold(self, self.param_groups[0]["params"])

    def update(self, p: Any, g: Tensor, state: State, group: State) -> None:
        p.sub_(g / float(g.norm() + 1), alpha=group["lr"])
        use = vars(self).get("use") or type(self).use
        if use is not None:
            use(self, p, g, state)


# --- what the step keeps, and uses again ------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


def _in_array(x: Any, y: Any) -> Any:
    array = np.empty(2, dtype=object)
    array[:] = [x, [y]]
    return array


KEEPING: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda x, y: x, lambda kept: kept),
    "list": (lambda x, y: [x, y], lambda kept: kept[0]),
    "tuple": (lambda x, y: ((y, (x,)),), lambda kept: kept[0][1][0]),
    "named": (Pair, lambda kept: kept.first),
    "mapping": (lambda x, y: MappingProxyType({"x": (x, y)}), lambda kept: kept["x"][0]),
    "array": (_in_array, lambda kept: kept[0]),
    "closure": (lambda x, y: lambda: x, lambda kept: kept()),
    "bound": (lambda x, y: x.view_as, lambda kept: kept.__self__),
}
"""Ways to keep a tensor, and to have it again."""

OF: dict[str, Callable[[Any, Tensor, State], Tensor]] = {
    "parameter": lambda p, g, state: p,
    "alias": lambda p, g, state: p.data,
    "view": lambda p, g, state: p.detach()[:1] if p.dim() else p.detach(),
    "state": lambda p, g, state: state["m"],
    "part of a state": lambda p, g, state: state["m"].flatten()[1:] if p.numel() > 1 else state["m"],
    "gradient": lambda p, g, state: g,
}
PLACES: dict[str, Callable[[Any, Any], State]] = {
    "attribute": lambda o, p: o.__dict__.setdefault("places", {}).setdefault(p, {}),
    "state": lambda o, p: o.state[p],
    "parameter": lambda o, p: vars(p),
    "group": lambda o, p: o.param_groups[0].setdefault("places", {}).setdefault(p, {}),
}


def _keeps(of: str, how: str, where: str) -> Callable[..., Any]:
    keep, again = KEEPING[how]

    def use(o: Any, p: Any, g: Tensor, state: State) -> None:
        state.setdefault("m", torch.zeros_like(p)).add_(g)
        place = PLACES[where](o, p)
        if "kept" in place:
            x = again(place["kept"])
            assert x.dtype == p.dtype
            p.sub_(1e-2 * float(x.norm()))  # what it holds now
            if of != "gradient":
                x.mul_(0.9)  # what is written to it
        else:
            place["kept"] = keep(OF[of](p, g, state), torch.zeros(3))

    return use


@pytest.mark.parametrize("of", OF)
def test_what_the_step_keeps_is_what_it_is_in_fp32(of: str) -> None:
    for how, where in zip(KEEPING, [*PLACES, *PLACES], strict=True):
        make = type("Kept", (Normed,), {"use": staticmethod(_keeps(of, how, where))})
        optimizer, params = compiled(make, "fp32")
        run(optimizer, 4)
        assert equal(values(optimizer, params), in_fp32(make, 4)), how
    optimizer, params = compiled(make, "split433")
    run(optimizer, 4)
    for found, exact in zip(values(optimizer, params), in_fp32(make, 4), strict=True):
        assert float((found - exact).norm()) <= 4 * 2**-14 * float(exact.norm() + 1)


def _flat(o: Any, p: Any, g: Tensor, state: State) -> None:
    """States that are views of one buffer, of which the whole is used."""
    if "m" not in state:
        state["flat"] = torch.zeros(2 * p.numel())
        state["m"], state["n"] = (x.view(p.shape) for x in state["flat"].split(p.numel()))
    state["m"].add_(g)
    state["flat"].mul_(0.5)
    p.sub_(state["m"] + state["n"].add_(1e-3))


def _numpy(o: Any, p: Any, g: Tensor, state: State) -> None:
    """A state that numpy writes, through an array of it and a memoryview."""
    state.setdefault("m", torch.zeros_like(p))
    array = state.setdefault("array", state["m"].numpy()[...])
    state.setdefault("view", memoryview(array))
    array[...] += g.numpy()
    p.sub_(state["m"])


def _two_names(o: Any, p: Any, g: Tensor, state: State) -> None:
    if not state:
        state["a"] = state["b"] = torch.zeros_like(p)
    state["a"].add_(g)
    p.sub_(state["b"])


def _alias_as_state(o: Any, p: Any, g: Tensor, state: State) -> None:
    z = state.setdefault("z", p.data)
    z.sub_(g)
    p.mul_(0.99)


def _last_gradient(o: Any, p: Any, g: Tensor, state: State) -> None:
    """As MARS: the difference to the last gradient, which is kept itself."""
    p.sub_(g - state.get("last", torch.zeros_like(g)))
    state["last"] = g


def _other_data(o: Any, p: Any, g: Tensor, state: State) -> None:
    p.data = p.data - g
    p.data = p.data.clone().mul_(0.99)
    if state.get("m") is not None:
        state["m"].data = state["m"].data + g
    state.setdefault("m", torch.zeros_like(p))
    p.sub_(state["m"])


def _bfloat16(o: Any, p: Any, g: Tensor, state: State) -> None:
    """A state that is bf16 on purpose; numbers that bf16 has, so that its arithmetic is exact."""
    state.setdefault("m", torch.zeros_like(p, dtype=torch.bfloat16)).add_(0.5)
    p.sub_(0.01 * state["m"].float())


USES: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (_flat, _numpy, _two_names, _alias_as_state, _last_gradient, _other_data, _bfloat16)
}  # fmt: skip


@pytest.mark.parametrize("kind", USES)
def test_memory_that_is_shared_is_shared(kind: str) -> None:
    make = type("Shares", (Normed,), {"use": staticmethod(USES[kind])})
    optimizer, params = compiled(make, "fp32")
    run(optimizer, 5)
    assert equal(values(optimizer, params), in_fp32(make, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_view_that_the_constructor_takes_is_one_of_the_fp32_value_in_a_step(dtype: torch.dtype) -> None:
    def use(o: Any, p: Any, g: Tensor, state: State) -> None:
        if p.dim() == 2:
            o.held[p.size(0)].mul_(0.9)

    make = type("Holds", (Normed,), {"use": staticmethod(use)})
    make.hold = staticmethod(lambda o, params: {p.size(0): p.data[:1] for p in params if p.dim() == 2})  # type: ignore[attr-defined]
    if dtype is torch.float32:
        with pytest.raises(UnsupportedUpdate, match="it holds a view of a float32 parameter"):
            collage_neuron.compile(make([Parameter(torch.ones(4, 4))]))
        return
    optimizer, params = compiled(make, "fp32")
    run(optimizer, 4)
    assert equal(values(optimizer, params), in_fp32(make, 4))
    optimizer.held = [
        params[0].data.new_zeros(0).set_(params[0].data.untyped_storage(), 0, (4,), (1,)).view(torch.int16)
    ]
    before = everything(optimizer)
    with pytest.raises(UnsupportedUpdate, match="lies in the memory of a parameter and beyond it, or in another type"):
        run(optimizer, 1)
    optimizer.held = []
    assert everything(optimizer)[:2] == before[:2]


BUFFERS: dict[str, Callable[[Tensor], tuple[list[Tensor], list[Tensor]]]] = {
    "gap": lambda x: ([x[..., 0]], [x[:1, :, 1]]),
    "interleaved": lambda x: ([x[..., 0], x[..., 1]], [x[1:, 1:, 0], x[:1, :, 1]]),
    "one after the other": lambda x: (list(x), [x[0, 1:], x[1, :1]]),
}
"""Parameters in one buffer, and what the optimizer holds of it."""


@pytest.mark.parametrize("kind", BUFFERS)
def test_what_is_held_of_a_buffer_is_part_of_the_parameter_that_has_its_elements(kind: str) -> None:
    def use(o: Any, p: Any, g: Tensor, state: State) -> None:
        for x in o.held:
            p.sub_(x.float().sum() * 0.01)
            x.mul_(0.5)

    def made(dtype: torch.dtype) -> tuple[Any, list[Parameter]]:
        given, held = BUFFERS[kind](torch.arange(24.0).view(2, 6, 2).to(dtype))
        params = [Parameter(x) for x in given]
        return Normed(params, lambda o, ps: held, use), params

    (plain, exact), (optimizer, params) = made(torch.float32), made(torch.bfloat16)
    optimizer = collage_neuron.compile(optimizer, strategy="fp32", validate="off")
    for o in (plain, optimizer):
        run(o, 3)
    assert equal(values(optimizer, params), [p.detach() for p in exact])
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(optimizer.held, plain.held, strict=True))


@pytest.mark.parametrize("also", ["neither", "p", "p.data", "other memory"])
def test_what_is_written_to_an_alias_between_steps_counts(also: str) -> None:
    """And what is written to other elements of the parameter, whether or not torch counts that."""
    make = type("Keeps", (Normed,), {"use": staticmethod(lambda o, p, g, state: state.setdefault("z", p.data))})
    optimizer, params = compiled(make, "fp32")
    plain = make([Parameter(p.detach().float()) for p in params])
    for o in (optimizer, plain):
        run(o, 2)
        p = o.param_groups[0]["params"][0]
        with torch.no_grad():
            if also == "other memory":  # then it is an alias no longer
                p.data = p.detach().clone()
            o.state[p]["z"][:2].mul_(0.5)
            if also in ("p", "p.data"):
                (p if also == "p" else p.data)[2:].fill_(0.5)
        run(o, 2, first=2)
    assert equal(values(optimizer, params), [p.detach() for p in plain.param_groups[0]["params"]])


def test_a_step_that_raises_leaves_what_a_part_is_kept_of() -> None:
    def use(o: Any, p: Any, g: Tensor, state: State) -> None:
        o.held.setdefault(id(p), p.data.flatten()[:1])
        if o.fails and p.dim() == 1:
            p.data = o.other[: p.numel()]
            raise ZeroDivisionError

    optimizer, params = compiled(lambda ps: Normed(ps, lambda o, ps: {}, use), "fp32")
    plain: Any = Normed([Parameter(p.detach().float()) for p in params], lambda o, ps: {}, use)
    for o in (optimizer, plain):
        o.fails, o.other = False, torch.zeros(40)
        run(o, 2)
        if o is optimizer:
            o.fails = True
            with pytest.raises(ZeroDivisionError):
                run(o, 1)
            o.fails = False
        run(o, 2, first=2)
    assert equal(values(optimizer, params), [p.detach() for p in plain.param_groups[0]["params"]])
    assert not optimizer.other.any()


@pytest.mark.parametrize("strategy", ["fp32", "split433"])
def test_a_step_in_a_method_counts_if_a_state_was_put_into_the_parameter(strategy: str) -> None:
    class Sharp(Written):
        def update(self, p: Any, g: Tensor, state: State, group: State) -> None:
            p.sub_(g, alpha=group["lr"])

        @torch.no_grad()
        def up(self) -> None:
            for p in self.param_groups[0]["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad)

        @torch.no_grad()
        def back(self) -> None:
            for p in self.param_groups[0]["params"]:
                p.data = self.state[p]["old"]
            self.step()

    optimizer, params = compiled(Sharp, strategy)
    plain = Sharp([Parameter(p.detach().float()) for p in params])
    for o in (optimizer, plain):
        for p in o.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 0.25)
        for _ in range(2):
            o.up()
            o.back()
    for p, q in zip(params, plain.param_groups[0]["params"], strict=True):
        assert (collage_neuron.exact_value(optimizer, p) - q.detach()).abs().max() <= 2**-22


def test_bytes_count_the_memory_that_is_kept() -> None:
    make = type(
        "Keeps", (Normed,), {"use": staticmethod(lambda o, p, g, state: o.__dict__.setdefault("z", []).append(p.data))}
    )
    p = Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = collage_neuron.compile(make([p]), strategy="plus", verbose=False)
    run(optimizer, 1)
    assert collage_neuron.bytes_per_parameter(optimizer) >= 2 + 2 + 2 + 4


# --- before the first step, and gradients -----------------------------------------------------------------------------


def _in_states(make: Callable[[Parameter, int], Any]) -> Hold:
    return lambda o, params: [o.state[p].update(make(p, i)) for i, p in enumerate(params)] and None


VIEWS: dict[str, Hold] = {
    "p.data": lambda o, params: [p.data for p in params],
    "array": lambda o, params: [params[0].detach().numpy()],
    "state": _in_states(lambda p, i: {"z": p.data}),
}


def of_fp32() -> list[Parameter]:
    return [Parameter(torch.ones(6, 8)), Parameter(torch.ones(8))]


@pytest.mark.parametrize("hold", VIEWS)
def test_a_view_of_a_parameter_that_compile_moves_is_rejected(hold: str) -> None:
    params = of_fp32()
    optimizer = Normed(params, VIEWS[hold])
    with pytest.raises(UnsupportedUpdate, match=r"Normed cannot be compiled: it holds a view of a float32 parameter"):
        collage_neuron.compile(optimizer)
    assert type(optimizer) is Normed
    assert all(p.dtype == torch.float32 for p in params)


def _twice(p: Parameter, i: int) -> State:
    m = torch.zeros_like(p)
    return {"m": m, "n": m.view(p.shape)}


PARAM, M = "a parameter", r"optimizer.state\[p\]\['m'\]"
SHARED: dict[str, tuple[Hold, str]] = {
    "two names": (_in_states(_twice), rf"{M} and optimizer.state\[p\]\['n'\] share memory"),
    "the parameter": (_in_states(lambda p, i: {"m": p}), f"{PARAM} and {M} share memory"),
    "a list": (lambda o, ps: [o.state[p].setdefault("m", torch.zeros_like(p)) for p in ps], "it holds a view of a"),
}


@pytest.mark.parametrize("kind", SHARED)
def test_states_that_the_constructor_lets_share_memory_are_rejected(kind: str) -> None:
    hold, match = SHARED[kind]
    for dtype in (torch.bfloat16, torch.float32):
        params = [Parameter(torch.ones(16, dtype=dtype)) for _ in range(3)]
        with pytest.raises(UnsupportedUpdate, match=match):
            collage_neuron.compile(Normed(params, hold), strategy="plus")


@pytest.mark.parametrize("kind", [PARAM, M])
def test_so_are_those_of_a_class_whose_steps_are_recorded(kind: str) -> None:
    p, q = params = [Parameter(torch.ones(16, dtype=torch.bfloat16)) for _ in range(2)]
    p.grad = q.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(params)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = q if kind == PARAM else optimizer.state[q]["exp_avg"].view(16)
    with pytest.raises(UnsupportedUpdate, match="share memory, and each would have words of its own"):
        collage_neuron.compile(optimizer, strategy="plus")


def test_a_gradient_in_the_memory_of_its_parameter_is_rejected() -> None:
    """Each has fp32 memory of its own during the step."""
    optimizer, params = compiled(lambda ps: Normed(ps, use=lambda o, p, g, s: s.setdefault("m", g.clone())), "bf16")
    run(optimizer, 2)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = p.detach().view(p.shape)
    with pytest.raises(ValueError, match=r"a parameter and a gradient share memory"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


# --- names, lists of parameters and attributes ------------------------------------------------------------------------


def test_a_parameter_that_is_twice_in_a_group_since_the_last_step_is_rejected() -> None:
    optimizer, params = compiled(Normed, "fp32")
    run(optimizer, 1)
    optimizer.param_groups[0]["params"].append(params[0])
    with pytest.raises(ValueError, match="is in the groups twice"):
        run(optimizer, 1)


CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "pop": lambda params: params.pop(0),
    "append": lambda params: params.append(Parameter(torch.zeros(3))),
    "slice": lambda params: params.__setitem__(slice(None), params[:1]),
    "reverse": lambda params: params.reverse(),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_step_may_change_the_list_of_parameters(kind: str) -> None:
    def use(o: Any, p: Any, g: Tensor, state: State) -> None:
        params = o.param_groups[0]["params"]
        if p is params[-1] and len(params) == 5:
            CHANGES[kind](params)

    make = type("Changes", (Normed,), {"use": staticmethod(use)})
    optimizer, params = compiled(make, "fp32")
    plain = make([Parameter(p.detach().float()) for p in params])
    own = list(plain.param_groups[0]["params"])
    for o in (optimizer, plain):
        run(o, 3)
    assert [p.shape for p in optimizer.param_groups[0]["params"]] == [p.shape for p in plain.param_groups[0]["params"]]
    assert equal([collage_neuron.exact_value(optimizer, p) for p in optimizer.param_groups[0]["params"]],
                 [p.detach() for p in plain.param_groups[0]["params"]])  # fmt: skip
    assert len(own) == 5


@pytest.mark.parametrize("reads", [False, True])
def test_a_parameter_that_joins_in_a_step_is_told_to_have_no_fp32_value_in_it(reads: bool) -> None:
    class Joins(Written):
        late = False

        def update(self, p: Any, g: Tensor, state: State, group: State) -> None:
            group["params"] += [new] * (len(group["params"]) == 5 and not self.late)
            p.sub_(g, alpha=group["lr"] * (1 + reads * 0 * float(g.sum())))

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.param_groups[0]["params"] += [new] * (len(self.param_groups[0]["params"]) == 5)

    def joined(late: bool) -> Any:
        optimizer, _ = compiled(Joins, "fp32")
        optimizer.late = late
        return optimizer

    new = Parameter(torch.ones(3).bfloat16())
    new.grad = torch.ones_like(new)
    with pytest.warns(collage_neuron.RoundedWeights, match=r"Joins.step\(\) puts 1 parameters into a group, .* \[3\]"):
        run(joined(late=False), 1)
    new = Parameter(torch.ones(3).bfloat16())
    new.grad = torch.ones_like(new)
    run(joined(late=True), 1)


def test_what_a_step_does_to_the_parameter_object_arrives() -> None:
    def use(o: Any, p: Any, g: Tensor, state: State) -> None:
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

    def failing(o: Any, p: Any, g: Tensor, state: State) -> None:
        use(o, p, g, state)
        raise ZeroDivisionError("in the middle")

    optimizer.use = failing
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        run(optimizer, 1)
    assert all(torch.equal(vars(p)["count"], b["count"]) for p, b in zip(params, before, strict=True))


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
