"""What every load of a checkpoint begins and ends with: checks of its keys; settings, and what was known before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import RoundedWeights, warn_user
from collage_neuron.numerics.formats import FORMATS, Format, is_component, suffixes
from collage_neuron.settings import KEYS, Settings
from collage_neuron.states import external_writes, format_record, visible_states
from collage_neuron.states.bookkeeping import Bookkeeping, bookkeeping, mark_of
from collage_neuron.states.sharding import check_placements, is_sharded, local
from collage_neuron.states.state_keys import is_host_scalar, name_of, split_params, split_words, words_of
from collage_neuron.states.store import is_idle, may_be_word, read_exact

Saved = Mapping[str, Any]


def refused(why: str) -> ValueError:
    """The error of a checkpoint that is not loaded."""
    return ValueError(f"the checkpoint was not loaded, and nothing was changed: {why}")


def check_keys(saved: Saved) -> None:
    """Raises ValueError if `saved` is not the state of any optimizer."""
    for key in ("state", "param_groups"):
        if key not in saved:
            found = ", ".join(map(repr, list(saved)[:5]))
            raise refused(f"it has no {key!r}; found {found or 'nothing'}: is it an optimizer's state_dict()?")


def check_saved(optimizer: Optimizer, saved: Saved, known_states: Callable[[], set[str] | None]) -> None:
    """Raises ValueError, naming the key, if `saved` cannot be a state of `optimizer`.

    `known_states` finds the names of the states that its steps are known to have; None if they run as written: those
    may keep anything in a state.
    """
    check_keys(saved)
    groups, own = saved["param_groups"], optimizer.param_groups
    if len(groups) != len(own):
        raise refused(f"it has {len(groups)} param_groups and the optimizer {len(own)}")
    params, recorded = dict[Any, torch.Tensor](), dict[Any, dict[str, str]]()
    for i, (group, mine) in enumerate(zip(groups, own, strict=True)):
        if "params" not in group:
            raise refused(f"param_groups[{i}] has no 'params'")
        if len(group["params"]) != len(mine["params"]):
            raise refused(
                f"param_groups[{i}] has {len(group['params'])} parameters and the optimizer's {len(mine['params'])}"
            )
        recorded |= zip(group["params"], format_record.check_saved(group, i), strict=True)
        params |= zip(group["params"], mine["params"], strict=True)
    known = known_states()
    for index, state in saved["state"].items() if known is not None else ():
        if index not in params and isinstance(index, str):
            continue  # what an optimizer keeps for all parameters: torch loads it under this name
        if index not in params:
            raise refused(f"state[{index!r}] belongs to none of its param_groups")
        _check_state(params[index], index, state, bookkeeping(optimizer), known or set())
    for index, record in recorded.items():
        _check_recorded(f"state[{index!r}]", saved["state"].get(index, {}), record)
    _check_complete(optimizer, saved["state"], params, recorded)


def _check_recorded(where: str, state: Any, record: Mapping[str, str]) -> None:
    """Raises for a state without the further words that it was saved with.

    torch.distributed.checkpoint reads the keys that there are, into the types that there are: before a state has its
    format, and after a step on which that depends, it has others.
    """
    for name in record.keys() & state.keys() if isinstance(state, Mapping) else ():
        fmt = FORMATS[record[name]]
        for key, component in [*zip(fmt.keys(name), fmt.components, strict=True)][1:]:
            word = state.get(key)
            is_narrow = isinstance(word, torch.Tensor) and word.itemsize < component.type.dtype.itemsize
            if word is not None and not is_narrow:  # what blocks share is no tensor in a checkpoint
                continue
            raise refused(
                f"{where} has {'no' if word is None else 'a narrower'} {key!r}, the low word of {name!r}, which was "
                f"saved as {fmt.name}: is it truncated, or was it read into the states of an optimizer that has taken "
                "fewer steps, whose formats are others (torch.distributed.checkpoint)? Then take some first"
            )


def _check_complete(
    optimizer: Optimizer, states: Saved, params: Mapping[Any, torch.Tensor], recorded: Mapping[Any, Mapping[str, str]]
) -> None:
    """Raises for a parameter without a state if the record has a format with further words for it.

    Where keys tell the formats there is no record. Then such a parameter may have been bf16 when its run was compiled,
    and never have had a gradient: this warns if the checkpoint has low words of others, and the optimizer has its own.
    """
    missing = {index: p for index, p in params.items() if states.get(index, {}) == {}}
    # torch.distributed.checkpoint leaves out frozen parameters, and shards may be empty.
    missing = {index: p for index, p in missing.items() if p.requires_grad and p.numel()}
    for index in missing:
        words = FORMATS[recorded[index].get("param", "bf16")].keys("param")[1:]
        if words:
            raise refused(
                f"it has no state[{index!r}], and its param_groups say that this parameter has low words "
                f"({recorded[index]['param']}): is it truncated, or were states filtered out? A state that is to begin "
                f"anew keeps its {words[0]!r} alone"
            )
    has_words = any(words_of(state) for state in states.values() if isinstance(state, Mapping))
    held = split_params(optimizer.state) if missing and has_words else set()
    lost = [index for index, p in missing.items() if p in held and "param" not in recorded[index]]
    if lost:
        warn_user(
            f"the checkpoint has no state[{lost[0]!r}]{f' nor {len(lost) - 1} others' if lost[1:] else ''}, and low "
            "words of other parameters: unless that parameter was bf16 before it was compiled and never had a "
            "gradient in that run, its low word and moments are lost. Is the checkpoint truncated, or were states "
            "filtered out?",
            RoundedWeights,
        )


def _check_state(p: torch.Tensor, index: Any, state: Any, ours: Bookkeeping, known: set[str]) -> None:
    """Raises for a state that cannot be that of `p`."""
    where = f"state[{index!r}]"
    if not isinstance(state, Mapping):
        raise refused(f"{where} is a {type(state).__name__} and not a mapping of names to values")
    # One that a later step makes may be anything. What is of another model has no tensor of this shape.
    is_of_shape = any(isinstance(value, torch.Tensor) and value.shape == p.shape for value in state.values())
    for key, value in state.items():
        is_late = is_of_shape and name_of(key, state) not in known
        unlike = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != p.shape
        if unlike and not is_late and not visible_states.may_be_state(name_of(key, state), value, p, ours):
            raise refused(
                f"{where}[{key!r}] has shape {list(value.shape)} and the parameter {list(p.shape)}: is it the "
                "checkpoint of another model, or are the parameters in another order?"
            )
        if isinstance(value, torch.Tensor) and value.dim() > 0 and is_sharded(value) != is_sharded(p):
            raise refused(
                f"{where}[{key!r}] is {'' if is_sharded(value) else 'not '}sharded and the parameter is "
                f"{'' if is_sharded(p) else 'not '}(DTensor): use set_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict"
            )
        check_placements(p, value, f"{where}[{key!r}]")
        if (
            isinstance(value, torch.Tensor)
            and value.dim() > 0
            and not may_be_word(key, value, key in known or is_component(key, state))
        ):
            raise refused(f"{where}[{key!r}] is {value.dtype}; states are floating-point")
        is_number = is_host_scalar(value, p)  # `lr_scale` may be one: words are tensors of elements, or of blocks
        for suffix in suffixes() if not is_number else ():
            name = str(key).removesuffix(suffix)
            if str(key).endswith(suffix) and name != "param" and name not in state:
                raise refused(f"{where} has {key!r} and not {name!r}, which it is the second word of")


def refuse_missing(base: type[Optimizer], key: Any, saved: Saved, own: list[dict[str, Any]]) -> None:
    """Raises for a key that the optimizer's own code did not find, if the checkpoint should have had it."""
    places = {f"param_groups[{i}]": group for i, group in enumerate(saved["param_groups"]) if key in own[i]}
    places |= {f"state[{i!r}]": state for i, state in saved["state"].items() if not is_idle(state)}
    for where, found in places.items():
        if key not in found:
            names = ", ".join(str(k) for k in found if k not in KEYS and not is_component(k, found))
            raise refused(
                f"{where} has no {key!r}, which {base.__name__} needs; it has {names}: is it truncated, or the "
                "checkpoint of another optimizer?"
            )


def check_words(state: Mapping[str, Any], formats: Mapping[str, Format], where: str) -> None:
    """Raises if a checkpoint of a compiled optimizer lacks a word of a format, or has whole numbers for others."""
    for name, fmt in formats.items():
        high = state.get(name)
        if name != "param" and (high is None or high.dtype != fmt.components[0].type.dtype):
            continue  # a state of a later step; or wider than its format: nothing is lost
        for key, component in list(zip(fmt.keys(name), fmt.components, strict=True))[1:]:
            if key in state and not _is_misread(name, state[key].dtype, component.type.dtype):
                continue
            found = f"{key!r} in {state[key].dtype}" if key in state else f"no {key!r}"
            raise refused(
                f"{where} has {found}, the low word of {name!r} under this group's strategy: was it read "
                "into the template of an optimizer compiled for another strategy, or saved by a run that left this "
                "parameter in fp32 (compile(..., keep_fp32=...), buffers=)? Compile as that run did"
            )


def _is_misread(name: str, stored: torch.dtype, dtype: torch.dtype) -> bool:
    """Returns True if a word of `dtype` went through another one that does not hold it, or holds something else.

    The strategy alone tells the format of a parameter. That of a state depends on its role, which may have been another
    when it was stored: either integer may be right.
    """
    alike = stored.is_floating_point == dtype.is_floating_point
    return stored != dtype and not (alike and (name != "param" or dtype.is_floating_point))


# --- what every load ends with ----------------------------------------------------------------------------------------


def settle_settings(optimizer: Optimizer, before: list[dict[str, Any]]) -> list[bool]:
    """Restores settings: from a checkpoint of ours, else the group's own. Returns which groups are of plain torch."""
    plain = ["collage_strategy" not in group for group in optimizer.param_groups]
    for i, (group, old) in enumerate(zip(optimizer.param_groups, before, strict=True)):
        for key in KEYS:
            if key in old:
                group.setdefault(key, old[key])
        try:
            loaded, own = Settings.of(group), Settings.of(old)
        except ValueError as error:
            raise refused(f"param_groups[{i}]: {error}") from error
        warn_of_settings(i, own, loaded)
    return plain


def warn_of_settings(index: int, own: Settings, loaded: Settings) -> None:
    """Warns if a checkpoint brought another strategy or arithmetic than the optimizer was, or is, compiled for."""
    if (loaded.strategy, loaded.arithmetic) != (own.strategy, own.arithmetic):
        warn_user(
            f"param_groups[{index}] was compiled for strategy {own.strategy!r}, arithmetic {own.arithmetic!r} and goes "
            f"on with those of the checkpoint, {loaded.strategy!r} and {loaded.arithmetic!r}, as torch does with "
            f"every setting of a group. To switch: collage_neuron.compile(optimizer, strategy={own.strategy!r}, "
            f"arithmetic={own.arithmetic!r}) after loading"
        )


def begin_anew(optimizer: Optimizer, kept: set[torch.Tensor]) -> None:
    """Forgets what was known of the last state; low words of all but `kept` belong to what the parameters will hold."""
    ours = bookkeeping(optimizer)
    ours.interrupted = ""
    ours.marks.states.clear()
    ours.groups.clear()  # of another strategy it was told
    known, split = ours.marks.params, split_words(optimizer.state)
    for p in known:  # of those that are kept, the next step looks at what was written since they were stored
        known[p] = known[p].with_words(split.get(p, {}))
    for p in split:
        if p not in kept:
            external_writes.remember(optimizer, p, external_writes.LOADED)


@torch.no_grad()
def join_again(optimizer: Optimizer) -> None:
    """Before a step: adds low words that a checkpoint brought to fp32 parameters that were written with bf16 values.

    Such words (of a run without `keep_fp32`) join the value that is there when the optimizer is loaded. If the model is
    loaded after it, that value is replaced by the high words.
    """
    ours = bookkeeping(optimizer)
    for p, (further, record, mark) in ours.joined.items():
        high = p.detach().bfloat16()
        if mark != mark_of(p) and torch.equal(local(high).float(), local(p.detach())):
            p.copy_(read_exact(high, further, "param", record))
    ours.joined.clear()
