"""Where words belong together, as far as they tell: their sum rounds to the first one. What does not is reset.

For bf16x2::

    sum = param + param_lo
    near = param + (sum - param) * (1 - 2**-8)
    param_lo = param_lo where bf16(near) == param, else 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from collage_neuron.numerics.eft import round_to, widen
from collage_neuron.numerics.formats import MASTER, Format
from collage_neuron.states import word_encoding
from collage_neuron.states.sharding import local

SHORTER = 1 - 2**-8
"""A pair may end in a tie, which rounds to even and not to its high word. The gap between sum and high word is at most
8 bits long: by this factor, it is shortened by less than its last bit."""

LARGEST = torch.finfo(torch.bfloat16).max


def belongs(p: torch.Tensor, states: Mapping[str, Any], name: str, fmt: Format) -> torch.Tensor:
    """Where the value kept for `p` (or its state `name`) is within half a bf16 ulp of its first word; on the CPU."""
    # On the CPU, where every rounding is a real cast.
    hi, *low = (local(p.detach() if key == "param" else states[key]).cpu() for key in fmt.keys(name))
    fits: torch.Tensor = _fits(fmt, word_encoding.of_each(fmt, [hi, *low]), hi.float())
    return fits


def reset_where(p: torch.Tensor, state: Mapping[str, Any], name: str, fmt: Format, where: torch.Tensor) -> None:
    """Makes the elements in the mask of `p`, or of its state `name`, exactly what the high word says."""
    high = local(p.detach() if name == "param" else state[name])
    alone = fmt.encoder(name)(high.cpu().float().bfloat16().float())[1:]
    for key, word in zip(fmt.keys(name)[1:], alone, strict=True):
        low = local(state[key])
        low.copy_(torch.where(where, word, low.cpu()))


def _fits(fmt: Format, words: Sequence[Any], high: Any) -> Any:
    """Where the value of the words is within half a bf16 ulp of the high word, or this is not finite."""
    if MASTER in [component.suffix for component in fmt.components]:
        # Not decoded, which gives the high word wherever the master is another's.
        near = round_to(widen(words[1]), "bf16")
    else:
        # Not as a parameter is decoded, which gives what fits whatever the words are.
        near = round_to(high + (fmt.decode(words) - high) * SHORTER, "bf16")
        # The high word of a state stops at the largest number (`split_capped`), and the sum may go on from there.
        near = torch.where(near > LARGEST, LARGEST, torch.where(near < -LARGEST, -LARGEST, near))
    return torch.logical_or(near == high, torch.logical_not(torch.abs(high) <= LARGEST))
