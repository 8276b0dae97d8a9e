"""A dry run leaves what its code can reach as it was; what cannot be put back is said, before anything is done."""

from __future__ import annotations

import collections
import enum
import functools
import random
import sys
import tempfile
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from traced_cases import Stepping

import collage_neuron
from collage_neuron.trace import dry_run

CALLS: list[Any] = []
TABLE: dict[str, Any] = {"inner": {"n": 0}}
SEEN: set[Any] = set()
LAST: collections.deque[int] = collections.deque([0], maxlen=2)
RATE = 0.5
DRAWS = random.Random(0)


class Counter:
    """An object of the module, and a class that is written."""

    made = 0

    def __init__(self) -> None:
        self.n = 0


COUNTER = Counter()


def _counting() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


COUNT = _counting()


def _function(times: list[int] = []) -> int:  # noqa: B006  # a default that is written
    times.append(1)
    _function.calls = getattr(_function, "calls", 0) + 1  # type: ignore[attr-defined]
    return len(times)


def _set_rate() -> None:
    global RATE, ADDED
    RATE *= 0.5
    ADDED = RATE  # type: ignore[name-defined]  # a global that was not there


def _set_class() -> None:
    Counter.made += 1
    Counter.later = 1  # type: ignore[attr-defined]
    Stepping.own = property(lambda self: 1)  # type: ignore[attr-defined]


CHANGES: dict[str, Callable[[], Any]] = {
    "a list": lambda: CALLS.append(1),
    "a dictionary": lambda: TABLE.update(other=1),
    "one in another": lambda: TABLE["inner"].update(n=TABLE["inner"]["n"] + 1),
    "a set": lambda: SEEN.add(len(SEEN)),
    "a deque": lambda: LAST.append(len(LAST)),
    "globals": _set_rate,
    "a class": _set_class,
    "an object": lambda: setattr(COUNTER, "n", COUNTER.n + 1),
    "a closure": COUNT,
    "a default and an attribute of a function": _function,
}

DRAWN: dict[str, Callable[[], Any]] = {
    "a generator": lambda: DRAWS.random(),
    "torch": lambda: torch.rand(()),
    "in place": lambda: torch.empty(3).uniform_(),
    "Python": random.random,
    "numpy": lambda: np.random.rand(),
    "a seed": lambda: torch.manual_seed(1),
}


def _state() -> str:
    (cell,) = COUNT.__closure__  # type: ignore[misc]  # a function
    of_classes = [sorted(vars(c)) for c in (Counter, Stepping)], Counter.made, COUNTER.n, cell.cell_contents
    of_functions = _function.__defaults__, vars(_function), RATE, "ADDED" in globals()
    drawn = (
        DRAWS.getstate(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["pos"],
    )
    return repr((CALLS, TABLE, SEEN, LAST, of_classes, of_functions, drawn))


def known(update: Any, **attributes: Any) -> tuple[Any, Any]:
    """The optimizer, and what a dry run says of its only parameter."""
    optimizer: Any = Stepping([p := Parameter(torch.ones(3))], update)
    vars(optimizer).update(attributes)
    return optimizer, dry_run.run(Stepping, optimizer).record(optimizer.param_groups[0], p)


@pytest.mark.parametrize("how", CHANGES)
def test_what_the_code_of_a_class_reaches_is_put_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change = CHANGES[how]

    def step(self: Any, closure: Any = None) -> None:
        change()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad)

    monkeypatch.setattr(Stepping, "step", step)
    before = _state()
    known(None)
    assert _state() == before


@pytest.mark.parametrize("how", CHANGES)
def test_so_is_what_the_optimizer_holds(how: str) -> None:
    """In attributes: the functions, which have no copies."""
    before = _state()
    known(lambda o, p, g, s, lr, t: (o.change(), p.sub_(g)), change=CHANGES[how])
    assert _state() == before


@pytest.mark.parametrize("how", DRAWN)
@pytest.mark.parametrize("is_held", [False, True])
def test_random_numbers_are_not_drawn_twice(how: str, is_held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are generators put back: a data loader's thread would draw the same numbers again."""
    change, before = DRAWN[how], _state()
    monkeypatch.setitem(globals(), "COUNT", change)
    held: dict[str, Any] = {"change": change} if is_held else {}
    update: Any = lambda o, p, g, s, lr, t: (o.change() if is_held else COUNT(), p.sub_(g))  # noqa: E731
    with pytest.raises(collage_neuron.UnsupportedUpdate, match=r"random numbers|it uses"):
        known(update, **held)
    monkeypatch.undo()
    assert _state() == before


def test_a_generator_that_the_step_uses_is_said_and_stays_where_it_is() -> None:
    numbers = (x for x in (1, 2))
    with pytest.raises(collage_neuron.UnsupportedUpdate, match="uses a generator, which can be neither copied"):
        known(lambda o, p, g, s, lr, t: (next(o.numbers), p.sub_(g)), numbers=numbers)
    assert next(numbers) == 1
    known(lambda o, p, g, s, lr, t: p.sub_(g), numbers=numbers)  # held, and not used


def test_what_cannot_be_put_back_is_said(tmp_path: Any) -> None:
    with (tmp_path / "log").open("w") as log:
        with pytest.raises(collage_neuron.UnsupportedUpdate, match="uses a TextIOWrapper"):
            known(lambda o, p, g, s, lr, t: (o.log.write("x"), p.sub_(g)), log=log)
        assert log.tell() == 0


def _swap(x: Any) -> Any:
    torch.utils.swap_tensors(x, torch.ones(()))


def _import(x: Any) -> Any:
    import trace_of_nothing  # type: ignore[import-not-found]  # noqa: F401


class Ending:
    def __del__(self) -> None:
        CALLS.append("ended")


def test_so_is_what_a_function_names() -> None:
    with pytest.raises(collage_neuron.UnsupportedUpdate, match="it uses Ending, whose objects"):
        known(lambda o, p, g, s, lr, t: (Ending(), p.sub_(g)))
    with pytest.raises(collage_neuron.UnsupportedUpdate, match="it uses swap_tensors"):
        known(lambda o, p, g, s, lr, t: (_swap(o.x), p.sub_(g)), x=torch.zeros(()))
    with pytest.raises(collage_neuron.UnsupportedUpdate, match="it imports trace_of_nothing"):
        known(lambda o, p, g, s, lr, t: (p.sub_(g), _import(o.x)), x=True)
    known(lambda o, p, g, s, lr, t: (p.sub_(g), o.x or _import(o.x)), x=True)


# --- the kinds of things a step counts in: it counts once a step, also before the first one ------------------------


def _write(path: Any, _: Any) -> None:
    with open(path, "a") as file:  # the builtin function
        file.write("x")


class Own(dict[str, int]):
    """An object of a user's class, which counts in itself, in its class, and in a file."""

    n = 0
    path = ""

    def count(self) -> None:
        self["n"] = self.get("n", 0) + 1

    @property
    def counted(self) -> int:
        Own.n += 1
        return 1

    def write(self) -> None:
        _write(Own.path, None)

    def exchange(self) -> None:
        self.__dict__ = {"n": vars(self).get("n", 0) + 1}


class Member(enum.Enum):
    ONE = 1


def _own() -> Own:
    Own.n, Own.path = 0, tempfile.mkstemp()[1]
    return Own()


def _weak() -> Any:
    KEPT.clear()
    return weakref.ref(KEPT)


def _later(x: Any) -> None:
    x.n = getattr(x, "n", 0) + 1


def _backward(x: Any) -> None:
    with torch.enable_grad():
        (x * 1).sum().backward()


KEPT = Own()
COUNTED: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any], Callable[[Any], int]]] = {
    "numpy": (lambda: np.zeros(1), lambda x, g: x.__iadd__(1), lambda x: int(x[0])),
    "namespace": (lambda: types.SimpleNamespace(n=0), lambda x, g: setattr(x, "n", x.n + 1), lambda x: x.n),
    "attribute of a tensor": (lambda: torch.zeros(2), lambda x, g: _later(x), lambda x: x.n),
    "memory of a tensor": (lambda: torch.zeros(1), lambda x, g: x.numpy().__iadd__(1), lambda x: int(x)),
    "gradient of a tensor": (lambda: Parameter(torch.ones(1)), lambda x, g: _backward(x), lambda x: int(x.grad)),
    "member": (lambda: [vars(Member.ONE).pop("n", 0)], lambda x, g: _later(Member.ONE), lambda x: Member.ONE.n),  # type: ignore[attr-defined]
    "object": (_own, lambda x, g: x.count(), lambda x: x["n"]),
    "class of an object": (_own, lambda x, g: x.counted, lambda x: Own.n),
    "file of an object": (_own, lambda x, g: x.write(), lambda x: len(Path(Own.path).read_text())),
    "attributes of an object": (_own, lambda x, g: x.exchange(), lambda x: x.n),
    "weak reference": (_weak, lambda x, g: x().count(), lambda x: KEPT["n"]),
    "file": (lambda: tempfile.mkstemp()[1], _write, lambda x: len(Path(x).read_text())),
    "module": (lambda: sys.modules[__name__], lambda x, g: setattr(x, "TIMES", TIMES + 1), lambda x: x.TIMES),
    # What a dry run adds to these waits for good.
    "tensor": (lambda: torch.zeros(1), lambda x, g: x.add_(g.norm()), lambda x: int(x) // 2),
    "number": (lambda: torch.zeros(()), lambda x, g: x.add_(g.norm()), lambda x: int(x) // 2),
}

TIMES = 0
HELD: dict[str, Any] = {}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("place", ["attribute", "closure", "global"])
@pytest.mark.parametrize("kind", COUNTED)
def test_a_step_counts_once(kind: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, count, read = COUNTED[kind]
    monkeypatch.setitem(globals(), "TIMES", 0)
    HELD["it"] = held = make()

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        count({"attribute": lambda: o.held, "closure": lambda: held, "global": lambda: HELD["it"]}[place](), g)
        p.sub_(g, alpha=lr)

    optimizer: Any = Stepping([p := Parameter(torch.ones(4))], update)
    optimizer.held = held
    optimizer = collage_neuron.compile(optimizer, verbose=False)
    for t in range(1, 4):
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert read(held) == t


@pytest.mark.whole
@pytest.mark.parametrize("as_torchs", [True, False])
@pytest.mark.parametrize("when", ["before", "after", "later"])
def test_a_step_of_torch_that_somebody_wraps_is_counted_once(
    when: str, as_torchs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As profilers do, by functools.wraps or not; torch's own functions write nothing, and are not looked into."""
    times: list[int] = []
    step = torch.optim.SGD.step

    def counted(self: Any, closure: Any = None) -> Any:
        times.append(1)
        return step(self, closure)

    def wrap() -> None:
        monkeypatch.setattr(torch.optim.SGD, "step", functools.wraps(step)(counted) if as_torchs else counted)

    optimizer: Any = torch.optim.SGD([p := Parameter(torch.ones(3))], 0.125)
    if when == "before":
        wrap()
    optimizer = collage_neuron.compile(optimizer, verbose=False)
    for t in range(-2, 3):
        if t == {"after": -2, "later": 0}.get(when):
            wrap()
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert len(times) == (3 if when == "later" else 5)
