"""Random generators that a step may use on the host (torch's on the CPU, numpy's, Python's), and their states."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

# What names contain through which code may draw from a generator of the process, generously: names of functions,
# modules and classes of libraries, which are not followed, and what can reach any name.
_OF_DRAWING = re.compile(
    "rand|rng|seed|generator|gauss|variate|normal(?!i)|uniform|bernoulli|binomial|poisson|multinomial|exponential_|cauchy_"
    "|geometric_|dropout|rrelu|gumbel|distribution|shuffle|sampl|choice|permutation|xavier|kaiming|orthogonal|lowrank"
    "|^eval$|^exec$|import",
    re.IGNORECASE,
)


@lru_cache(4096)
def may_draw(name: str) -> bool:
    """Returns True if code that uses `name` may draw from a generator of the process."""
    return _OF_DRAWING.search(name) is not None


class Generator(NamedTuple):
    """A generator, with functions that read and restore its state."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def of_process() -> Iterator[Generator]:
    """The generators behind `random.random()`, `torch.rand(())` and `numpy.random.rand()`."""
    yield Generator("Python's random generator", random.getstate, random.setstate)
    yield Generator("torch's random generator", torch.get_rng_state, torch.set_rng_state)
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # the generator behind numpy.random.rand() and similar functions
        yield from filter(None, [of_object(numpy.random.rand.__self__, "numpy's random generator")])


def of_object(x: Any, name: str) -> Generator | None:
    """The generator that `x` is; None of other objects."""
    if isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):  # the system's has no state
        return Generator(name, x.getstate, x.setstate)
    if isinstance(x, torch.Generator):
        return Generator(name, x.get_state, x.set_state)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(
        x, (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    ):
        return None
    # A legacy RandomState has its bits under a private name, and a state of its own beside theirs.
    bits = x if isinstance(x, numpy.random.BitGenerator) else getattr(x, "bit_generator", None) or x._bit_generator
    read = (lambda: x.get_state(legacy=False)) if isinstance(x, numpy.random.RandomState) else lambda: bits.state
    write = x.set_state if isinstance(x, numpy.random.RandomState) else lambda state: setattr(bits, "state", state)
    return Generator(name, read, write)
