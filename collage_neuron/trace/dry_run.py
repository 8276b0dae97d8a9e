"""What the next step will do, known before it: a traced step of a copy of the optimizer, whose tensors have no memory.

The copy has placeholders in place of parameters, gradients and states, and copies of the containers, of the objects
and of the small tensors that the optimizer holds; what else its code changes on the host is undone. The result is best
effort: a step that looks at a value, or uses what cannot be put back (a generator), is not known before it is taken.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnknownUpdate, UnsupportedUpdate
from collage_neuron.passes.analysis.state_roles import structure
from collage_neuron.passes.ir.update import Recording
from collage_neuron.runtime.preconditions import is_left_alone
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.inner_optimizers import inner_of
from collage_neuron.states.sharding import TRIED
from collage_neuron.trace import shards
from collage_neuron.trace.calls import Uncompiled
from collage_neuron.trace.code_inspection import ASKS, Asked, draws
from collage_neuron.trace.meta_copy import Copied, whole
from collage_neuron.trace.recorded_classes import is_traced
from collage_neuron.trace.side_effects import undone
from collage_neuron.trace.step_kinds import StepKind, Traces


class Known:
    """What is known of the next step of an optimizer."""

    def __init__(self, base: type[Optimizer], found: Mapping[int, Recording], error: Exception | None = None) -> None:
        self._base, self._found, self._error = base, found, error

    @property
    def is_of_part(self) -> bool:
        """Returns True if the step does what parts of parameters cannot have: it will not run as written either."""
        return isinstance(self._error, shards.OfPart)

    def record(self, group: dict[str, Any], p: Tensor) -> Recording:
        """The update of a parameter; that of another one of its group, if this step leaves it as it is.

        Raises:
            UnsupportedUpdate: it is not known, for the reason given; UnknownUpdate if it may be when it is taken.
        """
        like = next((q for q in (p, *group["params"]) if id(q) in self._found), None)
        if like is None:
            why = self._error or "step() does nothing to a parameter"
            cause = None if self._error is None else self._error.__cause__
            kind = UnknownUpdate if isinstance(why, UnknownUpdate) else UnsupportedUpdate
            raise kind(f"{self._base.__name__} cannot be compiled: {why}") from cause
        return self._found[id(like)]

    @property
    def is_known(self) -> bool:
        """Returns True if a step could be taken."""
        return self._error is None

    def of_groups(self, optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Recording]]:
        """The updates of all parameters, with their groups."""
        for group in optimizer.param_groups:
            yield from ((group, self._found[id(p)]) for p in group["params"] if id(p) in self._found)


def run(base: type[Optimizer], optimizer: Optimizer) -> Known:
    """Takes one step of a copy, and a second one if the first does not show what its states are for."""
    return copy_context().run(_run, base, optimizer)  # so that context variables are as before


def _run(base: type[Optimizer], optimizer: Optimizer) -> Known:
    found: dict[int, Recording] = {}
    try:
        if draws(base, optimizer):  # from what other threads (a data loader) draw from too: nothing could put it back
            raise UnknownUpdate("step() draws random numbers, which would be drawn twice")
        copied = whole(base, optimizer)
        classes = [base, *(type(each.optimizer) for each in inner_of(optimizer))]
        # A class of torch's is not looked into, but somebody may have put a function of theirs there (a profiler).
        methods = [x for c in classes for of in c.__mro__ for x in vars(of).values() if isinstance(x, FunctionType)]
        with warnings.catch_warnings(), _unheard(), undone([*classes, *methods, *copied.copies.shared]):
            warnings.simplefilter("ignore")
            found = _recordings(copied)
            if any(structure(each.captured.graph).unread for each in found.values()):
                found = _with_following(found, copied)
    except (UnsupportedUpdate, Uncompiled) as error:
        return Known(base, found, error)
    return Known(base, found)


@contextmanager
def _unheard() -> Iterator[None]:
    """A context in which nobody hears what this thread logs: the step that is taken logs it too."""
    thread = threading.get_ident()
    others = logging.Filter()
    others.filter = lambda record: record.thread != thread  # type: ignore[method-assign]
    # To each logger: the filter of one sees nothing that its children pass on.
    found = [logging.root, *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    for logger in found:
        logger.addFilter(others)
    try:
        yield
    finally:
        for logger in found:
            logger.removeFilter(others)


def known(base: type[Optimizer], optimizer: Optimizer) -> Known | None:
    """What is known of the next step, if steps are traced; None where they are recorded."""
    if not is_traced(base, optimizer):
        return None
    why = next(_unknown(base, optimizer), None)
    found = run(base, optimizer) if why is None else Known(base, {}, UnsupportedUpdate(why))
    # A step that looks at values is known once one was taken.
    return found if found.is_known else _taken(base, optimizer) or found


def _taken(base: type[Optimizer], optimizer: Optimizer) -> Known | None:
    """The last step, if it was launched."""
    traces: Traces | None = bookkeeping(optimizer).traces
    if traces is None or traces.presentation is None:
        return None
    params = (p for group in optimizer.param_groups for p in group["params"] if not is_left_alone(p))
    return Known(base, _by_params(traces.kinds[0], list(dict.fromkeys(map(id, params)))))


def _unknown(base: type[Optimizer], optimizer: Optimizer) -> Iterator[str]:
    """Why the next step will not be traced, or a copy cannot take it."""
    if Asked().by(base, optimizer):
        yield ASKS
    if torch_privates.modes():
        yield "a mode of torch's sees each operation"
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.device.type not in (*TRIED, "meta"):
                yield f"a parameter is on {p.device}, and steps are tried on {', '.join(TRIED)} only"


def following(base: type[Optimizer], optimizer: Optimizer, found: Known | None = None) -> dict[str, Recording]:
    """The steps after the next one, where that does not show what its states are for; by the texts of its updates.

    `found` is what is known of the next one, if that has been asked for.
    """
    found = found or known(base, optimizer)
    each = () if found is None else (recording for _, recording in found.of_groups(optimizer))
    return {one.captured.text: one.following for one in each if one.following is not None}


def _recordings(copied: Copied) -> dict[int, Recording]:
    return _by_params(copied.step().kind, list(copied.params))


def _by_params(kind: StepKind, keys: Sequence[int]) -> dict[int, Recording]:
    return {keys[i]: replace(each.recording, by_shape=True) for each in kind.planned for i in each.params}


def _with_following(found: Mapping[int, Recording], copied: Copied) -> dict[int, Recording]:
    try:
        later = _recordings(copied)
    except (UnsupportedUpdate, Uncompiled):  # the first step is known all the same
        return dict(found)
    return {
        key: replace(each, following=later.get(key)) if structure(each.captured.graph).unread else each
        for key, each in found.items()
    }
