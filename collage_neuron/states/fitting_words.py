"""Where words belong together, as far as they tell: their sum rounds to the first one. What does not is reset.

For all parameters at once this is an update in explicit-rounding form, run by the code that updates them: a loop that
clamps its weights after every step has to do it in every step. For bf16x2::

    sum = param + param_lo
    near = param + (sum - param) * (1 - 2**-8)
    param_lo = param_lo where bf16(near) == param, else 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.eft import narrow, round_to, widen
from collage_neuron.numerics.formats import MASTER, Format
from collage_neuron.passes.backends.protocol import Backend, Launch
from collage_neuron.passes.backends.registry import choose
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.rewrite.graph_writer import Writer
from collage_neuron.settings import Settings
from collage_neuron.states import word_encoding
from collage_neuron.states.sharding import ORDINARY, local

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


def reset_at_once(optimizer: Optimizer, split: Mapping[torch.Tensor, Format]) -> set[torch.Tensor]:
    """Resets low words that do not fit, of all parameters of which a backend can do it at once; returns these."""
    parts: dict[tuple[Backend, Format], dict[torch.Tensor, dict[str, Any]]] = {}
    for group in optimizer.param_groups if split else ():
        choice = Settings.of(group).backend
        for p in (p for p in group["params"] if p in split and p.is_cpu):
            backend, fmt = _backend(choice, p.device), split[p]
            if backend is None or not backend.passes_once or type(p) not in ORDINARY:
                continue
            if backend.supports(_update(fmt)) is None:
                parts.setdefault((backend, fmt), {})[p] = optimizer.state[p]
    for (backend, fmt), states in parts.items():
        _reset(backend, fmt, states)
    return {p for states in parts.values() for p in states}


def _backend(choice: str, device: torch.device) -> Backend | None:
    """The backend that runs updates there; None if it cannot, which is an error in a step only (a model that moved)."""
    try:
        return choose(choice, device)
    except ValueError:
        return None


def _reset(backend: Backend, fmt: Format, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
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
    if MASTER in [component.suffix for component in fmt.components]:
        # Not decoded, which gives the high word wherever the master is another's.
        near = round_to(widen(words[1]), "bf16")
    else:
        # Not as a parameter is decoded, which gives what fits whatever the words are.
        near = round_to(high + (fmt.decode(words) - high) * SHORTER, "bf16")
        # The high word of a state stops at the largest number (`split_capped`), and the sum may go on from there.
        near = torch.where(near > LARGEST, LARGEST, torch.where(near < -LARGEST, -LARGEST, near))
    return torch.logical_or(near == high, torch.logical_not(torch.abs(high) <= LARGEST))
