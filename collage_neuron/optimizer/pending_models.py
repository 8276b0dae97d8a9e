"""The models that were given to `compile` without an optimizer, and wait for one over their parameters.

The fp32 values that `compile(model)` keeps become low words once the model's optimizer is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import param_format
from collage_neuron.settings import Settings
from collage_neuron.states import external_writes
from collage_neuron.states.bookkeeping import is_compiled, params_of
from collage_neuron.states.sharding import is_distributed, is_sharded, local, spread

CompileOptimizer = Callable[[Optimizer, Settings], None]


@dataclass
class Pending:
    """A waiting model: its settings, and the fp32 values of the parameters that were rounded."""

    settings: Settings
    stay: frozenset[str]
    """The names of the parameters that were left in fp32."""
    compile_optimizer: CompileOptimizer
    """A function that compiles an optimizer over its parameters, called when one first steps."""
    originals: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = field(default_factory=dict)
    """By name: the fp32 value, the parameter, and the parameter's version after it was rounded."""
    memories: list[StorageWeakRef] = field(default_factory=list)
    """The memory that the parameters had before; a weak reference keeps its identity from being used again."""


models: WeakKeyDictionary[torch.nn.Module, Pending] = WeakKeyDictionary()
"""All waiting models; each stays as long as it is alive, since further optimizers may be built over it."""


def models_of(optimizer: Optimizer) -> list[torch.nn.Module]:
    """The models given to `compile` alone that `optimizer` has parameters of."""
    owned = set(map(id, params_of(optimizer)))
    return [model for model in models if not owned.isdisjoint(map(id, model.parameters()))]


def require_compiled(optimizer: object) -> None:
    """Raises TypeError for an optimizer that is not compiled, or that `compile(model)` has still to compile."""
    if is_compiled(optimizer):
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, Optimizer) and models_of(optimizer):
        raise TypeError(
            f"{name} is not compiled yet: after compile(model) an optimizer is compiled when it first steps; ask then, "
            "or give both to collage_neuron.compile(model, optimizer)"
        )
    raise TypeError(f"{name} is not compiled; pass it to collage_neuron.compile first")


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
    owned = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for model, waiting in models.items():
        for name, p in model.named_parameters():
            if id(p) not in owned or name not in waiting.originals or p.dtype != torch.bfloat16:
                continue
            value, _, _ = waiting.originals.pop(name)
            if p in settled or value.shape != p.shape:
                continue
            original = local(spread(value.to(p.device), p))
            cast, now = param_format(waiting.settings.strategy, p.dtype), local(p.detach())
            kept = torch.where(high_word(original, cast) == now, original, now.float())
            fmt = param_format(Settings.of(owned[id(p)]).strategy, p.dtype)
            with torch.no_grad():
                external_writes.put(optimizer, p, fmt, kept)
