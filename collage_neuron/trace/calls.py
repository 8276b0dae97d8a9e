"""The operations of a step that wait: a list of calls, which is compared with that of an earlier step, and can be run.

Each placeholder has a number, its place, in the order in which the step meets it. A call is written down as what it
calls, with places for tensors, nothing for Python's numbers (which go into a vector of the step) and all else as it is;
so two steps do the same if their calls are equal, whatever their numbers are. Whatever has to be known before the
step's end (`.item()`, an operation that is not torch's own, memory) makes `fill` run all calls, in order, on real
memory: from there the step runs as written, with the tensor objects that it has already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from collage_neuron.passes.capture.recorder import is_constant_op
from collage_neuron.passes.capture.results import result_without_data
from collage_neuron.torch_privates import DispatchMode, schema, without_modes
from collage_neuron.trace.placeholders import has_value, placeholder, set_inside, wait

aten = torch.ops.aten

NUMBER = None
"""How a call has a number: its value is in the vector of the step."""


class Geometry(NamedTuple):
    """All that a new placeholder is."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Rule(NamedTuple):
    """How an operation can wait."""

    kind: str
    """What it returns: "new" tensors, a "view", or what it "writes"."""
    is_constant: bool
    """True if its numbers belong to the operation."""
    is_list: bool = False
    """True if it works on lists, or returns several tensors."""


class Call(NamedTuple):
    """One call; in `args` a tensor is its place, a number is `NUMBER`, a list is a list, all else is in a tuple."""

    func: Any
    rule: Rule
    args: list[Any]
    kwargs: dict[str, Any]
    makes: list[Geometry] | None
    """The tensors that it returns, if they are new ones; None if it returns views of its first argument, or that."""
    first: int
    """The place of the first of them."""


@cache
def rule_of(func: Any) -> Rule | None:
    """The rule of an operation; None if it has to run at once: it draws, or gives more than tensors of its own."""
    s = schema(func)
    returns = [str(r.type) for r in s.returns]
    if (
        func.namespace != "aten"
        or torch.Tag.nondeterministic_seeded in func.tags
        or torch.Tag.dynamic_output_shape in func.tags
    ):
        return None
    written = [i for i, a in enumerate(s.arguments) if a.alias_info is not None and a.alias_info.is_write]
    name = s.name.removeprefix("aten::")
    if written:
        in_place = written == [0] and name.endswith("_") and torch.Tag.inplace_view not in func.tags
        return Rule("writes", is_constant_op(func), not returns) if in_place and returns in (["Tensor"], []) else None
    if (
        not returns
        or not {"Tensor", "List[Tensor]"}.issuperset(returns)
        or (len(returns) > 1 and "List[Tensor]" in returns)
    ):
        return None
    if any(r.alias_info is not None for r in s.returns):
        return Rule("view", True) if returns == ["Tensor"] else None
    return Rule("new", is_constant_op(func), returns != ["Tensor"])


def set_data(t: torch.Tensor, value: torch.Tensor) -> None:
    """The operation `t.data = value`."""
    set_inside(t, value)


SETS = Rule("writes", True)


class Expected(NamedTuple):
    """A call as it is looked at first: nearly all have tensors, and one number at most."""

    func: Any
    places: list[int | None]
    """The places of its arguments; None for what is no tensor."""
    number: str | int | None
    """The name or the position of its only number; None if it has none, "" if it has to be compared in full."""
    returns: int
    """The place of what it returns; -1 for its first argument."""

    @classmethod
    def of(cls, call: Call) -> Expected:
        """That of a call."""
        places = [x if type(x) is int else None for x in call.args]
        others = [i for i, x in enumerate(call.args) if type(x) is not int]
        number: str | int | None = None
        if call.rule.is_list or len(others) + len(call.kwargs) > 1:
            number = ""
        elif others:
            number = others[0] if call.args[others[0]] is NUMBER else ""
        elif call.kwargs:
            ((name, x),) = call.kwargs.items()
            number = name if x is NUMBER else ""
        return cls(call.func, places, number, -1 if call.rule.kind == "writes" else call.first)


class Uncompiled(Exception):
    """The calls of a step cannot be launched as they are, for the reason given."""


class Calls(DispatchMode):
    """The calls of one step.

    `values` are its first placeholders; `compute` gives them memory, and values. `spare` are the placeholders that the
    first of the earlier steps has made, which nobody holds any more: they are made once more. `quick` is for that step.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        earlier: Sequence[list[Call]],
        spare: Sequence[torch.Tensor],
        quick: Sequence[Expected],
        compute: Callable[[], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature
        self.tensors = [*values, *spare]
        self._spare = bool(spare)
        self.numbers: list[float] = []
        self.calls: list[Call] = []
        """Those of this step, as long as it does not do what an earlier one did."""
        self.is_filled = False
        self.why = ""
        """Why values were computed."""
        self._set_places()
        self._compute = compute
        self._earlier = list(earlier)
        self._expected: list[Call] = self._earlier[0] if earlier else []
        self._quick = quick
        self._at = 0

    # --- one operation ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # This is called for each operation of each step: the comparison with a call is in one piece.
        if self._spare and self._at < len(self._quick):
            expected, places, number, returns = self._quick[self._at]
            if func is expected and list(map(self._place, map(id, args))) == places:
                if number is None:
                    fits = not kwargs
                elif number != "" and not (type(number) is int and kwargs):
                    x = (
                        args[number]
                        if type(number) is int
                        else kwargs.get(number)
                        if kwargs and len(kwargs) == 1
                        else None
                    )  # type: ignore[arg-type]
                    if fits := type(x) is float:
                        self.numbers.append(x)  # type: ignore[arg-type]
                else:
                    fits = False
                if fits:
                    self._at += 1
                    return args[0] if returns < 0 else self.tensors[returns]
        return self._compared(func, args, kwargs or {})

    def _compared(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_filled:
            return func(*args, **kwargs)
        at = self._at
        if at < len(self._expected):
            call = self._expected[at]
            if call.func is func and self._is_that(call, args, kwargs):
                self._at = at + 1
                return self._result(call, args, kwargs)
        return self._other(func, args, kwargs)

    def _is_that(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Returns True if the arguments are those of an earlier call; adds its numbers to the vector."""
        count, place = len(self.numbers), self._place
        if len(args) == len(call.args):
            for x, known in zip(args, call.args):
                kind = type(known)
                if kind is int:
                    if place(id(x)) != known:
                        break
                elif known is NUMBER:
                    if type(x) is float or type(x) is int:
                        self.numbers.append(x)
                    elif self._is_number(x):
                        self.numbers.append(x.item())
                    else:
                        break
                elif kind is list:
                    if not self._is_list(known, x, call.rule.is_constant):
                        break
                elif known[0] is not type(x) or known[1] != x:
                    break
            else:
                if not kwargs and not call.kwargs:
                    return True
                if self._are_named(call, kwargs or {}):
                    return True
        del self.numbers[count:]
        return False

    def _are_named(self, call: Call, kwargs: Mapping[str, Any]) -> bool:
        known = call.kwargs
        return known.keys() == kwargs.keys() and self._is_list(
            list(known.values()), list(kwargs.values()), call.rule.is_constant
        )

    def _is_list(self, known: list[Any], x: Any, is_constant: bool) -> bool:
        if not isinstance(x, (list, tuple)) or len(x) != len(known):
            return False
        found: list[float] = []
        try:
            if self._written(x, found, is_constant) != known:
                return False
        except Uncompiled:
            return False
        self.numbers += found
        return True

    def _result(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """What a call returns."""
        rule, first = call.rule, call.first
        if rule.kind == "writes":
            return None if rule.is_list else args[0]
        if self._spare:
            return self.tensors[first : first + len(call.makes or ())] if rule.is_list else self.tensors[first]
        made = [self._view(call.func, args, kwargs)] if call.makes is None else [placeholder(*x) for x in call.makes]
        self.tensors += made
        for i, t in enumerate(made, first):
            self._places[id(t)] = i
        return made if rule.is_list else made[0]

    @staticmethod
    def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> torch.Tensor:
        made: torch.Tensor = func(*args, **kwargs or {})
        wait(made)
        return made

    def set_data(self, t: torch.Tensor, value: torch.Tensor) -> bool:
        """`t.data = value`; False if the value does not wait, or is of another shape."""
        there, new = self._places.get(id(t)), self._places.get(id(value))
        if self.is_filled or there is None or new is None or t.shape != value.shape or t.dtype != value.dtype:
            return False
        self._note(Call(set_data, SETS, [there, new], {}, None, self._count()), [])
        set_inside(t, value)
        self._places[id(t)] = new
        return True

    def _count(self) -> int:
        """How many placeholders there are so far."""
        if not self._spare:
            return len(self.tensors)
        calls = self._expected
        return calls[self._at].first if self._at < len(calls) else len(self.tensors)

    def place_of(self, t: object) -> int | None:
        """The place of a tensor; None if it does not wait."""
        return self._place(id(t))

    def places_of(self, objects: Iterable[object]) -> list[int | None]:
        """The places of several objects; None for what does not wait."""
        return list(map(self._place, map(id, objects)))

    # --- one that no earlier step had here --------------------------------------------------------------------------

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._touches((*args, *kwargs.values())):
            return func(*args, **kwargs)
        rule = rule_of(func)
        if rule is None or torch.is_grad_enabled():
            return self._now(f"{func} cannot wait", func, args, kwargs)
        found: list[float] = []
        try:
            written = self._written(args, found, rule.is_constant)
            named = dict(zip(kwargs, self._written(list(kwargs.values()), found, rule.is_constant)))
            makes = self._makes(func, args, kwargs) if rule.kind == "new" else None
            if rule.kind == "writes" and not all(
                type(x) is int for x in (written[0] if type(written[0]) is list else written[:1])
            ):
                raise Uncompiled(f"{func} writes to a tensor that is neither a parameter, a gradient nor a state")
        except Uncompiled as error:
            return self._now(str(error), func, args, kwargs)
        call = Call(func, rule, written, named, makes, self._count())
        self._note(call, found)
        return self._result(call, args, kwargs)

    def _note(self, call: Call, numbers: Sequence[float]) -> None:
        if self._expected and not self._follow(call):
            self.calls, self._expected = self._expected[: self._at], []
            self._use_new(call.first)
        self.numbers += numbers
        if self._expected:
            self._at += 1
        else:
            self.calls.append(call)

    def _follow(self, call: Call) -> bool:
        """Goes on to compare with another earlier step that began as this one, and went on with `call`."""
        for calls in self._earlier:
            if len(calls) > self._at and calls[self._at] == call and calls[: self._at] == self._expected[: self._at]:
                if calls is not self._expected:
                    self._use_new(call.first)
                self._expected = calls
                return True
        return False

    def _use_new(self, count: int) -> None:
        """From here on what calls make is new."""
        if self._spare:
            self._spare = False
            del self.tensors[count:]
            self._set_places()

    def _set_places(self) -> None:
        self._places = dict(zip(map(id, self.tensors), range(len(self.tensors))))
        self._place = self._places.get

    def let_go(self, first: int) -> list[torch.Tensor]:
        """The placeholders from a place on, which this has no more."""
        made = self.tensors[first:]
        del self.tensors[first:]
        return made

    def _now(self, why: str, func: Any, args: Any, kwargs: Any) -> Any:
        self.fill(why)
        return func(*args, **kwargs)

    def _touches(self, given: Sequence[Any]) -> bool:
        return any(self._touches(x) if isinstance(x, (list, tuple)) else id(x) in self._places for x in given)

    def _written(self, given: Sequence[Any], numbers: list[float], is_constant: bool = False) -> list[Any]:
        """How a call has these arguments."""
        found: list[Any] = []
        for x in given:
            place = self._places.get(id(x))
            if place is not None:
                found.append(place)
            elif isinstance(x, (list, tuple)):
                found.append(self._written(x, numbers, is_constant))
            elif type(x) is float or type(x) is int:
                found.append((type(x), x) if is_constant else NUMBER)
                numbers += [] if is_constant else [x]
            elif isinstance(x, torch.Tensor):
                if not self._is_number(x):
                    raise Uncompiled(
                        f"a tensor of shape {list(x.shape)} is neither a parameter, a gradient nor a state"
                    )
                found.append((float, x.item()) if is_constant else NUMBER)
                numbers += [] if is_constant else [x.item()]
            else:
                found.append((type(x), x))
        return found

    @staticmethod
    def _is_number(x: Any) -> bool:
        """Returns True for a tensor of the host that is a number."""
        return isinstance(x, torch.Tensor) and x.dim() == 0 and not x.requires_grad and x.is_cpu

    def _makes(self, func: Any, args: Any, kwargs: Any) -> list[Geometry]:
        """The tensors that a call will return."""
        try:
            out = result_without_data(func, _meta(args), {k: _meta(x) for k, x in kwargs.items()})
        except (RuntimeError, NotImplementedError, TypeError) as error:  # not implemented; what is wrong, torch says
            raise Uncompiled(str(error)) from error
        outs = out if isinstance(out, (list, tuple)) else [out]
        return [Geometry(tuple(x.shape), x.stride(), x.dtype) for x in outs]

    # --- running them -----------------------------------------------------------------------------------------------

    @property
    def known(self) -> list[Call] | None:
        """The calls of an earlier step, if this one was the same."""
        return self._expected if self._expected and self._at == len(self._expected) else None

    def made(self) -> list[Call]:
        """The calls of this step."""
        return self._expected[: self._at] if self._expected else self.calls

    def fill(self, why: str = "its memory is read") -> None:
        """Computes all that waits, in the order of the calls; the rest of the step runs as written."""
        if self.is_filled:
            return
        self.is_filled, self.why, self._spare = True, why, False
        with without_modes(), torch.no_grad():
            for t in self.tensors:
                has_value(t)
            self._compute()
            numbers = iter(self.numbers)
            for call in self.made():
                self._run(call, numbers)
        self.tensors.clear()  # they may be alone with their memory
        self._set_places()

    def _run(self, call: Call, numbers: Any) -> None:
        args, kwargs = (
            self._read(call.args, numbers),
            dict(zip(call.kwargs, self._read(list(call.kwargs.values()), numbers))),
        )
        out = call.func(*args, **kwargs)
        if call.rule.kind == "writes":
            return
        for i, x in enumerate(out if isinstance(out, (list, tuple)) else [out], call.first):
            if self.tensors[i] is not x:
                self.tensors[i].data = x

    def _read(self, written: list[Any], numbers: Any) -> list[Any]:
        """The arguments of a call."""
        return [
            self.tensors[x]
            if type(x) is int
            else next(numbers)
            if x is NUMBER
            else self._read(x, numbers)
            if type(x) is list
            else x[1]
            for x in written
        ]


def _meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return [_meta(y) for y in x] if isinstance(x, (list, tuple)) else x
