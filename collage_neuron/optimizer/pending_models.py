"""The models that were given to `compile` without an optimizer, and wait for one over their parameters.

The fp32 values that `compile(model)` keeps become low words once the model's optimizer is compiled. Parameters that
were frozen when `compile` rounded their model have lost theirs, and others were left in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import RoundedWeights, warn_user
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import param_format
from collage_neuron.settings import Settings
from collage_neuron.states import external_writes, low_words
from collage_neuron.states.bookkeeping import bookkeeping, is_compiled, params_of
from collage_neuron.states.live_objects import groups_of, objects_of, with_subclasses
from collage_neuron.states.sharding import is_distributed, is_sharded, local, spread
from collage_neuron.states.state_keys import split_params

CompileOptimizer = Callable[[Optimizer, Settings], None]


class Original(NamedTuple):
    """What a parameter was before it was rounded."""

    value: torch.Tensor
    """In fp32."""
    param: torch.Tensor
    version: int
    """The parameter's version after it was rounded."""
    fmt: Format
    """The format whose first word the parameter became."""


@dataclass
class Pending:
    """A waiting model: its settings, and the fp32 values of the parameters that were rounded."""

    settings: Settings
    stay: Mapping[str, torch.Tensor]
    """The parameters that were left in fp32, by name."""
    compile_optimizer: CompileOptimizer
    """A function that compiles an optimizer over its parameters, called when one first steps."""
    originals: dict[str, Original] = field(default_factory=dict)
    """By the names that the parameters had."""
    memories: list[StorageWeakRef] = field(default_factory=list)
    """The memory that the parameters had before; a weak reference keeps its identity from being used again."""

    @property
    def rounded(self) -> dict[str, torch.Tensor]:
        """The parameters that were rounded, by the names that they had."""
        return {name: original.param for name, original in self.originals.items()}


models: WeakKeyDictionary[torch.nn.Module, Pending] = WeakKeyDictionary()
"""All waiting models; each stays as long as it is alive, since further optimizers may be built over it."""


def models_of(optimizer: Optimizer) -> list[torch.nn.Module]:
    """The models given to `compile` alone that `optimizer` has parameters of."""
    owned = set(map(id, params_of(optimizer)))
    known = {model: chain(model.parameters(), waiting.rounded.values()) for model, waiting in models.items()}
    return [model for model, params in known.items() if not owned.isdisjoint(map(id, params))]


def known_in(
    model: torch.nn.Module, noted: Mapping[str, torch.Tensor], others: Iterable[torch.Tensor] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a model that were `noted`, with the names that they had then; and those among `others`.

    Code may have moved one to another name, by wrapping or deleting modules, or out of the model; and one that was made
    since, by a move to another device or a larger vocabulary, is that of its name, unless this has gone elsewhere.
    """
    names = {id(p): name for name, p in noted.items()}
    params = {id(p): ("", p) for p in others} | {id(p): (name, p) for name, p in model.named_parameters()}
    for key, (name, p) in params.items():
        if key in names:
            yield names[key], p
        elif name in noted and id(noted[name]) not in params:
            yield name, p


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


def require_settled(params: Iterable[torch.Tensor]) -> None:
    """Raises TypeError if `compile(model)` has still to compile a living optimizer of some of `params`."""
    asked = {id(p) for p in params if p.dtype == torch.bfloat16 and p.requires_grad}
    waiting = [(model.named_parameters(), found.originals) for model, found in models.items() if asked]
    kept = asked.intersection(id(p) for named, originals in waiting for name, p in named if name in originals)
    for optimizer in objects_of(with_subclasses(Optimizer)) if kept else ():
        if not kept.isdisjoint(id(p) for group in groups_of(optimizer) for p in group["params"]):
            require_compiled(optimizer)


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
    return {o.param for o in kept if not is_sharded(o.param) and torch_privates.version(o.param) != o.version}


def originals_in(model: torch.nn.Module, others: Iterable[torch.Tensor] = ()) -> dict[torch.Tensor, Original]:
    """By parameter of a waiting model, or among `others`, what it was before it was rounded."""
    if model not in models:
        return {}
    waiting = models[model]
    return {p: waiting.originals[name] for name, p in known_in(model, waiting.rounded, others)}


def is_cast_back(p: torch.Tensor, original: Original) -> bool:
    """Returns True if `p` is the rounded value in fp32, as after `model.float()`: it tells nothing of the lost bits."""
    value, fmt = original.value, original.fmt
    if p.dtype != torch.float32 or p.shape != value.shape:
        return False
    value = local(spread(value, p) if is_sharded(p) else value)
    return torch.equal(local(p.detach()).cpu(), high_word(value, fmt).cpu().float())


def assigned_since(params: Iterable[torch.Tensor]) -> set[torch.Tensor]:
    """The fp32 parameters among `params`: of a model that was rounded, those that were loaded since, exactly."""
    wide = {p for p in params if p.dtype == torch.float32}
    known = chain.from_iterable(originals_in(model, wide).items() for model in models if wide)
    return wide - {p for p, original in known if is_cast_back(p, original)}


def waiting_values(params: Iterable[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """The fp32 values (of local shards) of the bf16 parameters among `params` that no optimizer has had yet."""
    wanted = {p for p in params if p.dtype == torch.bfloat16}
    known = chain.from_iterable(originals_in(model).items() for model in models if wanted)
    return {p: as_it_was(p, original) for p, original in known if p in wanted and p.shape == original.value.shape}


@torch.no_grad()
def keep_values(values: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Notes new fp32 values of parameters that wait for an optimizer, or for the next one; these get the high words."""
    for waiting, name, p in [(w, *known) for m, w in models.items() for known in known_in(m, w.rounded)]:
        if p in values:
            value, fmt = values[p].detach().float().clone(), waiting.originals[name].fmt
            local(p.detach()).copy_(high_word(value, fmt))
            waiting.originals[name] = Original(value, p, torch_privates.version(p), fmt)
    for p, value in values.items():
        if hasattr(p, low_words.LEFT):
            p.copy_(value)
            low_words.leave_value(p, value.detach().float().clone())


def restore_low_words(optimizer: Optimizer, settled: set[torch.Tensor]) -> None:
    """Restores low words of elements that have not changed since the cast; changed elements keep their new value.

    Parameters in `settled` are left alone: their low words are in the optimizer's state, or dropped.
    """
    owned = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for model, waiting in models.items():
        for name, p in list(known_in(model, waiting.rounded, params_of(optimizer))):
            if id(p) not in owned or p.dtype != torch.bfloat16:
                continue
            original = waiting.originals.pop(name)
            value = original.value
            if p in settled or value.shape[1:] != p.shape[1:] or (value.shape != p.shape and is_sharded(p)):
                continue
            kept = as_it_was(p, original)
            fmt = param_format(Settings.of(owned[id(p)]).strategy, p.dtype)
            with torch.no_grad():
                external_writes.put(optimizer, p, fmt, kept, external_writes.FRESH)


def as_it_was(p: torch.Tensor, original: Original) -> torch.Tensor:
    """A parameter, in fp32, with what it had when it was rounded; it may have more rows now, or fewer."""
    value, fmt = original.value, original.fmt
    exact = local(spread(value.to(p.device), p) if is_sharded(p) else value.to(p.device))
    rows: Any = ... if value.shape == p.shape else slice(min(len(value), len(p)))
    now, high = local(p.detach()), high_word(exact, fmt)[rows]
    found = now.float()
    found[rows] = torch.where(high == now[rows], exact[rows], found[rows])
    return found


# --- parameters that an optimizer gets later --------------------------------------------------------------------------


rounded: WeakKeyDictionary[torch.nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()
"""By model that was compiled with an optimizer: the frozen parameters that bf16 could not hold, by name.

No optimizer has these, so that its bookkeeping is no place for them: a copy of it would copy the parameters."""

COMPILED = "_collage_compiled"
"""An attribute of the parameters of models that `compile` has cast: what is fp32 is so because it was to stay."""


def adopt_params(optimizer: Optimizer, params: Iterable[torch.Tensor], index: int) -> None:
    """Parameters have joined a compiled optimizer: gives them the low words that `compile(model)` kept, or warns."""
    wide = {p for p in params if p.dtype == torch.float32}
    stay = {p for p in wide if hasattr(p, COMPILED)}
    bookkeeping(optimizer).fp32 |= stay
    if wide - stay:
        warn_user(
            "a parameter group with float32 parameters was added to a compiled optimizer: they are updated in plain "
            "fp32 and save no memory. Convert the model first (model.to(torch.bfloat16), or optimizer_dtype="
            "torch.bfloat16 under ZeRO-1), or compile the optimizer object, which splits them into hi and lo"
        )
    external_writes.continue_from_others(optimizer)
    restore_low_words(optimizer, split_params(optimizer.state) | written_in_all_processes())
    warn_of_rounded(params, index)


def warn_of_rounded(params: Iterable[torch.Tensor], index: int) -> None:
    """Warns, once of each, of parameters that a group gets and whose fp32 values are gone."""
    own = {id(p) for p in params}
    for model, noted in rounded.items() if own else ():
        gone = [name for name, p in known_in(model, noted) if id(p) in own]
        for name in gone:
            del noted[name]
        if gone:
            others = f" and {len(gone) - 1} other parameters" if len(gone) > 1 else ""
            warn_user(
                f"param_groups[{index}] has {gone[0]!r}{others} of a {type(model).__name__}, which were frozen when "
                "collage_neuron.compile rounded them to bf16: they are trained from the rounded values, and their low "
                "words start at zero. To start from the fp32 values, write them from the fp32 checkpoint, by "
                "collage_neuron.set_exact_value(optimizer, p, value); or give compile the model alone, which keeps "
                "the fp32 values of frozen parameters (4 bytes each) until an optimizer has them; or name the "
                "parameters in keep_fp32",
                RoundedWeights,
            )
