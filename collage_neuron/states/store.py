"""Storage of a compiled optimizer's states: torch's own keys, plus keys for further components.

`optimizer.state[p]` holds `step`, `exp_avg`, ... as the optimizer's own code would, and for a format of two components
`<name>_lo` (or `param_master`); the parameter's first component is the parameter itself. All except the host scalars
are parameter-shaped tensors, so code that saves or shards an optimizer's state needs no knowledge of ours. The words
that blocks of elements share (`<name>_scale`) are the exception: they are local tensors, and `state_dict()` shows the
value of such a state instead of its words (`format_record`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.numerics.formats import FORMATS, FORMATS_KEPT, Format, is_component, require_known, suffixes
from collage_neuron.states import word_encoding
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import beside, like, local, rewrite_data

State = dict[str, Any]

Record = dict[str, str]
"""The format names of a parameter (`param`) and its states (`format_record`)."""

NO_RECORD: Mapping[str, str] = MappingProxyType({})


class States(defaultdict[Any, Any]):
    """`optimizer.state`, which counts as empty until the optimizer's own code has stored something in it.

    torch.distributed.checkpoint tests `if optimizer.state` before it takes the step that creates all states, to
    know what to read from a checkpoint. Low words that `compile` made of fp32 weights must not prevent that.

    What is missing is made as an empty dictionary, but while the user's code runs (`eager.step`).
    """

    theirs: Any = dict
    """What makes it then: the `default_factory` that the user's code gave to the states; None in a plain dictionary."""
    empty: Any = frozenset[Any]()
    """The parameters that had an empty state when the optimizer was compiled, which their code then finds."""

    @classmethod
    def of(cls, states: Mapping[Any, Any]) -> States:
        """The same states, which `optimizer.state` was until now."""
        made = cls(dict, states)
        if empty := {p for p, state in states.items() if isinstance(state, dict) and not state}:
            made.empty = empty
        if (factory := factory_of(states)) is not dict:
            made.theirs = factory
        return made

    def show(self, to_user: bool) -> None:
        """Makes what is missing as the user's code does, which may have set another `default_factory`, or as ours."""
        if self.default_factory is not dict:
            self.theirs = self.default_factory
        self.default_factory = self.theirs if to_user else dict

    def __reduce__(self) -> Any:
        """As that of defaultdict, which takes no attributes with it."""
        return type(self), (dict,), vars(self) or None, None, iter(self.items())

    def __bool__(self) -> bool:
        return any(not (isinstance(state, dict) and is_idle(state)) for state in self.values())


def factory_of(states: Mapping[Any, Any]) -> Any:
    """What makes the states that the user's code asks for and that are not there; None if nothing does."""
    return states.theirs if isinstance(states, States) else getattr(states, "default_factory", None)


# --- the record of formats --------------------------------------------------------------------------------------------


def record_of(optimizer: Optimizer, p: torch.Tensor) -> Record:
    """The record of the parameter `p`, which callers write to: format names by state name, and by `param`."""
    recorded = bookkeeping(optimizer).formats
    record = recorded.get(p)
    if record is None:
        record = recorded[p] = recorded_in_groups(optimizer).get(p, {})
    return record


def recorded_in_groups(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, str]]:
    """The record of each parameter as the groups have it.

    It is one string per group: checkpoints that store each leaf under its own key would split a mapping, and then
    require the same keys in every template.
    """
    records: dict[torch.Tensor, dict[str, str]] = {}
    for i, group in enumerate(optimizer.param_groups):
        columns = columns_of_record(group, i) if FORMATS_KEPT in group else {}  # of many groups mostly none has one
        for name, column in columns.items():
            for p, fmt in zip(group["params"], column, strict=False):
                if fmt is not None:
                    records.setdefault(p, {})[name] = fmt
    return records


def columns_of_record(group: Mapping[str, Any], index: int) -> dict[str, list[str | None]]:
    """The record of a group: by state the names of the formats, one for each parameter.

    Raises:
        ValueError: it is something else, as in a damaged checkpoint, or a format is not registered.
    """
    try:
        written = json.loads(group.get(FORMATS_KEPT, "{}"))
    except (TypeError, ValueError):
        written = None
    if not isinstance(written, dict):
        raise damaged_record(group, index)
    columns: dict[str, Any] = {k: [x] * len(group["params"]) if isinstance(x, str) else x for k, x in written.items()}
    if not all(isinstance(x, list) and all(fmt is None or isinstance(fmt, str) for fmt in x) for x in columns.values()):
        raise damaged_record(group, index)
    for name in sorted({fmt for column in columns.values() for fmt in column if fmt is not None}):
        require_known(name, f"param_groups[{index}] has states that were")
    return columns


def damaged_record(group: Mapping[str, Any], index: int) -> ValueError:
    """The error for a record that is none."""
    return ValueError(
        f"param_groups[{index}][{FORMATS_KEPT!r}] is {group[FORMATS_KEPT]!r}, and not the record of formats that "
        "state_dict() writes (a JSON object: the name of a format by state, or a list of them, one for each "
        "parameter): it is damaged"
    )


# --- values and words -------------------------------------------------------------------------------------------------


def may_be_word(key: str, value: torch.Tensor, is_known: bool) -> bool:
    """Returns True if a state `key` may be a tensor like `value`: no code of a format, unless its name says so.

    One that is known is floating-point.
    """
    further = [c for f in FORMATS.values() for c in f.components[1:]]
    codes = {c.type.dtype for f in FORMATS.values() for c in f.components if not c.type.dtype.is_floating_point}
    if value.dtype.is_floating_point or (value.dtype not in codes and not is_known):
        return True
    return any(key.endswith(c.suffix) and c.type.dtype == value.dtype for c in further)


def is_idle(state: Mapping[str, Any]) -> bool:
    """Returns True for a parameter before its first step: its state is empty, or has only its low word."""
    return all(is_component(key, state) for key in state)


def settle(p: torch.Tensor, state: State) -> None:
    """Widens the bf16 states of a 0-d parameter, since torch may have cast numbers among them.

    States that a step shows to have the parameter's shape are converted to their formats later; see `is_host_scalar`.
    """
    if p.dim() == 0:
        plain = [k for k in state if not is_component(k, state) and not any(k + s in state for s in suffixes())]
        for name in plain:
            if isinstance(state[name], torch.Tensor) and state[name].dtype == torch.bfloat16:
                state[name] = state[name].float()


def format_by_keys(state: Mapping[str, Any], name: str) -> Format:
    """The format that follows from the keys of a value, for checkpoints that are older than the record of formats.

    Among formats with the same first words it is the one with more words; among those with the same keys it is the
    oldest one, since newer ones are recorded.
    """
    return max(_with_keys(state, name), key=lambda f: len(f.components))


def _with_keys(state: Mapping[str, Any], name: str) -> tuple[Format, ...]:
    there = frozenset(key for key, value in state.items() if isinstance(value, torch.Tensor))
    return _fitting(there, name, tuple(FORMATS.values()))


@lru_cache(4096)  # asked of every parameter, which all have the same keys
def _fitting(there: frozenset[str], name: str, formats: tuple[Format, ...]) -> tuple[Format, ...]:
    return tuple(f for f in formats if (there | {"param"}).issuperset(f.keys(name)))


def kept_format(p: torch.Tensor, state: Mapping[str, Any], name: str, record: Mapping[str, str] = NO_RECORD) -> Format:
    """The current format of the parameter or a state: the recorded one, if its components exist.

    Without a record it follows from the dtypes of the components, or from their keys if torch has cast them. Beside the
    words of blocks, floating-point numbers of another type than the codes are values that other code assigned.

    Raises:
        ValueError: the recorded format is not registered; or there is none, and the codes fit several; or there are
            integers that are no codes of the format.
    """
    if name in record:
        require_known(record[name], "the parameter is" if name == "param" else f"the state {name!r} is")
    most = format_by_keys(state, name)
    alike = [f for f in _with_keys(state, name) if len(f.components) == len(most.components)]
    recorded = [f for f in alike if f.name == record.get(name)]
    stored = [f for f in alike if _has_dtypes(p, state, name, f)]
    if not recorded and len(stored) > 1 and stored[0].is_coded:
        raise ValueError(
            f"the state {name!r} holds {stored[0].components[0].storage} codes, and nothing says in which format: "
            f"{' or '.join(f.name for f in stored)}. It was copied from another optimizer: copy with "
            "optimizer.state_dict() and load_state_dict(), which carry values"
        )
    found = (recorded or stored or [most])[0]
    return found if not found.is_coded else _codes_or_values(found, name, (p if name == "param" else state[name]).dtype)


def _codes_or_values(fmt: Format, name: str, dtype: torch.dtype) -> Format:
    """The coded format `fmt`, or that of values, by the type of what is there."""
    code = fmt.components[0].type.dtype
    if dtype == code:
        return fmt
    if not dtype.is_floating_point:
        raise ValueError(
            f"the state {name!r} is {dtype}, and the format {fmt.name} keeps it as codes in {code}: assign a "
            "floating-point tensor, which is read as values, or load a checkpoint"
        )
    return FORMATS["fp32"]


def _has_dtypes(p: torch.Tensor, state: Mapping[str, Any], name: str, fmt: Format) -> bool:
    for component in fmt.components:  # a loop: this is asked of every state in every step
        key = name + component.suffix
        tensor = p if key == "param" else state.get(key)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != component.type.dtype:
            return False
    return True


def read_exact(
    p: torch.Tensor, state: Mapping[str, Any], name: str, record: Mapping[str, str] = NO_RECORD
) -> torch.Tensor:
    """The fp32 value of the parameter (`name="param"`) or of a state, decoded from its components."""
    tensors = {**state, "param": p.detach()}
    fmt = kept_format(p, state, name, record)
    return like(word_encoding.decode(fmt, [local(tensors[key]) for key in fmt.keys(name)], name), p)


def read_fp32(
    p: torch.Tensor, state: Mapping[str, Any], name: str, record: Mapping[str, str] = NO_RECORD
) -> torch.Tensor:
    """`read_exact` as a copy that shares no memory with a state, on the CPU if `p` is on a lazy device.

    On a lazy device each value would be a separate graph, and a rounding that only separates words could be fused away.
    """
    if p.device.type == "xla":
        state = {k: v.cpu() for k, v in state.items() if str(k).startswith(name) and isinstance(v, torch.Tensor)}
        p = p.detach().cpu()
    return read_exact(p, state, name, record).clone()


def is_stored(
    p: torch.Tensor, state: Mapping[str, Any], name: str, fmt: Format, record: Mapping[str, str] = NO_RECORD
) -> bool:
    """Returns True if the value `name` exists with exactly the components of `fmt`."""
    if not _of_other_formats(name, fmt, suffixes()).isdisjoint(state):
        return False
    if not _has_dtypes(p, state, name, fmt):
        return False
    return record.get(name) == fmt.name or fmt.reads_as(kept_format(p, state, name, record))


@lru_cache(4096)
def _of_other_formats(name: str, fmt: Format, endings: frozenset[str]) -> frozenset[str]:
    """The keys of further words that the value `name` has in other formats alone."""
    return frozenset(name + suffix for suffix in endings).difference(fmt.keys(name))


def store(p: torch.Tensor, state: State, name: str, fmt: Format, value: torch.Tensor, record: Record) -> None:
    """Stores the fp32 `value` in the components of `fmt`, with hi = round(hi + lo), and drops those of other formats.

    The format is written to `record`.
    """
    # The CPU does it, where every rounding is a real cast; a lazy device might fuse it away, and would compile a graph.
    there = local(value).cpu()
    if not fmt.signed:
        _check_signs(p, name, fmt, there)
    _put(p, state, name, fmt, word_encoding.settled(fmt, name, there), record)


_PARTS = (2.0**-15, 2.0**-14, 2.0**-8, 2.0**-7, 2.0**-6, 1.0)
"""By what part of its low word a value is moved, for words of 24, 16 and 8 bits; 1: there is no low word."""


def store_beside(p: torch.Tensor, state: State, fmt: Format, value: torch.Tensor, record: Record) -> None:
    """Stores the fp32 `value` of a parameter in the further words of `fmt`; the first one, the parameter, stays.

    A value half way between two first words, which would be rounded to the other one, is moved to the last one before
    that the further words can hold.
    """
    high, exact = local(p.detach()).cpu(), local(value).cpu()
    there, beyond = exact, exact - high.float()
    for part in _PARTS:
        found = word_encoding.settled(fmt, "param", there)
        there = torch.where(found[0] == high, there, high.float() + beyond * (1 - part))
    found = word_encoding.settled(fmt, "param", there)
    _put(p, state, "param", fmt, [high, *found[1:]], record, keeps_first=True)


def _check_signs(p: torch.Tensor, name: str, fmt: Format, values: torch.Tensor) -> None:
    if (values < 0).any():
        raise ValueError(
            f"the state {name!r} of a parameter of shape {list(p.shape)} has negative values, and the format "
            f"{fmt.name} holds none: nothing was stored. If they were assigned or loaded, correct them; if the "
            "optimizer makes them, use a strategy with signs (strategy='split433'), or name another format for this "
            "state in a mapping"
        )


def _put(
    p: torch.Tensor,
    state: State,
    name: str,
    fmt: Format,
    found: Sequence[torch.Tensor],
    record: Record,
    keeps_first: bool = False,
) -> None:
    tensors = [word.to(p.device) for word in found]
    drop_words(state, name)
    for key, component, tensor in zip(fmt.keys(name), fmt.components, tensors, strict=True):
        if key == "param" and keeps_first:
            continue
        if key == "param" and p.dtype == tensor.dtype and _may_be_held(p):
            # In place: others may hold on to its memory. On XLA it would not be donated, so there it has to be held.
            local(p).detach().copy_(tensor)  # a detached DTensor counts writes on its own
        elif key == "param":
            rewrite_data(p, tensor)
            increment_version(p)  # an exchange is no write for torch: others would take it for what they have stored
        else:
            state[key] = like(_laid_as(tensor, local(p)), p) if component.block is None else beside(tensor, p)
    record[name] = fmt.name


def _may_be_held(p: torch.Tensor) -> bool:
    return p.device.type != "xla" or torch_privates.holders(local(p)) > 1


def drop_words(state: State, name: str) -> None:
    """Removes the further words of a value."""
    for suffix in suffixes():
        state.pop(name + suffix, None)


def _laid_as(word: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """`word` in the order in memory of `p`, as torch's optimizers keep their states: a step reads both side by side."""
    if p.is_contiguous() or p.shape != word.shape or p.layout is not torch.strided or p.device.type == "xla":
        return word.contiguous()
    return torch.empty_like(p, dtype=word.dtype, device=word.device).copy_(word)


def ensure_stored(
    p: torch.Tensor,
    state: State,
    name: str,
    fmt: Format,
    record: Record,
    fill: float = 0.0,
    shape: Sequence[int] | None = None,
) -> bool:
    """Creates the state, filled with `fill`, or converts it to `fmt` if it has another format; False if it has that.

    A new state has the given shape, of as many elements as `p`, or that of `p`.
    """
    there = (state.get(key) for key in fmt.keys(name))  # torch's ZeRO-1 puts what a checkpoint has, values, in it
    placed = all(word.device == p.device for word in there if isinstance(word, torch.Tensor))
    if is_stored(p, state, name, fmt, record) and placed:
        if record.get(name) == fmt.name:
            return False
        record[name] = fmt.name
    elif name != "param" and state.get(name) is None:  # torch's SGD had None before its first step
        if not fmt.signed:
            _check_signs(p, name, fmt, torch.tensor(fill, dtype=torch.float32, device="cpu"))
        _put(p, state, name, fmt, word_encoding.settled_constant(fmt, name, fill, shape or local(p).shape), record)
    else:
        store(p, state, name, fmt, read_fp32(p, state, name, record), record)
    return True
