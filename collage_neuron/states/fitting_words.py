"""Low words of weights that other code wrote, kept or reset for all parameters at once by the code that updates them.

What `low_words` does with torch's operations, a parameter at a time, is an update in explicit-rounding form here: a
loop that clamps its weights after every step has to do it in every step. For bf16x2::

    sum = param + param_lo
    near = param + (sum - param) * (1 - 2**-8)
    param_lo = param_lo where bf16(near) == param, else 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from collage_neuron.numerics.eft import narrow, round_to, widen
from collage_neuron.numerics.formats import MASTER, Format
from collage_neuron.passes.backends.protocol import Backend, Launch
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.rewrite.writer import Writer
from collage_neuron.states.sharding import ORDINARY

SHORTER = 1 - 2**-8
"""A pair may end in a tie, which rounds to even and not to its high word. The gap between sum and high word is at most
8 bits long: by this factor, it is shortened by less than its last bit."""

LARGEST = torch.finfo(torch.bfloat16).max


def may_take(backend: Backend, p: torch.Tensor, fmt: Format) -> bool:
    """Returns True if `reset` may have this parameter, in this format, with the backend that updates it."""
    return backend.passes_once and type(p) in ORDINARY and p.is_cpu and backend.supports(_update(fmt)) is None


def reset(backend: Backend, fmt: Format, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
    """Makes low words what the high word alone says, where the two do not belong together; for these parameters."""
    update = _update(fmt)
    words = [[state[key] for key in update.outputs] for state in states.values()]
    reads = [[p.detach(), *of_one] for p, of_one in zip(states, words, strict=True)]
    backend.run([Launch(update, torch.empty(0, dtype=torch.float32, device="cpu"), reads, words, in_place=True)])


@lru_cache(64)
def _update(fmt: Format) -> Update:
    keys = tuple(fmt.keys("param"))
    writer = Writer(keys)
    high, *low = map(widen, (writer.inputs[key] for key in keys))
    fits = _fits(fmt, list(writer.inputs.values()), high)
    plain = [widen(word) for word in fmt.encoder("param")(high)[1:]]
    kept = [torch.where(fits, old, new) for old, new in zip(low, plain, strict=True)]
    stored = [narrow(word, c.storage) for word, c in zip(kept, fmt.components[1:], strict=True)]
    return Update.elementwise(writer.finish(stored), keys, keys[1:], writer.scalars, {})


def _fits(fmt: Format, words: Sequence[Any], high: Any) -> Any:
    """Where the value of the words is within half a bf16 ulp of the high word, or this is not finite."""
    if fmt.keys("param")[1] == "param" + MASTER:
        near = round_to(widen(words[1]), "bf16")
    else:
        near = round_to(high + (fmt.decode(words) - high) * SHORTER, "bf16")
        # The high word of a state stops at the largest number (`split_capped`), and the sum may go on from there.
        near = torch.where(near > LARGEST, LARGEST, torch.where(near < -LARGEST, -LARGEST, near))
    return torch.logical_or(near == high, torch.logical_not(torch.abs(high) <= LARGEST))
