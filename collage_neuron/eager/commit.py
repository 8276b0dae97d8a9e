"""Stores what a step left: values in the words of their formats, in place; all else stays as the step made it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.eager import codec
from collage_neuron.eager.memory import is_alone, without_graph
from collage_neuron.eager.moment_detection import averages, counts
from collage_neuron.eager.presented_layout import Outline
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import FORMATS, Format, is_component
from collage_neuron.numerics.strategies import Role, formats_for, formats_of_shape
from collage_neuron.passes.backends.protocol import Backend
from collage_neuron.settings import DRAWN, Settings
from collage_neuron.states import strategy_checks, visible_states
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import is_sharded, is_sharded_like, like, local
from collage_neuron.states.state_keys import is_value, values_in
from collage_neuron.states.store import is_stored, record_of

if TYPE_CHECKING:
    from collage_neuron.eager.codec import Value
    from collage_neuron.eager.presentation import Presentation
    from collage_neuron.eager.steady import Steady


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


def formats_as_written(
    settings: Settings,
    p: torch.Tensor,
    state: Mapping[str, Any],
    record: Mapping[str, str],
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Format]:
    """The formats of a parameter that is bf16, or will be, and of its states that are values now.

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
    owner: torch.Tensor
    """The object that has the first word in the end."""
    value: torch.Tensor
    """The fp32 tensor."""
    before: Value | None
    """The same value before the step."""


Results = list[tuple[str, torch.Tensor]]
"""Names, and the objects that are stored under them."""


class Storing:
    """The words of all results; made first, so that what can fail comes before anything is written."""

    def __init__(
        self, presentation: Presentation, grads: Mapping[int, tuple[Any, bool]], new: bool, steady: Steady | None
    ) -> None:
        """Plans what to write: at the end of a step, of parameters with a gradient everything, `new` states too.

        Otherwise what was changed, which is looked at closely. All is written to where it was if a `steady` step has
        left it there.
        """
        self.presentation, self.optimizer = presentation, presentation.optimizer
        self.grads, self._at_end = grads, new
        self.stored: dict[int, list[Stored]] = {}
        self._encoding = presentation.conversions()
        self._made: dict[int, Stored] = {}
        self._states: dict[int, Any] = {}
        self._looked_up = codec.Lookup()
        self._drawing: dict[int, dict[str, Any]] = {}
        self._written: set[int] = set()
        self.is_whole = new and steady is not None and not self._is_due and steady.is_left()
        self.is_settled = new
        """True if all values are written to the words that they had."""
        if self.is_whole:
            self._plan_whole()
            return
        self._values = {id(v.owner): v for v in presentation.values}
        self._objects = {id(x) for g in presentation.gradients.of.values() for x in (g.owner, g.wide)}
        self._objects |= {id(g) for g, _ in grads.values()} | presentation.groups.keys()
        for number, (p, group) in enumerate(presentation.groups.values()):
            self._plan(p, group, number)
        if new:
            shown = {p: [s.name for s in self.stored[id(p)][1:]] for p, _ in presentation.groups.values()}
            strategy_checks.check_names_as_written(self.optimizer, shown)

    def _plan(self, p: Any, group: dict[str, Any], number: int) -> None:
        settings, backend = self._looked_up.of(group, p)
        state, outline = dict.get(self.optimizer.state, p, {}), self.presentation.outlines[id(p)]
        found = self._anew(p, state, settings, group)
        for k, stored in enumerate(found):
            if id(stored.owner) in self._made:
                continue
            self._made[id(stored.owner)] = stored
            if self._is_as_before(p, stored):
                continue
            self._written.add(id(stored.owner))
            codec.check_codec(backend, [stored.format], p.device)
            # Another parameter's number for each value, so that no two are rounded by the same random bits.
            self._encode(stored, backend, group, settings, number + k * len(self.presentation.groups))
        self.stored[id(p)] = found
        self.is_settled = self.is_settled and isinstance(settings.strategy, str) and self._keeps(outline, found)

    def _plan_whole(self) -> None:
        """Plans to write all parameters with a gradient, of a step that has left everything where it was."""
        given = self.presentation.gradients.of.keys()
        for alike in self.presentation.alike:
            alike.encode(self._encoding, given)
        of_params = groupby(self.presentation.values, lambda v: id(v.p))
        draws = any(alike.format.draw is not None for alike in self.presentation.alike)
        for number, (key, values) in enumerate(of_params if draws else ()):
            p, group = self.presentation.groups[key]
            settings, backend = self._looked_up.of(group, p)
            for k, v in enumerate(values if key in given else ()):
                if v.fmt.draw is not None:
                    # By the numbers that `_plan` has: a step draws the same bits either way.
                    stored = Stored(v.name, v.fmt, [v.owner, *v.further], v.owner, v.shell, v)
                    self._encode(stored, backend, group, settings, number + k * len(self.presentation.groups))

    def _encode(self, stored: Stored, backend: Backend, group: dict[str, Any], settings: Settings, number: int) -> None:
        drawing = None
        if stored.format.draw is not None and self._at_end:  # what is stored in the middle is rounded to nearest
            drawing = [settings.seed, group.get(DRAWN, 0), number, 0]
            self._drawing[id(group)] = group
        wide = without_graph(local(stored.value)).to(torch.float32)
        into = [without_graph(local(x)) for x in stored.words]  # a detached DTensor counts writes on its own
        self._encoding.encode(backend, stored.format, stored.name, wide, into, drawing)

    def _anew(self, p: Any, state: Any, settings: Settings, group: dict[str, Any]) -> list[Stored]:
        """What is stored of a parameter, in the formats that follow from what the step left."""
        _check_state(p, state)
        if state and self._states.setdefault(id(state), p) is not p:
            raise UnsupportedUpdate("step() gives two parameters one dictionary as their state; copy it")
        results = list(self._results(p, state))
        formats = self._formats(settings, group, p, results)
        found = ((name, self._made.get(id(x)) or self._new(p, name, formats[name], x)) for name, x in results)
        return [stored._replace(name=name) for name, stored in found]

    def _keeps(self, outline: Outline, stored: Sequence[Stored]) -> bool:
        """Returns True if all values have the formats and words that they had before."""
        same = [(s.name, s.format) for s in stored] == [(name, fmt) for name, fmt, _ in outline.values]
        return same and all(
            s.before is not None and s.before.p is stored[0].owner and s.words[0] is s.owner for s in stored
        )

    def _results(self, p: Any, state: Mapping[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameter, and the states that are stored in words."""
        shell = self._values[id(p)].shell
        is_fp32 = shell.dtype == torch.float32
        if not is_fp32 or shell.shape != p.shape or shell.device != p.device or not is_sharded_like(shell, p):
            raise UnsupportedUpdate(
                f"step() makes a parameter of shape {list(p.shape)} one of shape {list(shell.shape)} and type "
                f"{shell.dtype}, on {shell.device}"
            )
        yield "param", p
        for name, x in state.items():
            value = self._values.get(id(x))
            if value is not None and (value.shell.shape != x.shape or value.shell.dtype != torch.float32):
                raise UnsupportedUpdate(
                    f"step() gives the state {name!r} other data, {value.shell.dtype} of shape "
                    f"{list(value.shell.shape)}: assign a new tensor to optimizer.state[p] instead"
                )
            is_known = id(x) in self._values and id(x) not in self.presentation.groups
            if is_known or (self._at_end and self._may_be_stored(p, name, x)) or self._is_of_method(p, name, x):
                yield name, x

    def _is_of_method(self, p: torch.Tensor, name: Any, x: Any) -> bool:
        """Returns True for a new fp32 state of a method: it is stored as such, until a step shows what it is."""
        is_fp32 = isinstance(x, torch.Tensor) and x.dtype == torch.float32
        return self.presentation.kind != "step" and is_fp32 and self._may_be_stored(p, name, x)

    def _may_be_stored(self, p: torch.Tensor, name: Any, x: Any) -> bool:
        """Returns True for a new state that can have words; others stay as they were made."""
        if not (isinstance(name, str) and isinstance(x, torch.Tensor) and x.grad_fn is None) or id(x) in self._objects:
            return False
        if x.dtype in (torch.bfloat16, torch.float16):  # on purpose
            visible_states.note_made(self.optimizer, p, {name: x}, (name,))
            return False
        # Not what shares its memory: a view of one buffer, an array.
        return is_value(x, p) and (id(x) in self._made or is_alone(x))

    def _formats(self, settings: Settings, group: dict[str, Any], p: Any, results: Results) -> dict[str, Format]:
        """The formats of what there was, and of new states, by what their first values show."""
        befores = {name: self._values[id(x)] for name, x in results if id(x) in self._values}
        known = {name: befores[name].fmt if name in befores else FORMATS["fp32"] for name, _ in results}
        if is_sharded(p) and not self._at_end:  # other processes may not be here (a method that one of them calls)
            return known
        if p.device.type == "xla" and not torch_privates.may_run_on_xla():  # no value can be looked at
            return known | {"param": formats_of(settings, p, [], (), p.dtype)["param"]}
        new = {name: x.detach() for name, x in results if name not in befores}
        names, shape = [*(befores.keys() - {"param"}), *new], p.shape
        found, as_averages = (formats_of(settings, p, names, evident, p.dtype) for evident in ((), names))
        # A captured step keeps states in other shapes too: there the words stay what they are.
        others = {name: before.fmt for name, before in befores.items() if before.owner.shape != shape}
        grad = self.grads[id(p)][0]
        gradient = None if grad is None else grad.detach()
        named = settings.strategy if isinstance(settings.strategy, Mapping) else {}
        counting = counts(gradient, self._may_count(befores, new, found)) - named.keys()
        others |= dict.fromkeys(counting if self._at_end else [*counting, *new], FORMATS["fp32"])
        if as_averages == found:
            return found | others
        small = {name for name in befores if befores[name].fmt == as_averages[name] and name != "param"}
        small |= averages(group, p.detach(), gradient, new)
        return found | {name: as_averages[name] for name in small} | others

    def _may_count(
        self, befores: Mapping[str, Value], new: Mapping[str, torch.Tensor], found: Mapping[str, Format]
    ) -> dict[str, torch.Tensor]:
        """The values of states whose formats may lose counts: of new ones, and when it is time to look again."""
        values = {k: v.shell for k, v in befores.items() if k != "param" and (self._is_due or v.fmt is not found[k])}
        values.update(new)
        return {k: x.detach() for k, x in values.items() if found[k] is not FORMATS["fp32"]}

    @property
    def _is_due(self) -> bool:
        # In steps 1, 2, 4, ..., 256: what begins with zeros may count later.
        steps = bookkeeping(self.optimizer).steps + 1
        return self._at_end and steps <= 256 and steps & (steps - 1) == 0

    def _new(self, p: torch.Tensor, name: str, fmt: Format, owner: torch.Tensor) -> Stored:
        """The words that there are, or new ones; the first one of a parameter is the parameter itself."""
        before = self._values.get(id(owner))
        value = owner if before is None else before.shell
        if before is not None:
            kept = Stored(name, before.fmt, [owner, *before.further], owner, value, before)
            has_types = before.owner.dtype == fmt.components[0].type.dtype
            if (before.fmt is fmt and has_types) or (not self._at_end and self._is_as_before(p, kept)):
                return kept
        made = [
            word if component.block is not None else like(word, p)
            for word, component in zip(codec.empty_words(fmt, local(p.detach())), fmt.components, strict=True)
        ]
        if name == "param":
            made[0] = p
        return Stored(name, fmt, made, owner, value, before)

    def _is_as_before(self, p: torch.Tensor, stored: Stored) -> bool:
        """Returns True for a value that the step left alone; of a parameter with a gradient it is not looked for."""
        before = stored.before
        if before is None or before.fmt is not stored.format or (p.grad is not None and self._at_end):
            return False
        if p.device.type == "xla" and not torch_privates.may_run_on_xla():  # no value can be looked at
            return False
        return self.presentation.are_as_before([before])

    def is_written(self, stored: Stored) -> bool:
        """Returns True if the step has changed the value, as far as is looked for."""
        return id(stored.owner) in self._written

    def params_written(self) -> list[torch.Tensor]:
        """The parameters that the step has changed."""
        return [p for p, _ in self.presentation.groups.values() if id(p) in self._written]

    @property
    def writes(self) -> bool:
        """Returns True if words will change."""
        return bool(self._encoding) or any(id(v.owner) not in self._made for v in self.presentation.values)

    # --- the writing ----------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Writes the words, and then all else."""
        self._encoding.run()  # before the counts of draws: a backend that raises leaves them as they were
        for group in self._drawing.values():
            group[DRAWN] = group.get(DRAWN, 0) + 1
        self.presentation.gradients.write(
            {key: grad for key, (grad, _) in self.grads.items()}, self.presentation.params()
        )
        if not self.is_whole:
            self._write_each()
            return
        self.presentation.put_words()
        states = self.presentation.states()
        for p, _ in self.presentation.groups.values() if not all(states.values()) else ():
            if states.get(id(p)) == {}:
                del self.optimizer.state[p]

    def _write_each(self) -> None:
        """Words get their places, parameter by parameter."""
        self.presentation.release(self._made.keys())  # what is in no state any more keeps its fp32 value
        done: set[int] = set()
        for p in self.presentation.params():
            for stored in self.stored[id(p)]:
                if stored.words[0] is not stored.owner and id(stored.owner) not in done:
                    torch_privates.exchange(stored.owner, stored.words[0])  # the object stays, with the word inside
                done.add(id(stored.owner))
            self._write_state(p)
            requires_grad = self.grads[id(p)][1]
            if p.requires_grad != requires_grad:
                p.requires_grad_(requires_grad)

    def _write_state(self, p: torch.Tensor) -> None:
        record = record_of(self.optimizer, p)
        further: dict[str, torch.Tensor] = {}
        for name, fmt, stored, *_ in self.stored[id(p)]:
            further.update(zip(fmt.keys(name)[1:], stored[1:], strict=True))
            record[name] = fmt.name
        names = {stored.name for stored in self.stored[id(p)]}
        for name in [name for name in record if name not in names]:
            del record[name]
        if further:
            self.optimizer.state[p].update(further)
        elif dict.get(self.optimizer.state, p) == {}:
            del self.optimizer.state[p]


def _check_state(p: torch.Tensor, state: Any) -> None:
    """Raises UnsupportedUpdate for a state in which the words would have no place."""
    if not isinstance(state, dict):
        raise UnsupportedUpdate(
            f"step() keeps an object of type {type(state).__name__} as optimizer.state[p]; keep a dictionary"
        )
    for name in state:
        if name == "param" or is_component(name, state):
            raise UnsupportedUpdate(
                f"step() has a state called {name!r}, which is what the parameter, or a further word, is called; "
                "rename it"
            )
