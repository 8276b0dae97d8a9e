"""The fp32 values that `compile(model)` keeps: they become low words once the model's optimizer is compiled."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import NO_ROLES, formats_for
from collage_neuron.optimizer.waiting import models
from collage_neuron.settings import Settings
from collage_neuron.states import low_words
from collage_neuron.states.format_record import record_of
from collage_neuron.states.sharding import is_distributed, is_sharded, local, spread
from collage_neuron.states.store import store


def high_word(value: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The first word of `value` in the format `fmt` (of its local shard): the new value of the parameter itself."""
    word: torch.Tensor = fmt.encode(fmt.decode(fmt.encode(local(value).cpu())))[0]
    return word.to(value.device)


def written_in_all_processes() -> set[torch.Tensor]:
    """Parameters that were written in place while several processes train, as DDP's initial broadcast does.

    After the broadcast all processes must agree, but receivers do not have the low words of the sender: all drop them.
    """
    if not is_distributed():
        return set()
    kept = (o for waiting in models.values() for o in waiting.originals.values())
    return {p for _, p, version in kept if not is_sharded(p) and torch_privates.version(p) != version}


def restore_low_words(optimizer: Optimizer, settled: set[torch.Tensor]) -> None:
    """Restores low words of elements that have not changed since the cast; changed elements keep their new value.

    Parameters in `settled` are left alone: their low words are in the optimizer's state, or dropped.
    """
    owned = {id(p): (p, group) for group in optimizer.param_groups for p in group["params"]}
    for model, waiting in models.items():
        for name, p in model.named_parameters():
            if id(p) not in owned or name not in waiting.originals or p.dtype != torch.bfloat16:
                continue
            value, _, _ = waiting.originals.pop(name)
            if p in settled or value.shape != p.shape:
                continue
            original = local(spread(value.to(p.device), p))
            fmt, cast = (
                formats_for(settings.strategy, (), NO_ROLES, p.dtype)["param"]
                for settings in (Settings.of(owned[id(p)][1]), waiting.settings)
            )
            now = local(p.detach())
            kept = torch.where(high_word(original, cast) == now, original, now.float())
            with torch.no_grad():
                store(p, optimizer.state[p], "param", fmt, kept, record_of(optimizer, p))
            low_words.remember(optimizer, p, low_words.FRESH)
