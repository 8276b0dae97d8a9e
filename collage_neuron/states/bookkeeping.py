"""The bookkeeping of a compiled optimizer: one object for what lasts between steps outside `state` and `param_groups`.

It is an attribute of the optimizer, so `copy.deepcopy`, `pickle` and `torch.save` carry it, and in a copy it refers to
the copies of the parameters. What a checkpoint must carry is in `state` and `param_groups` instead: the number of steps
that drew random bits (`settings.DRAWN`) and of skipped steps (`settings.SKIPPED`), and a copy of the formats of states
where their keys do not determine them (`settings.FORMATS_KEPT`).

Its marks say how parameters with low words, and states with such words, were when those words were found to be theirs.
The further words of parameters are noted with them (`LowWords`): code may clear the states in which they are. After a
step the marks are lists, one for all parameters, which the next step compares as a whole if its structure is that of
the last one (`step_inventory`). They become dictionaries, by parameter, where something asks for those or has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.states.sharding import ORDINARY, local, locals_of, version, versions

Mark = tuple[int, int, int]

FRESH, STEPPED, LOADED = "compiled", "stepped", "loaded"
"""What happened last to a parameter with low words."""


def mark_of(p: torch.Tensor) -> Mark:
    """Changes when `p` is written: in place by its version, exchanged (`p.data = ...`) by its address.

    A DTensor whose module is moved (`model.to`) has another shard, whose versions begin anew, in the same memory.
    """
    shard = local(p)
    # A parameter of another type may be a wrapper without an address; on XLA the address is always 0.
    return version(p), shard.data_ptr() if type(shard) in ORDINARY else 0, id(shard)


ORDER = count(1)
"""Numbers for what is stored, in the order of this process: versions of torch begin anew where a module is moved."""


class LowWords(NamedTuple):
    """The further words of a parameter, and how the parameter, their first word, was when they were stored."""

    event: str
    """FRESH or STEPPED; LOADED if the parameter may still be written with what the words belong to."""
    mark: Mark | None
    """The parameter's; None in a copy of an optimizer if the parameter was written before."""
    words: Mapping[str, torch.Tensor]
    """The tensors, which its state holds too, by key."""
    bits: tuple[torch.Tensor, int] | None = None
    """What the parameter held, on the host, and the version that loads of the model leave it with; None unless other
    code is expected to write it before the next step (`external_writes`)."""
    stored: int = 0
    """Its place in the order of all that was stored (`ORDER`)."""
    versions: Sequence[int] = ()
    """Those of the words then."""

    def is_of(self, p: torch.Tensor) -> bool:
        """Returns True if the words are known to belong to what `p` is now."""
        return self.event != LOADED and self.mark == mark_of(p)

    def is_written(self, p: torch.Tensor) -> bool:
        """Returns True if `p` was written since."""
        return self.event != LOADED and self.mark != mark_of(p)

    @classmethod
    def of(cls, event: str, mark: Mark | None, words: Mapping[str, torch.Tensor], bits: Any = None) -> LowWords:
        """What is noted of words that are stored now."""
        return cls(event, mark, words, bits, next(ORDER), versions([*words.values()]))

    def with_words(self, words: Mapping[str, torch.Tensor]) -> LowWords:
        """The same of other tensors."""
        return self._replace(words=words, versions=versions([*words.values()]))

    def is_overwritten(self) -> bool:
        """Returns True if the words were written since, as torch.distributed.checkpoint reads into them."""
        return versions([*self.words.values()]) != [*self.versions]


class Split(NamedTuple):
    """Where in a step's parameters and states there are low words; it depends on the structure alone."""

    owners: Sequence[torch.Tensor]
    """The parameters with states."""
    params: Sequence[torch.Tensor]
    """Those with low words."""
    highs: Sequence[tuple[int, str]]
    """The states with low words: the place of the owner, and the name."""
    words: Sequence[tuple[int, str]]
    """The further words of the owners themselves: the place, and the key."""
    coded: Sequence[tuple[int, str]] = ()
    """Those of `highs` that are in codes."""

    def marks(self) -> list[list[int]]:
        """The marks of the parameters now: all versions, all addresses, and what else tells them apart."""
        shards = locals_of(self.params)
        if not ORDINARY.issuperset(map(type, shards)):
            return [*map(list, zip(*map(mark_of, self.params), strict=True))]
        # A few calls for all. What is no DTensor is its own part.
        counts = versions(self.params) if shards is not self.params else [*map(torch_privates.version, shards)]
        return [counts, [*map(torch.Tensor.data_ptr, shards)], [*map(id, shards)]]


class _Columns(NamedTuple):
    """The marks of all that is in a `Split`, in its order."""

    split: Split
    ids: list[int]
    """Those of all tensors in the states, which say that states have the same words: these are held here."""
    params: list[list[int]]
    highs: list[torch.Tensor]
    high_versions: list[int]
    words: list[torch.Tensor]
    word_versions: list[int]
    stored: int

    @classmethod
    def of(cls, split: Split, ids: list[int], highs: list[torch.Tensor], words: list[torch.Tensor]) -> _Columns:
        """The marks as they are now."""
        return cls(split, ids, split.marks(), highs, versions(highs), words, versions(words), next(ORDER))


def _values(states: Sequence[Mapping[str, Any]], places: Sequence[tuple[int, str]]) -> list[torch.Tensor]:
    return [states[i][key] for i, key in places]


class Marks:
    """The marks of an optimizer's parameters and states; those made by copy.copy share them."""

    def __init__(self) -> None:
        self._params: dict[torch.Tensor, LowWords] = {}
        self._states: dict[torch.Tensor, dict[str, tuple[torch.Tensor, int]]] = {}
        self._all: _Columns | None = None
        self._ids: tuple[Split, set[int]] | None = None

    @property
    def params(self) -> dict[torch.Tensor, LowWords]:
        """The low words of each parameter that has some, or had."""
        self._spread()
        return self._params

    @property
    def states(self) -> dict[torch.Tensor, dict[str, tuple[torch.Tensor, int]]]:
        """The first words of states with low words, and their versions when those were found to be theirs."""
        self._spread()
        return self._states

    def known(self) -> set[int]:
        """The ids of the parameters that have low words, or had."""
        if self._all is None:
            return set(map(id, self._params))
        if self._ids is None or self._ids[0] is not self._all.split:  # many optimizers are asked in a step
            self._ids = self._all.split, set(map(id, self._all.split.params))
        return self._ids[1]

    def held(self) -> set[int]:
        """The ids of the states that this refers to."""
        found = [high for names in self._states.values() for high, _ in names.values()]
        return set(map(id, found if self._all is None else self._all.highs))

    def mark_all(self, split: Split, states: Sequence[Mapping[str, Any]], ids: list[int]) -> None:
        """Marks everything in `split`, which is of states with tensors of these ids, and nothing else, after a step."""
        self._params.clear()
        self._states.clear()
        self._all = _Columns.of(split, ids, _values(states, split.highs), _values(states, split.words))
        if self._ids is not None and self._ids[0] is not split:
            self._ids = None  # parameters that are gone are not kept by it

    def mark_again(self, split: Split, ids: list[int]) -> bool:
        """The same where states have the tensors of the last step; False, and marks nothing, if some are others."""
        noted = self._of(split, ids)
        if noted is None:
            return False
        self._all = _Columns.of(split, ids, noted.highs, noted.words)
        return True

    def are_those_of(self, split: Split, ids: list[int]) -> bool:
        """Returns True if `mark_all` would mark the same again: nothing was written or exchanged."""
        noted = self._of(split, ids)
        return noted is not None and (noted.params, noted.high_versions) == (split.marks(), versions(noted.highs))

    def _of(self, split: Split, ids: list[int]) -> _Columns | None:
        """What was noted after a step with the same structure, and the same tensors in states."""
        noted = self._all
        return noted if noted is not None and noted.split is split and noted.ids == ids else None

    def _spread(self) -> None:
        """Makes dictionaries of lists."""
        if self._all is None:
            return
        noted, self._all = self._all, None
        owners, words, counts = noted.split.owners, dict[int, dict[str, torch.Tensor]](), dict[int, list[int]]()
        for (i, key), word, its_version in zip(noted.split.words, noted.words, noted.word_versions, strict=True):
            words.setdefault(i, {})[key] = word
            counts.setdefault(i, []).append(its_version)
        marks = zip(*noted.params, strict=True)
        params = zip(noted.split.params, marks, words.values(), counts.values(), strict=True)
        self._params.update((p, LowWords(STEPPED, mark, of, None, noted.stored, v)) for p, mark, of, v in params)
        for (i, name), high, its_version in zip(noted.split.highs, noted.highs, noted.high_versions, strict=True):
            self._states.setdefault(owners[i], {})[name] = high, its_version


# --- the bookkeeping --------------------------------------------------------------------------------------------------


ATTRIBUTE = "_collage_bookkeeping"
"""Where it is: an attribute of the optimizer, and an entry of what `Optimizer.__getstate__` returns."""

OF_ONE = (
    "reductions", "watcher", "following", "leaving", "seen", "structure", "presented", "pool", "traces", "copies",
    "in_own_method", "sample",
)  # fmt: skip
"""Fields that a copy of the optimizer does not get."""


class Pin(NamedTuple):
    """The fp32 memory of a value between two steps."""

    shell: torch.Tensor
    value: torch.Tensor
    """What was in it after the last step."""
    memory: int
    """That of the first word: after `p.data = x` what was kept is no part of the parameter."""


@dataclass
class Bookkeeping:
    """Everything that lasts between the steps of one optimizer, outside `state` and `param_groups`."""

    marks: Marks = field(default_factory=Marks)
    """How parameters and states with low words were when those were found to be theirs (`external_writes`)."""
    formats: dict[torch.Tensor, dict[str, str]] = field(default_factory=dict)
    """The names of the formats that each parameter (`param`) and its states are kept in (`format_record`)."""
    compiled_with: list[list[torch.Tensor]] = field(default_factory=list)
    """Until the first step, the parameters of each group when the optimizer was compiled (`replaced_params`)."""
    small: set[str] = field(default_factory=set)
    """Names of the states of one number that the step was seen to compute from tensors (`visible_states`)."""
    seen_as: set[str] = field(default_factory=set)
    """Names of the states that the step was seen to keep in the shape of a view of the parameter (`visible_states`)."""
    fp32: set[torch.Tensor] = field(default_factory=set)
    """Parameters that `compile` left in fp32 (`buffers`)."""
    groups: dict[int, tuple[Any, Any, bool]] = field(default_factory=dict)
    """Strategy and learning rate of each group in the last step; True if that rate was looked at (`group_settings`)."""
    narrow: set[torch.Tensor] = field(default_factory=set)
    """Parameters that were bf16 when the optimizer was compiled or stepped (`param_checks`)."""
    steps: int = 0
    """Steps taken since the optimizer was made (`coarse_writes`)."""
    writes: list[int] = field(default_factory=list)
    """Before which of the last steps other code had changed parameters (`coarse_writes`)."""
    idle_writes: list[int] = field(default_factory=list)
    """Before which of the last steps other code had written parameters without a change (`coarse_writes`)."""
    samples: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """Some elements of parameters that other code writes, after the last step (`coarse_writes`)."""
    in_own_method: bool = False
    """True while our `state_dict` or `load_state_dict` runs, which calls torch's."""
    told_of_writes: bool = False
    """True if the user was warned of it."""
    as_written: str = ""
    """Not empty if steps run as written (`eager`): why they are not compiled."""
    copies: Any = None
    """Copies of the model that are watched, a list of `coarse_writes.Copy`; a copy of the optimizer has others."""
    watched_until: int = 0
    """The step until which they are."""
    interrupted: str = ""
    """Not empty after a step of which a part was taken: why. Until a checkpoint is loaded, steps raise."""
    reductions: Any = None
    """How processes agree on skipping a step, but for meshes (`nonfinite`); None: not asked yet. A copy asks anew."""
    budget: int | None = None
    """The bytes per parameter that the user asked for, if the strategy was chosen by them."""
    budgeted: Any = None
    """The strategy that was chosen then."""
    named: set[frozenset[str]] = field(default_factory=set)
    """The names in mappings that are those of states (`strategy_checks`)."""
    told: set[str] = field(default_factory=set)
    """States of which a warning was given (`strategy_checks`), and the name of a warning that is given once."""
    validated: Any = None
    """The history of validation, a `validate.History`."""
    load_compared: tuple[Any, bool] | None = None
    """True if the last load of the model brought other weights, and the versions and bits when this was found."""
    sample: Any = None
    """An `external_writes.Sample` of parameters after the last step; a copy has none."""
    joined: dict[torch.Tensor, Any] = field(default_factory=dict)
    """Words of a checkpoint that have joined fp32 parameters, until the next step (`load_checks`)."""
    paces: dict[int, Any] = field(default_factory=dict)
    """The way of each group under a schedule, an `underflow.Pace`, where its format may lose a part of it."""
    arrived: dict[int, Any] = field(default_factory=dict)
    """How much of the steps of each group arrived, an `arrived.Arrived`, where it is measured."""
    watcher: Any = None
    """The monitor, a `compiled_step.Watcher`. A copy of the optimizer has none."""
    pins: dict[torch.Tensor, Pin] = field(default_factory=dict)
    """The fp32 memory of parameters and states, by their objects, that something still refers to (`eager`)."""
    as_made: dict[torch.Tensor, set[str]] = field(default_factory=dict)
    """The states that a step has made in bf16 or fp16 on purpose, and which are so in the next step too
    (`visible_states.note_made`), unless they are stored in a format by now."""
    presented: Any = None
    """During a step as written or a method, its `eager.step.Context`."""
    pool: Any = None
    """The memory of fp32 values, an `eager.memory.Pool`; a copy of the optimizer has its own."""

    traces: Any = None
    """What lasts between traced steps, a `step_kinds.Traces`; a copy of the optimizer has its own."""
    following: Any = None
    """Until the first step, what `compile` found out about the step after it (`dry_run.following`)."""
    leaving: Any = None
    """What leaves low words with the parameters when the optimizer goes (`low_words`)."""
    seen: Any = None
    """During a step, a `step_inventory.Seen`."""
    structure: Any = None
    """What the last step found, a `step_inventory.Structure`. A copy looks anew."""

    @property
    def compares(self) -> bool:
        """True before steps 1, 2, 4, 8, ..., in which a recorded step's code runs too, and before validated ones."""
        validated = self.validated
        return not self.steps & (self.steps + 1) or validated is None or validated.steps + 1 >= validated.due

    def __getstate__(self) -> dict[str, Any]:
        """A copy lies elsewhere: instead of its mark, says of each parameter whether it was written since.

        A copy looks at states anew.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in OF_ONE}
        known = self.marks.params.items()
        marks = [(p, low.event, low.mark == mark_of(p)) for p, low in known]
        words, bits = {p: low.words for p, low in known}, {p: low.bits for p, low in known}
        return own | {"marks": marks, "words": words, "param_bits": bits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Marks the copies of parameters anew; one that was written in the original still counts as written."""
        own = dict(state)
        if "twin" in own:  # as version 0.3.0 called it
            own["as_written"] = own.pop("twin")
        words, bits = own.pop("words", {}), own.pop("param_bits", {})
        vars(self).update(vars(Bookkeeping()) | own | {"marks": Marks()})
        for p, event, belongs in state["marks"]:
            mark = mark_of(p) if belongs else None
            self.marks.params[p] = LowWords.of(event, mark, words.get(p, {}), bits.get(p))

    def of_copy(self) -> Bookkeeping:
        """Returns the bookkeeping of a `copy.copy`, which has the same parameters: shared, but for OF_ONE."""
        own: dict[str, Any] = dict.fromkeys(OF_ONE)
        return replace(self, **own)


def bookkeeping(optimizer: Optimizer) -> Bookkeeping:
    """The object of `optimizer`; an empty one where it has none yet."""
    own = vars(optimizer)
    if ATTRIBUTE not in own:  # not `setdefault`, which would make an object in every call
        own[ATTRIBUTE] = Bookkeeping()
    found: Bookkeeping = own[ATTRIBUTE]
    return found


@contextmanager
def in_own_method(optimizer: Optimizer) -> Iterator[None]:
    """A context in which torch's `state_dict` and `load_state_dict` are called by ours."""
    book = bookkeeping(optimizer)
    before, book.in_own_method = book.in_own_method, True
    try:
        yield
    finally:
        book.in_own_method = before


def is_compiled(optimizer: object) -> bool:
    """Returns True for an instance of a compiled class, also while its step shows it as one of the user's class.

    It does not import `Compiled`, which would import the whole compiler.
    """
    own: Bookkeeping | None = getattr(optimizer, "__dict__", {}).get(ATTRIBUTE)
    return hasattr(type(optimizer), "_collage_base") or (own is not None and own.presented is not None)


def params_of(optimizer: Optimizer) -> list[Any]:
    """The parameters of all groups, in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def numbered(optimizer: Optimizer, packed: Mapping[str, Any]) -> dict[Any, Any]:
    """The parameters by their numbers in what `state_dict()` returns."""
    ids = (i for group in packed["param_groups"] for i in group["params"])
    return dict(zip(ids, params_of(optimizer), strict=True))


@contextmanager
def discarded_on_error(optimizer: Optimizer) -> Iterator[None]:
    """An optimizer that `compile` rejects has no attribute of ours afterwards, unless it had it before."""
    existed = ATTRIBUTE in vars(optimizer)
    bookkeeping(optimizer)  # shadows share it, and what they learn is kept
    try:
        yield
    except BaseException:
        if not existed:
            del vars(optimizer)[ATTRIBUTE]
        raise
