"""Takes a step as written: presents fp32 values, runs the user's own `step()` once, and stores what it left.

A closure has the real weights: what the step has done so far is stored, the closure runs, and then the step goes on in
the same fp32 memory. A step that raises leaves tensors and dictionaries as they were, or, if it had changed what cannot
be restored by then, needs a checkpoint (StepInterrupted).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.eager import rejections
from collage_neuron.eager.codec import converter
from collage_neuron.eager.commit import Storing
from collage_neuron.eager.memory import pool
from collage_neuron.eager.presentation import Presentation
from collage_neuron.eager.rollback import Held
from collage_neuron.eager.steady import Steady
from collage_neuron.eager.step_metrics import changes_of
from collage_neuron.errors import RunsAsWritten, StepInterrupted, StepSkipped, UnsupportedUpdate, warn_user
from collage_neuron.runtime import fallback_warning, process_agreement
from collage_neuron.runtime.preconditions import check_settings, check_stepped
from collage_neuron.runtime.rounding_probe import require_sound
from collage_neuron.runtime.step_call import Call, Measured, Once
from collage_neuron.settings import Settings
from collage_neuron.states import external_writes, inner_optimizers, param_checks, step_inventory
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import settle_gradients
from collage_neuron.states.store import States

if TYPE_CHECKING:
    from collage_neuron.trace.traced_step import TracedStep


UNMEASURED = "unmeasured"
"""In `Bookkeeping.told` once it was said."""


class Taken(NamedTuple):
    """A step that was taken."""

    measured: list[Measured]
    returned: Any
    """What `step()` returns."""


def take(
    base: type[Optimizer],
    optimizer: Optimizer,
    refusal: UnsupportedUpdate,
    call: Call,
    finite: Callable[[], torch.Tensor | None],
    due: bool = False,
    trace: TracedStep | None = None,
) -> Taken:
    """Takes a step as written; none, if `finite` returns a mask that is false. `refusal` says why it is not captured.

    It is measured if that is `due`.

    Raises:
        UnsupportedUpdate: the step does what cannot be stored; nothing was updated.
        StepInterrupted: it raised when it had changed something already.
    """
    settings = [Settings.of(group) for group in optimizer.param_groups]
    settle_gradients(optimizer)
    rejections.check(base, optimizer, refusal, settings, may_compile=trace is not None)
    check_sound(optimizer, settings)
    for i, group in enumerate(optimizer.param_groups):
        check_settings(group, i)
        params = [p for p in group["params"] if p.grad is not None]
        check_stepped(params, _places(group, i), step_inventory.of(optimizer))
        param_checks.check_converted(params, _places(group, i), bookkeeping(optimizer).narrow)
    param_checks.check_words(optimizer)
    rejections.check_apart(optimizer)
    external_writes.drop_stale(optimizer)
    mask = finite()
    # `bool` waits for the device; a trace that may begin before it is known asks later (`decide`).
    if mask is not None and not (trace is not None and trace.decides_later(mask)) and not bool(mask):
        return Taken([], call.loss)
    if trace is None:
        fallback_warning.warn(base, optimizer, refusal)
    try:
        measured, returned = _run(base, optimizer, call, due, trace)
    except StepSkipped:
        return Taken([], call.loss)
    except StepInterrupted:  # what it has written is lost: it cannot be repeated
        raise
    except Exception as error:
        if trace is None or not trace.may_repeat:
            raise
        said = f"with values that wait, step() raises {type(error).__name__}: {error}"
        refusal = UnsupportedUpdate(f"{base.__name__} cannot be compiled: {said}")
        measured, returned = _run(base, optimizer, call, due, None, refusal)
    if trace is None or trace.given_up:
        bookkeeping(optimizer).as_written = str(refusal) if trace is None else trace.given_up
    bookkeeping(optimizer).seen = step_inventory.of(optimizer) or step_inventory.look(optimizer)
    param_checks.forget(optimizer)
    external_writes.remember_step(optimizer)
    return Taken(measured, returned)


def _run(
    base: type[Optimizer],
    optimizer: Optimizer,
    call: Call,
    due: bool,
    trace: TracedStep | None,
    refusal: UnsupportedUpdate | None = None,
) -> Taken:
    """Runs `step()`."""
    with presented(base, optimizer, "step", due, trace) as context:
        args, kwargs = context.given(call.args), context.given(call.kwargs)
        returned = context.run(lambda: torch_privates.unhooked_step(base)(optimizer, *args, **kwargs))
        if refusal is not None:  # only when it has not raised once more: else the error is the code's own
            fallback_warning.warn(base, optimizer, refusal)
    return Taken(context.measured, returned)


def _places(group: dict[str, Any], i: int) -> Iterator[str]:
    """Where the parameters of a group are that have a gradient."""
    return (f"param_groups[{i}]['params'][{j}]" for j, p in enumerate(group["params"]) if p.grad is not None)


def check_sound(optimizer: Optimizer, settings: Sequence[Settings]) -> None:
    """Raises UnsafeEnvironment if roundings are lost where values are converted: on a Trainium that is not in kernels.

    `settings` are those of the groups.
    """
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        for p in group["params"][:1]:
            require_sound(converter(own.backend, p.device), p.device, own.strategy)


class Context:
    """The context in which a step, or a method, of an optimizer runs."""

    def __init__(self, base: type[Optimizer], optimizer: Optimizer, kind: str) -> None:
        self.presentation = Presentation(optimizer, kind)
        self.base, self.optimizer = base, optimizer
        compiled: type[Optimizer] = type(optimizer)
        # A subclass that the user made of a compiled class is the user's own.
        self._classes = compiled, base if "_collage_base" in vars(compiled) else compiled
        self._is_shown = False
        """True while the user's code runs."""
        self.measured: list[Measured] = []
        self.has_stored = False
        """True once something was stored before the end, for a closure."""
        self._held: Held | None = None
        self._has_agreed = False
        """True once other processes that have parts of parameters know what is done."""
        self.is_kept = False
        """True if the presentation is kept for the next step."""
        self._structure: step_inventory.Structure | None = None
        """What the step has found, if it runs as written from its beginning."""
        self._steady: Steady | None = None
        """The presentation, if it was that of the last step."""
        self._trace: TracedStep | None = None
        self._mode: AbstractContextManager[Any] = nullcontext()
        self._lent_to: list[inner_optimizers.Inner] | None = None
        """Optimizers inside this one, which have their own states now; None if this one has them."""

    @property
    def is_step(self) -> bool:
        """Returns True in a step, False in another method."""
        return self.presentation.kind == "step"

    @torch.no_grad()
    def begin(self, trace: TracedStep | None = None) -> None:
        """Presents the values; those of a step that is traced wait, if they can."""
        seen, inside = step_inventory.of(self.optimizer), inner_optimizers.inner_of(self.optimizer)
        inner_optimizers.check_untouched(self.optimizer, inside)
        self._structure = seen.structure if seen is not None and trace is None and self.is_step else None
        # What the last step has planned holds as long as the structure is the same object.
        earlier = self._planned(seen) if trace is None else None if seen is None else trace.planned(seen)
        if earlier is None:
            known = self.presentation.plan(seen, None if trace is None else trace.waiting)
        else:
            self.presentation, known = earlier
        step_inventory.changed(self.optimizer)
        if self._held is None:
            self._held = Held(self.optimizer, self.presentation.params(), known, inside, seen)
        if trace is not None and self._held.has_large:  # what a skipped step would write there nobody could restore
            trace.decide()
        self.presentation.alias(self._held.tensors)
        if trace is not None and not self.presentation.can_wait():
            trace.check_as_written("a gradient has a class of its own, or something shares memory")
            self.presentation.plan(seen)
            self.presentation.alias(self._held.tensors)
            trace = None
        if trace is None and self.is_step:
            self.presentation.gradients.check_apart()
        if trace is None and self.is_step and not self._has_agreed and self.presentation.has_shards:
            self.presentation.agreed(process_agreement.AS_WRITTEN)
            self._has_agreed = True
        self._held.watch([v.owner for v in self.presentation.values])
        self.presentation.enter()
        self._trace = trace
        self._mode = nullcontext() if trace is None else trace.begin(self.presentation, seen, inside)
        self._lent_to = inside
        inner_optimizers.lend(self.optimizer, inside)

    def _planned(self, seen: step_inventory.Seen | None) -> tuple[Presentation, set[int]] | None:
        """What the last step as written has presented, with the ids of its tensors, if this one finds the same."""
        self._steady, pool(self.optimizer).steady = pool(self.optimizer).steady, None
        known = None
        if self._steady is not None and self._structure is not None and seen is not None:
            known = self._steady.begin(self.optimizer, seen)
        if self._steady is None or known is None:
            self._steady = None
            return None
        return self._steady.presentation, known

    def collect(self, is_undone: bool = False) -> None:
        """The optimizer has the states of those inside it again, if it has not: also of those that a step has made."""
        lent_to, self._lent_to = self._lent_to, None
        if lent_to is not None:
            inner_optimizers.collect(
                self.optimizer, lent_to if is_undone else inner_optimizers.inner_of(self.optimizer)
            )

    def _check_written(self) -> None:
        """Raises UnsupportedUpdate if the step has written the memory that something had before."""
        assert self._held is not None
        self.presentation.gradients.check_written()
        self._held.check_words()

    @torch.no_grad()
    def store(self, due: bool = False, new: bool = False) -> Storing:
        """Stores the values, in so far as they were changed, and ends the presentation.

        That `new` states get formats is the end of a step.
        """
        self.collect()
        self._check_written()
        self.presentation.gradients.check_given(self.presentation.params(), self.presentation.dtypes)
        steady = None if due else self._steady
        storing = Storing(self.presentation, self.presentation.leave(), new, steady)
        changes = changes_of(storing) if due else []
        self.has_stored = self.has_stored or storing.writes
        storing.write()
        self.measured = [change.measured() for change in changes]
        return storing

    def run(self, function: Callable[[], Any]) -> Any:
        """Runs the step."""
        self._mode.__enter__()
        self._show(to_user=True)
        try:
            return function()
        finally:
            self._show(to_user=False)
            self._mode.__exit__(None, None, None)  # that of now: a closure may have run

    def _show(self, to_user: bool) -> bool:
        """Shows the optimizer to the user's code, or to us; returns to whom it was shown before."""
        # Code of the user's may count in its class, or go by that, and missing states are made as that makes them.
        before = self._is_shown
        self._is_shown, cls = to_user, self._classes[to_user]
        object.__setattr__(self.optimizer, "__class__", cls)
        states = self.optimizer.state
        if isinstance(states, States):
            states.show(to_user)
        return before

    @torch.no_grad()
    def conclude(self, due: bool) -> None:
        """Stores or launches what the step has done."""
        self.collect()
        self._check_written()
        measured = None if self._trace is None else self._trace.finish()
        if measured is None:
            if due and self.has_stored:
                self._say_unmeasured()
            rejections.tell_of_joined(self.base, self.optimizer, self.presentation.groups)
            storing = self.store(due and not self.has_stored, new=True)
            self.end()
            self._keep(storing)
        else:
            self.measured, self.is_kept = measured, True

    def _say_unmeasured(self) -> None:
        told = bookkeeping(self.optimizer).told
        if UNMEASURED not in told:
            told.add(UNMEASURED)
            warn_user(
                f"{self._classes[True].__name__}.step() evaluates its closure after it has moved the weights, so that "
                "a step is several updates: such steps are not measured"
            )

    def _keep(self, storing: Storing) -> None:
        """Keeps the presentation if the next step may find the same."""
        if not storing.is_settled or self._structure is None or bookkeeping(self.optimizer).pins:
            return
        if not storing.is_whole:  # it has seen no guard
            self._steady = Steady.of(self.presentation, self._structure)
        if self._steady is not None:
            pool(self.optimizer).steady, self.is_kept = self._steady, True
            self.presentation.let_go(states=False)

    def end(self) -> None:
        """Lets go of memory that nothing refers to any more."""
        self.presentation.pin()

    def undo(self, error: BaseException) -> None:
        """Restores what the step has changed; raises StepInterrupted if it cannot."""
        with suppress(UnsupportedUpdate):
            self.collect(is_undone=True)
        if self._trace is not None:
            is_untouched = self._trace.is_untouched and not isinstance(error, UnsupportedUpdate)
            self._trace.raised(error)
            if is_untouched and not self._trace.may_repeat:  # as in plain torch: the host's changes stay
                self._trace.put_off()
                self.presentation.restore_words()
                return
            with suppress(Exception):  # code may have kept values, which it could read in plain torch
                if not isinstance(error, StepSkipped):
                    self._trace.compute("step() raised")
            self._trace.end()
        if self.presentation.is_on:
            self.presentation.leave()
        if self._held is None:
            return
        if self.has_stored or self._held.has_lost():
            bookkeeping(self.optimizer).interrupted = _interrupted(error)
            if isinstance(error, Exception):
                raise StepInterrupted(bookkeeping(self.optimizer).interrupted) from error
            return
        self.presentation.pinned.restore()
        self._held.restore()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which the optimizer and its parameters are as they are between steps."""
        if not self.presentation.is_on:
            yield
            return
        if self._trace is not None and self._trace.is_untouched:
            with self._put_off(self._trace):
                yield
            return
        if self._trace is not None:
            self._trace.missed("a closure sees the weights")
            self._leave_mode()
        self.store()
        self.presentation.pin(is_over=False)
        self.presentation.gradients.let_go()  # what is held by nobody else is not the code's
        external_writes.remember_step(self.optimizer, ended=False)
        with self._not_presented():
            yield
        self._has_agreed = True  # processes have agreed before what waited was computed, or when the step began
        self.begin()

    def _leave_mode(self) -> None:
        """The step does not wait any more: another one is begun before it goes on."""
        self._mode.__exit__(None, None, None)
        self._mode = nullcontext()

    @contextmanager
    def _put_off(self, trace: TracedStep) -> Iterator[None]:
        """A context as `suspended`, in a step that has done nothing yet: its values wait again afterwards."""
        self._leave_mode()
        self.collect()
        trace.put_off()
        self.presentation.restore_words()
        with self._not_presented():
            yield
        bookkeeping(self.optimizer).seen = step_inventory.look(self.optimizer)
        trace.go_on()
        self.begin(trace)
        self._mode.__enter__()

    @contextmanager
    def _not_presented(self) -> Iterator[None]:
        """The optimizer knows of no presentation while other code runs, which may write weights."""
        assert self._held is not None
        self._held.watch(())
        bookkeeping(self.optimizer).presented, is_shown = None, self._show(to_user=False)
        try:
            yield
        finally:
            bookkeeping(self.optimizer).presented = self
            self._show(is_shown)
        external_writes.drop_stale(self.optimizer)

    def given(self, arguments: Any) -> Any:
        """The arguments of a step or method, with functions that see the real weights."""
        if isinstance(arguments, dict):
            return {k: self._given(x) for k, x in arguments.items()}
        return [self._given(x) for x in arguments]

    def _given(self, x: Any) -> Any:
        if not callable(x) or isinstance(x, (type, torch.nn.Module, torch.Tensor, Optimizer)):
            return x

        def closure(*args: Any, **kwargs: Any) -> Any:
            # Nothing was done since the closure was evaluated, before the step: its loss is that of these weights.
            untouched = self._trace is not None and self._trace.is_untouched
            if untouched and isinstance(x, Once) and x.is_new:
                return x.result(is_current=True)
            is_current = (
                isinstance(x, Once)
                and not untouched
                and self.presentation.is_on
                and self.presentation.gradients.are_as_given(self.presentation.params())
            )
            with self.suspended(), torch.enable_grad():
                return x.result(is_current and not self.has_stored) if isinstance(x, Once) else x(*args, **kwargs)

        return closure


@contextmanager
def presented(
    base: type[Optimizer], optimizer: Optimizer, kind: str, due: bool = False, trace: TracedStep | None = None
) -> Iterator[Context]:
    """A context in which the optimizer presents fp32 values, which are stored when it ends."""
    ours, context = bookkeeping(optimizer), Context(base, optimizer, kind)
    outer, ours.presented = ours.presented, context
    try:
        context.begin(trace)
        yield context
        context.conclude(due)
    except BaseException as error:
        context.undo(error)
        if isinstance(error, UnsupportedUpdate):
            is_complete = " cannot be compiled: " in str(error)
            said = str(error) if is_complete else f"{base.__name__} cannot run as written: {error}"
            of_type = RunsAsWritten if isinstance(error, RunsAsWritten) else UnsupportedUpdate
            raise of_type(f"{said}; nothing was updated") from error
        raise
    finally:
        ours.presented = outer
        if not context.is_kept:
            context.presentation.clear()
        pool(optimizer).end()


def _interrupted(error: BaseException) -> str:
    return (
        f"a step as written was interrupted by an error ({type(error).__name__}: {error}) after it had changed tensors "
        "that cannot be restored (those that are not stored in words, or everything, if a closure was called in the "
        "middle): load a checkpoint, and continue from there"
    )
