"""Optimizers whose rate comes from host objects: each with what a plain step changes on the host, to be read."""

from __future__ import annotations

import io
import itertools
import random
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch.optim import Optimizer

# Third-party code is rarely typed: `Any` here keeps the spellings as they are found.


class Descent(Optimizer):
    """Descent whose rate `rate` says once a step; matrices decay, so that shapes have recordings of their own."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})
        self.begin()

    def begin(self) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        rate = self.rate()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if p.dim() > 1:
                        p.mul_(1 - group["lr"] * 0.25)
                    p.add_(p.grad, alpha=-group["lr"] * rate)

    def rate(self) -> Any:
        return 1.0

    def trace(self) -> Any:
        """What a step leaves on the host, as something to compare."""
        return None


class Clock:
    """Counts."""

    def __init__(self) -> None:
        self.now, self.past = 0, [0]

    def next(self) -> int:
        self.now += 1
        self.past.append(self.now)
        return self.now


class Attribute(Descent):
    def begin(self) -> None:
        self.clock = Clock()

    def rate(self) -> Any:
        return 1 / self.clock.next()

    def trace(self) -> Any:
        return self.clock.now, list(self.clock.past)


class Slots(Descent):
    class Clock:
        __slots__ = ("now",)

        def __init__(self) -> None:
            self.now = 0

    def begin(self) -> None:
        self.clock = Slots.Clock()

    def rate(self) -> Any:
        self.clock.now += 1
        return 1 / self.clock.now

    def trace(self) -> Any:
        return self.clock.now


class InTheClass(Descent):
    n = 0

    def begin(self) -> None:
        InTheClass.n = 0

    def rate(self) -> Any:
        InTheClass.n += 1
        return 1 / InTheClass.n

    def trace(self) -> Any:
        return InTheClass.n


class OfItsType(Descent):
    """`type(self)` is another class in a compiled optimizer: it writes there what the plain one writes to its own."""

    n = 0

    def begin(self) -> None:
        OfItsType.n = 0

    def rate(self) -> Any:
        type(self).n += 1
        return 1 / type(self).n

    def trace(self) -> Any:
        return OfItsType.n


class Count(Descent):
    def begin(self) -> None:
        self.count = itertools.count(1)

    def rate(self) -> Any:
        return 1 / next(self.count)

    def trace(self) -> Any:
        return repr(self.count)


class Cycle(Descent):
    def begin(self) -> None:
        self.cycle = itertools.cycle(iter([1.0, 0.5, 0.25]))

    def rate(self) -> Any:
        return next(self.cycle)

    def trace(self) -> Any:
        return None


class OfAList(Descent):
    """Begins anew where an iterator ends."""

    def begin(self) -> None:
        self.rates = [1.0, 0.5, 0.25]
        self.place = iter(self.rates)

    def rate(self) -> Any:
        rate = next(self.place, None)
        if rate is None:
            self.place = iter(self.rates)
            rate = next(self.place)
        return rate

    def trace(self) -> Any:
        return self.place.__reduce__()[1:]


class NextOfAList(OfAList):
    """Holds a method of an iterator."""

    def begin(self) -> None:
        self.rates = [1 / n for n in range(1, 60)]
        self.place = iter(self.rates)
        self.next = self.place.__next__

    def rate(self) -> Any:
        return self.next()


class Random(Descent):
    def rate(self) -> Any:
        return random.random()


class TorchRandom(Descent):
    def rate(self) -> Any:
        return float(torch.rand(()))


class NumpyRandom(Descent):
    def rate(self) -> Any:
        return np.random.rand()


class OwnRandom(Descent):
    def begin(self) -> None:
        self.a, self.b, self.c = random.Random(1), np.random.default_rng(1), torch.Generator()

    def rate(self) -> Any:
        return self.a.random() * self.b.random() * float(torch.rand((), generator=self.c))

    def trace(self) -> Any:
        return self.a.getstate(), str(self.b.bit_generator.state), self.c.get_state().tolist()


COUNTER = 0
PER_STEP = {"n": 0}


class Global(Descent):
    def begin(self) -> None:
        global COUNTER
        COUNTER = PER_STEP["n"] = 0

    def rate(self) -> Any:
        global COUNTER
        COUNTER += 1
        PER_STEP["n"] += 2
        return 1 / COUNTER + 1 / PER_STEP["n"]

    def trace(self) -> Any:
        return COUNTER, dict(PER_STEP)


def closure() -> Any:
    n = 0

    def rate() -> float:
        nonlocal n
        n += 1
        return 1 / n

    return rate


class Closure(Descent):
    def begin(self) -> None:
        self.schedule = closure()

    def rate(self) -> Any:
        return self.schedule()

    def trace(self) -> Any:
        return self.schedule.__closure__[0].cell_contents


class InTheGroup(Descent):
    """A schedule in the settings of each group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["schedule"] = Clock()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            rate = group["lr"] / group["schedule"].next()
            for p in group["params"]:
                p.add_(p.grad, alpha=-rate)

    def trace(self) -> Any:
        return [group["schedule"].now for group in self.param_groups]


class InTheState(Descent):
    """An object in the state of each parameter, made by the first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                clock = self.state[p].setdefault("clock", Clock())
                p.add_(p.grad, alpha=-group["lr"] / clock.next())

    def trace(self) -> Any:
        clocks = [self.state[p].get("clock") for group in self.param_groups for p in group["params"]]
        return [clock and (clock.now, list(clock.past)) for clock in clocks]


class Window(Descent):
    def begin(self) -> None:
        self.window = deque([1.0], maxlen=3)

    def rate(self) -> Any:
        self.window.append(self.window[-1] + 1)
        return 1 / sum(self.window)

    def trace(self) -> Any:
        return list(self.window)


class Listed(Descent):
    """A list of numbers, which another object holds as well."""

    def begin(self) -> None:
        self.past = [1.0]
        self.clock = Clock()
        self.clock.past = self.past  # type: ignore[assignment]

    def rate(self) -> Any:
        self.past.append(self.past[-1] + 1)
        return 1 / self.clock.past[-1]

    def trace(self) -> Any:
        return list(self.past), list(self.clock.past), self.past is self.clock.past


class SharedDefault(Descent):
    """A list that `defaults` and both groups hold, and a dictionary that an attribute, a group and a state hold."""

    def __init__(self, params: Any) -> None:
        Optimizer.__init__(self, params, {"lr": 0.125, "count": [0]})
        self.also = self.param_groups[1]["also"] = {"n": 0}
        self.state[self.param_groups[0]["params"][0]]["also"] = self.also

    def rate(self) -> Any:
        self.param_groups[0]["count"][0] += 1
        self.also["n"] += 1
        return 1 / (self.defaults["count"][0] + self.also["n"])

    def trace(self) -> Any:
        one, two = self.param_groups
        is_one = self.defaults["count"] is one["count"] is two["count"] and self.also is two["also"]
        return list(one["count"]), dict(self.also), is_one


class Rebound(Descent):
    """Puts another object in the place of the one before."""

    def begin(self) -> None:
        self.clock: Any = Clock()

    def rate(self) -> Any:
        later = Clock()
        later.now = self.clock.now + 1
        self.clock = later
        return 1 / later.now

    def trace(self) -> Any:
        return self.clock.now


class Helper:
    """Leads back to the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.weak: Any = weakref.ref(optimizer)

    def rate(self) -> Any:
        self.optimizer.n += 1
        return 1 / self.weak().n


class Back(Descent):
    def begin(self) -> None:
        self.n = 0
        self.helper = Helper(self)
        self.schedule = self.also

    def also(self) -> float:
        self.n += 1
        return 1 / self.n

    def rate(self) -> Any:
        return self.helper.rate() + self.schedule()

    def trace(self) -> Any:
        return self.n, self.helper.optimizer is self, self.schedule.__self__ is self  # type: ignore[attr-defined]


class Later(Attribute):
    """Does something else after its fourth step."""

    def rate(self) -> Any:
        return 1.0 if self.clock.next() <= 4 else 0.25


class Numbers(Descent):
    """What recordings carry themselves."""

    def begin(self) -> None:
        self.n, self.past, self.by_name = 0, [0], {"a": [1]}

    def rate(self) -> Any:
        self.n += 1
        self.past.append(self.n)
        self.by_name["a"].append(2)
        self.param_groups[0]["lr"] *= 1.0
        return 1 / self.n

    def trace(self) -> Any:
        return self.n, list(self.past), {k: list(v) for k, v in self.by_name.items()}


class Array(Descent):
    """Counts in arrays and in tensors without dimensions."""

    def begin(self) -> None:
        self.array, self.held = np.zeros(2), {"t": [torch.zeros(())]}

    def rate(self) -> Any:
        self.array[1] += 1
        self.held["t"][0] += 1
        return 1 / float(self.array[1] * self.held["t"][0])

    def trace(self) -> Any:
        return self.array.tolist(), float(self.held["t"][0])


def forever() -> Iterator[float]:
    n = 1
    while True:
        yield 1 / n
        n += 1


class Generator(Descent):
    def begin(self) -> None:
        self.rates = forever()

    def rate(self) -> Any:
        return next(self.rates)

    def trace(self) -> Any:
        return self.rates.gi_frame.f_lineno  # type: ignore[attr-defined]


class Caught(Generator):
    """Hides that an iterator could not be used."""

    def rate(self) -> Any:
        try:
            return next(self.rates)
        except Exception:
            return 1.0


class File(Descent):
    def begin(self) -> None:
        self.file = io.StringIO("1\n22\n333\n")

    def rate(self) -> Any:
        return len(self.file.readline()) / 100

    def trace(self) -> Any:
        return self.file.tell()


class PerParameter(Attribute):
    """Advances from parameter to parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.clock.next())


class RandomPerParameter(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * random.random())


class LaterPerParameter(Attribute):
    """From its third step on it advances from parameter to parameter, and only numbers show it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        rate = self.clock.next()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / (rate if rate < 3 else self.clock.next()))


class SystemRandom(Descent):
    def rate(self) -> Any:
        return random.SystemRandom().random()


class TwoNames(Descent):
    """Keeps one tensor under two names."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["slow"] = state["fast"] = torch.zeros_like(p)
                state["fast"].add_(p.grad)
                p.add_(state["slow"], alpha=-group["lr"])


class KeepsTheParameter(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mine"] = p
                p.add_(p.grad, alpha=-group["lr"])


class Registered(Attribute):
    """Its constructor leaves a trace too."""

    made: ClassVar[list[float]] = []

    def begin(self) -> None:
        super().begin()
        Registered.made.append(random.random())
        float(torch.rand(()))
