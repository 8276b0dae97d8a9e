"""The course of a step: the calls that it has made so far, beside those of earlier steps that began with the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collage_neuron.trace.calls import Call, Quick, Written


class CallSequence:
    """The calls of a step. As long as these are the calls of one of the `earlier` steps, that one is followed."""

    def __init__(self, earlier: Sequence[list[Call]], steady: Sequence[tuple[Quick | None, Quick | None]] = ()) -> None:
        self._earlier, self._followed = earlier, earlier[0] if earlier else None
        self.steady = steady
        """The calls of the first of these, to know them by their objects; empty once the step does something else."""
        self.numbers: list[float] = []
        self._own: list[Call] = []
        """The calls, once the step does what no earlier one did."""
        self.at = 0
        """How many there were."""

    @property
    def is_new(self) -> bool:
        """Returns True once the step does what no earlier one did."""
        return self._followed is None

    @property
    def calls(self) -> list[Call]:
        """The calls so far: the list of an earlier step, if this one has made the same."""
        if self._followed is None:
            return self._own
        if self.at == len(self._followed):
            return self._followed
        found = self._followed[: self.at]  # another of the earlier steps may have ended here
        return next((calls for calls in self._earlier if len(calls) == self.at and calls == found), found)

    @property
    def whole(self) -> list[Call]:
        """The list that begins with the calls so far, and goes on to be that of this step, or of the one it follows."""
        return self._own if self._followed is None else self._followed

    @property
    def expected(self) -> Call | None:
        """The next call of the step that is followed."""
        followed = self._followed
        return followed[self.at] if followed is not None and self.at < len(followed) else None

    def known(self, func: Any, written: Written, named: dict[str, Any]) -> Call | None:
        """The next call of an earlier step that began as this one did, if it is this call."""
        if self._followed is None:
            return None
        for calls in (self._followed, *self._earlier):  # the step that is followed has it most often
            if self.at < len(calls):
                call = calls[self.at]
                is_same = call.func is func and call.args == written and call.kwargs == named
                if is_same and self._begins(calls):
                    return call
        return None

    def goes_on(self, call: Call, numbers: Sequence[float]) -> bool:
        """Adds a call with its numbers; False if the step leaves the one that it has followed by that."""
        followed, at = self._followed, self.at
        self.at += 1
        self.numbers += numbers
        if followed is None:
            self._own.append(call)
            return True
        if at < len(followed) and followed[at] is call:
            return True
        self.steady = ()
        others = (calls for calls in self._earlier if at < len(calls) and calls[at] is call)
        self._followed = next(others, None)
        if self._followed is None:
            self._own = [*followed[:at], call]
        return False

    def _begins(self, calls: list[Call]) -> bool:
        followed = self._followed
        return calls is followed or (followed is not None and calls[: self.at] == followed[: self.at])
