"""Stores the results of a step on copies: values in the words of their formats, all else as the step made it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import Role, formats_for, formats_of_shape
from collage_neuron.passes.backends.protocol import Backend, Launch
from collage_neuron.passes.capture.shadow import SWITCHES
from collage_neuron.settings import DRAWN, Settings
from collage_neuron.states import kept_formats, named_states, words
from collage_neuron.states.names import suffixes
from collage_neuron.states.sharding import writable_gradient
from collage_neuron.states.store import is_stored, kept_format
from collage_neuron.states.values import values_in
from collage_neuron.twins import codec
from collage_neuron.twins.copies import HOOKS, NOT_COPIED, Copies
from collage_neuron.twins.evident import averages

if TYPE_CHECKING:
    from collage_neuron.twins.results import Left


def formats_of(
    settings: Settings, p: torch.Tensor, states: Collection[str], evident: Collection[str], dtype: torch.dtype
) -> dict[str, Format]:
    """The formats of a parameter of this dtype and of its states of that shape.

    Those that are `evident` averages are stored as a slow state that may have a sign. Of others it is not known what
    they are: each is stored as the parameter, since it may be a position that the parameter goes back to.
    """
    names = tuple(states)
    roles: dict[str, Role] = {name: "decaying" if name in evident else "idle" for name in names}
    return dict(formats_of_shape(formats_for(settings.strategy, names, roles, dtype), p.dim()))


def formats_on_copies(
    settings: Settings,
    p: torch.Tensor,
    state: Mapping[str, Any],
    record: Mapping[str, str],
    dtype: torch.dtype = torch.bfloat16,
) -> Mapping[str, Format]:
    """The same of a parameter that is bf16, or will be, and of its states that are values now.

    A state that is stored as an average stays one, in a resumed run too.
    """
    names = values_in(state, p, record)
    found = formats_of(settings, p, names, (), dtype)
    as_averages = formats_of(settings, p, names, names, dtype)
    small = [n for n in names if as_averages[n] != found[n] and is_stored(p, state, n, as_averages[n], record)]
    return found | {name: as_averages[name] for name in small}


class Stored(NamedTuple):
    """A value and the words that it is written to."""

    name: str
    format: Format
    words: list[torch.Tensor]


class Storing:
    """The words of all results; made first, so that what can fail comes before anything is written."""

    def __init__(self, copies: Copies, left: Mapping[torch.Tensor, Left]) -> None:
        self.copies, self.left = copies, left
        self.stored: dict[torch.Tensor, list[Stored]] = {}
        self.launches: dict[Backend, list[Launch]] = defaultdict(list)
        self._drawing: set[int] = set()
        params = list(copies.params)
        numbers = {id(p): i for i, p in enumerate(params)}
        for group in copies.original.param_groups:
            for p in group["params"]:
                self._plan(group, p, numbers[id(p)], len(params))
        named_states.check_left(copies.original, {p: [k for k in left[p].values if k != "param"] for p in params})

    def _plan(self, group: dict[str, Any], p: torch.Tensor, number: int, count: int) -> None:
        settings, values = Settings.of(group), self.left[p].values
        backend = codec.converter(settings.backend, p.device)
        formats = self._formats(settings, group, p)
        self.stored[p] = []
        for k, (name, value) in enumerate(values.items()):
            fmt = formats[name]
            codec.check_codec(backend, [fmt], p.device)
            if self._is_as_before(p, name, fmt, value):
                continue
            into = self._words(p, name, fmt)
            # Another parameter's number for each value, so that no two are rounded by the same random bits.
            drawing = [settings.seed, group.get(DRAWN, 0), number + k * count, 0]
            self.launches[backend].append(codec.encoded(fmt, name, value, into, drawing))
            self.stored[p].append(Stored(name, fmt, into))
            if fmt.draw is not None:
                self._drawing.add(id(group))

    def _formats(self, settings: Settings, group: dict[str, Any], p: torch.Tensor) -> Mapping[str, Format]:
        """The formats of what there was, as it is stored, and of new states, by what their first values show."""
        given, left = self.copies.given.get(p, {}), self.left[p]
        state, record = self.copies.original.state.get(p, {}), kept_formats.of(self.copies.original, p)
        before = formats_on_copies(settings, p, state, record, p.dtype)
        new = {k: x for k, x in left.values.items() if k != "param" and k not in given}
        if not new:
            return before
        found, as_averages = (formats_of(settings, p, new, evident, p.dtype) for evident in ((), new))
        evident = averages(group, p, left.copy.grad, new) if as_averages != found else ()
        return {**before, **found, **{name: as_averages[name] for name in evident}}

    def _is_as_before(self, p: torch.Tensor, name: str, fmt: Format, value: torch.Tensor) -> bool:
        """Returns True for a value of a parameter without a gradient that the step left alone."""
        state = self.copies.original.state.get(p, {})
        record = kept_formats.of(self.copies.original, p)
        there = name == "param" or name in self.copies.given.get(p, {})
        if p.grad is not None or not there or not is_stored(p, state, name, fmt, record):
            return False
        kept = {**state, "param": p.detach()}
        before = words.decode(kept_format(p, state, name, record), [kept[key] for key in fmt.keys(name)], name)
        return torch.equal(_bits(before), _bits(value))

    def _words(self, p: torch.Tensor, name: str, fmt: Format) -> list[torch.Tensor]:
        """The words that there are, or new ones; the first one of a parameter is the parameter itself."""
        state, record = self.copies.original.state.get(p, {}), kept_formats.of(self.copies.original, p)
        there = name == "param" or name in self.copies.given.get(p, {})
        if there and is_stored(p, state, name, fmt, record):
            kept = {**state, "param": p.detach()}
            return [kept[key] for key in fmt.keys(name)]
        made = codec.empty_words(fmt, p)
        return [p.detach(), *made[1:]] if name == "param" else made

    def versions(self) -> list[int]:
        """Of the tensors that are written: they say after an error whether some were."""
        return [torch_privates.version(x) for each in self.stored.values() for one in each for x in one.words]

    def write(self) -> None:
        """Writes the words, and then all else."""
        for backend, launches in self.launches.items():
            codec.run(backend, launches)
        for group in self.copies.original.param_groups:
            if id(group) in self._drawing:
                group[DRAWN] = group.get(DRAWN, 0) + 1
        for p, left in self.left.items():
            self._write_state(p, left)
            _write_gradient(p, left.copy)
            _update(vars(p), vars(left.copy), dict(vars(p)))
            if p.requires_grad != left.copy.requires_grad:
                p.requires_grad_(left.copy.requires_grad)
        self._write_others()

    def _write_state(self, p: torch.Tensor, left: Left) -> None:
        original, record = self.copies.original, kept_formats.of(self.copies.original, p)
        before = original.state.get(p, {})
        of_param = {k: before[k] for k in ("param" + s for s in suffixes()) if k in before}
        new = {k: before.get(k) if k in left.values else v for k, v in left.state.items()}
        further = {k + s: before[k + s] for k in left.values for s in suffixes() if k + s in before and k != "param"}
        new |= of_param | further
        for name, fmt, stored in self.stored[p]:
            for key in (name + s for s in suffixes()):
                new.pop(key, None)
            new.update((k, x) for k, x in zip(fmt.keys(name), stored, strict=True) if k != "param")
            record[name] = fmt.name
        for name in [name for name in record if name != "param" and name not in left.values]:
            del record[name]
        if new or p in original.state:
            state = original.state[p]
            state.clear()  # in place: others may hold it
            state.update(new)
            if not state:
                del original.state[p]

    def _write_others(self) -> None:
        """Attributes, groups, and states of no parameter."""
        own, other = self.copies.original, self.copies.optimizer
        ours = {k for k in vars(own) if k in NOT_COPIED or k in HOOKS or k.startswith("_collage_")}
        after = {k: v for k, v in vars(other).items() if k not in ours and k not in NOT_COPIED}
        _update(vars(own), after, {k: v for k, v in self.copies.attributes.items() if k not in ours})
        kept = {"params", *SWITCHES}
        for group, new, before in zip(own.param_groups, other.param_groups, self.copies.groups, strict=True):
            after, before = ({k: v for k, v in x.items() if k not in kept} for x in (new, before))
            _update(group, after, before)
        copied = set(self.copies.params.values())
        others = {k: v for k, v in other.state.items() if k not in copied and k not in self.copies.params}
        for gone in [k for k in own.state if k not in self.copies.params and k not in others]:
            del own.state[gone]
        own.state.update(others)


def _update(names: dict[str, Any], after: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Puts into `names` what a step has changed: new objects, and what is not there any more."""
    for gone in [k for k in before if k not in after and k in names]:
        del names[gone]
    names.update({k: v for k, v in after.items() if k not in before or before[k] is not v})


@torch.no_grad()
def _write_gradient(p: torch.Tensor, q: torch.Tensor) -> None:
    """The gradient after the step: a loop that does not clear it accumulates into it."""
    if p.grad is None or q.grad is None:
        p.grad = None if q.grad is None else q.grad.to(p.dtype)
    elif p.device.type == "xla" or (
        not _same_words(q.grad.to(p.grad.dtype), p.grad)
        and not torch.equal(_bits(q.grad), _bits(p.grad.to(torch.float32)))
    ):  # whether it was changed, the host could only wait for; rounding it changes nothing
        writable_gradient(p).copy_(q.grad)


def _same_words(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Returns True if two tensors of one dtype have the same bits, compared eight bytes at a time; False may be wrong.

    Nearly every step leaves every gradient alone, and this reads half as much as a comparison in fp32.
    """
    if not (x.is_contiguous() and y.is_contiguous() and x.shape == y.shape and x.numel()) or y.data_ptr() % 8:
        return False
    wide = 8 // x.element_size()
    if x.numel() % wide or y.storage_offset() % wide:
        return False
    return torch.equal(x.detach().reshape(-1).view(torch.int64), y.detach().reshape(-1).view(torch.int64))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """To compare NaN with itself."""
    return x.detach().float().contiguous().view(torch.int32)
