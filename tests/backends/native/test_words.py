"""Integer words in native code: read and written without the floats that the update has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from exact import hard, update_of
from natively import different
from torch import Tensor

from collage_neuron.numerics.eft import beyond, limit_places, places, round_to, widen
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.passes.backends.protocol import Backend, Launch
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.skipif(NATIVE.missing() is not None, reason=f"no native code here: {NATIVE.missing()}")


def read(unit: float) -> Callable[..., list[Any]]:
    """A bf16 word and how many units of fp32's last places a number lies beyond it; and whole numbers, multiplied."""

    def body(hi: Any, n: Any) -> list[Any]:
        masked = widen(n > 3.0) * n  # -0 where n is less than 0
        return [beyond(hi, widen(hi != 0.0) * (n * unit)), n * 0.01, n * 0.25, n * -0.3, masked + 0.5, masked * 0.7]

    return body


def split(storage: str, unit: float, most: int) -> Callable[[Any], list[Any]]:
    """The same the other way round."""

    def body(x: Any) -> list[Any]:
        moved = limit_places(x, most)
        return [round_to(moved, "bf16"), round_to(places(moved) * (1 / unit), storage)]

    return body


def again(unit: float) -> Callable[[Any], list[Any]]:
    """A number as it is read from the words in which it was just stored, as a monitor does."""

    def body(x: Any) -> list[Any]:
        moved = limit_places(x, 32512)
        hi, n = round_to(moved, "bf16"), round_to(places(moved) * (1 / unit), "int8")
        return [beyond(widen(hi), widen(n) * unit * widen(widen(hi) != 0.0)), widen(n) * 0.3]

    return body


def rounded(*storage: str) -> Callable[[Any], list[Any]]:
    """Numbers as words of several types."""
    return lambda x: [round_to(x * 0.5, name) for name in storage]


INT8, INT16 = (torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)) for bits in (8, 16))
UPPER = torch.arange(-(2**15), 2**15, 37).to(torch.int16).view(torch.bfloat16)
UPPER = torch.cat([UPPER, torch.tensor([0.0, -0.0, 1.0, 3e-39], dtype=torch.bfloat16)])
assert not len(UPPER) % 2

CASES: dict[str, tuple[Callable[..., Sequence[Any]], tuple[str, ...], tuple[torch.dtype, ...]]] = {
    "read int16": (read(1.0), ("hi", "int16"), ()),
    "read int8": (read(256.0), ("hi", "int8"), ()),
    "read uint8": (read(128.0), ("hi", "uint8"), ()),
    "split int16": (split("int16", 1.0, 32767), ("x",), (torch.bfloat16, torch.int16)),
    "split int8": (split("int8", 256.0, 32512), ("x",), (torch.bfloat16, torch.int8)),
    "split int8, more": (split("int8", 64.0, 32640), ("x",), (torch.bfloat16, torch.int8)),
    "split uint8": (split("uint8", 256.0, 32767), ("x",), (torch.bfloat16, torch.uint8)),
    "split int8 again": (again(256.0), ("x",), ()),
    "round": (rounded("int16", "int8", "uint8"), ("x",), (torch.int16, torch.int8, torch.uint8)),
}
"""What is computed, from what, and the dtypes in which it is stored, if not fp32."""


@cache
def update_for(name: str) -> Update:
    body, given, dtypes = CASES[name]
    names = {torch.bfloat16: "bf16"}
    return update_of(given, body, [names.get(d, str(d).removeprefix("torch.")) for d in dtypes])


def tensors(name: str) -> list[Tensor]:
    """Every word of 16 bits, with numbers of all magnitudes; or hard numbers, and no NaN."""
    given = CASES[name][1]
    if given == ("x",):
        return [torch.cat([x := hard()[0], x / 2**8, torch.arange(-600, 600) / 4]).nan_to_num(0.0, torch.inf)]
    words = (INT16 if given[1] == "int16" else INT8).to(getattr(torch, given[1]))
    many = max(len(words), len(UPPER))
    hi, lo = (t.repeat(many // len(t) + 1)[:many] for t in (UPPER, words))
    return [torch.cat([hi, hi.roll(1), hi]), torch.cat([lo, lo.roll(1), lo.roll(4)])]  # at even and odd places


def results(backend: Backend, name: str, update: Update, given: Sequence[Tensor]) -> list[Tensor]:
    dtypes = CASES[name][2] or [torch.float32] * len(update.outputs)
    written = [torch.zeros(len(given[0]), dtype=dtype) for dtype in dtypes]
    backend.run([Launch(update, torch.zeros(0), [list(given)], [written])])
    return written


@pytest.mark.parametrize("name", CASES)
def test_words_have_the_bits_of_the_reference(name: str) -> None:
    found, wanted = (results(b, name, update_for(name), tensors(name)) for b in (NATIVE, REFERENCE))
    assert not any(different(x, y).any() for x, y in zip(found, wanted, strict=True))
