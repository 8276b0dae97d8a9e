"""The compiled optimizer: a real subclass of the user's class whose `step` runs the rewritten update."""

from __future__ import annotations

import copyreg
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import cache, partial, wraps
from typing import Any, ClassVar
from weakref import ref

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate, warn_user
from collage_neuron.optimizer import bypass, compiled_step, exact_methods, load_inner, load_state
from collage_neuron.optimizer.pending_models import adopt_params
from collage_neuron.runtime import nonfinite, step_call
from collage_neuron.runtime.preconditions import check_differentiable
from collage_neuron.runtime.step_call import check_environment
from collage_neuron.settings import KEYS, UNSUPPORTED, Settings, filled
from collage_neuron.states import (
    external_writes,
    format_record,
    inner_optimizers,
    low_words,
    replaced_params,
    state_writes,
    strategy_checks,
)
from collage_neuron.states.bookkeeping import ATTRIBUTE, bookkeeping, in_own_method
from collage_neuron.states.inner_optimizers import base_of
from collage_neuron.states.store import States, is_idle


class CompiledMeta(type):
    """Metaclass of the generated classes: they pickle as a call of the factory that made them."""

    _collage_base: type[Optimizer]
    _collage_settings: Settings
    step: Any

    def mro(cls) -> list[type]:
        """Looks up `Compiled` before the user's class, although that is the first base.

        It must be the first base because CPython lets an object change its class only if the layouts of the first
        bases agree.
        """
        order = super().mro()
        return [cls, Compiled, *(c for c in order[1:] if c is not Compiled)] if "_collage_base" in vars(cls) else order

    def __setattr__(cls, name: str, value: Any) -> None:
        """Sets what a user keeps in the class of an optimizer in the user's own class, where its code finds it."""
        if _is_users(cls, name):
            setattr(cls._collage_base, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        """Takes it out of there."""
        if _is_users(cls, name):
            delattr(cls._collage_base, name)
        else:
            super().__delattr__(name)


def _is_users(cls: type, name: str) -> bool:
    """Returns True for what is no matter of a class that we have made, of which `step` is the last part."""
    is_made = "_collage_base" in vars(cls) and "step" in vars(cls)
    return is_made and name != "step" and not name.startswith(("__", "_collage"))


class Compiled(Optimizer):
    """The base of all compiled optimizers, for `isinstance(optimizer, Compiled)`.

    Settings and values are in the class, `param_groups` and `state`, so that checkpoints, sharding wrappers and
    trainers that rebuild an optimizer from class and groups lose nothing. Everything else that lasts between steps is
    in its `bookkeeping`, which copies and pickles carry.
    """

    _collage_base: ClassVar[type[Optimizer]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Does not tell the user's class of what is made of it: that may list its subclasses, or need arguments."""
        if "_collage_base" not in vars(cls):
            super().__init_subclass__(**kwargs)
            _warn_of_step(cls, vars(cls).get("step"))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop(UNSUPPORTED, None)
        given = {key: kwargs.pop(key) for key in KEYS if key in kwargs}
        self._collage_defaults = filled(given, settings_of(type(self)).as_group())
        check_environment()  # once more: a trainer may set up the process after the class was compiled
        implied = _implied(self._collage_base, kwargs)
        super().__init__(*args, **{k: v for k, v in kwargs.items() if k not in implied})
        self._check_implied(implied)
        self.defaults.update(self._collage_defaults)
        inner_optimizers.collect(self, held := inner_optimizers.inner_of(self))
        inner_optimizers.put_states(self, States.of(self.state))
        for i, group in enumerate(self.param_groups if held else ()):
            if not set(KEYS).issubset(group):  # one that an optimizer inside has made
                group.update(filled(group, self._collage_defaults))
                adopt_params(self, group["params"], i)
        bypass.watch(self)
        load_state.settle_new(self._collage_base, self)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Updates every parameter that has a gradient; returns what the step of the class returns.

        That is the closure's loss, if one is given, of torch's own classes: their closure is evaluated once, first.
        Other classes' own code gets all arguments, and evaluates the closure itself.
        """
        base, context = self._collage_base, bookkeeping(self).presented
        if context is not None and context.is_step:
            return torch_privates.unhooked_step(base)(self, *args, **kwargs)  # the user's own step calls it
        call = step_call.call_of(base, args, kwargs)
        if context is None:
            return self._take_step(base, call)
        with context.suspended():
            return self._take_step(base, call)

    def _take_step(self, base: type[Optimizer], call: step_call.Call) -> Any:
        if call.closure is not None:
            skips = any(Settings.of(group).nonfinite == "skip" for group in self.param_groups)
            if skips or compiled_step.may_be_recorded(base, self, call):
                call = call.evaluated()
        # States that are made in inference mode could not be written to outside of it.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(), torch.no_grad():
            if not step_call.is_left_a_task(self):
                return compiled_step.take_step(base, self, call)
            with step_call.scaler_attributes(self) as left:
                return compiled_step.take_step(base, self, call) if step_call.unscale(self, left) else call.loss

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """Adds a hook as torch does; ours (`bypass`) stays the last."""
        handle = super().register_step_pre_hook(hook)
        bypass.watch(self)
        return handle

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; it takes the optimizer's strategy unless it names its own (`collage_strategy`, ...)."""
        param_group.pop(UNSUPPORTED, None)
        own = vars(self).get("_collage_defaults") or {key: self.defaults[key] for key in KEYS if key in self.defaults}
        param_group.update(filled(param_group, own))
        check_differentiable({**self.defaults, **param_group}, len(self.param_groups))
        super().add_param_group(param_group)
        if bookkeeping(self).presented is None:
            inner_optimizers.collect(self, inner_optimizers.inner_of(self))  # some make states for it
        params = self.param_groups[-1]["params"]
        adopt_params(self, params, len(self.param_groups) - 1)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's dictionary, with our settings in the groups and further words beside the states.

        A state whose words are shared by blocks is shown as its fp32 value. After a step that was interrupted
        (StepInterrupted) it warns: what is saved may be half written, and loading it would not tell.
        """
        if bookkeeping(self).interrupted:
            warn_user(f"this state_dict may be half written: {bookkeeping(self).interrupted}")
        replaced_params.follow(self)
        low_words.drop_idle(self)
        low_words.restore(self)
        state_writes.check_codes(self)
        nonfinite.read_counts(self)
        with in_own_method(self):
            if inner_optimizers.inner_of(self):
                base = self._collage_base
                return load_inner.save(base, self, partial(exact_methods.presented_lazily, base, self))
            format_record.save(self)
            # Before the user's own hooks, which are to see what is saved.
            ours = external_writes.save_words, format_record.show_values
            handles = [self.register_state_dict_post_hook(hook, prepend=True) for hook in ours]
            try:
                return super().state_dict()
            finally:
                for handle in handles:
                    handle.remove()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state, all of it or, with a ValueError that names the key, none of it.

        A plain torch checkpoint keeps the strategy, and its fp32 states are split into hi and lo where the strategy
        stores pairs; one of ours brings its own strategy. See docs/checkpoints.md.
        """
        replaced_params.follow(self)
        base = self._collage_base
        with in_own_method(self):
            if inner_optimizers.inner_of(self):
                load_inner.load(base, self, state_dict, partial(exact_methods.presented_lazily, base, self))
            else:
                load_state.load(base, self, state_dict, super().load_state_dict)
        if (traces := bookkeeping(self).traces) is not None:
            traces.presentation = None  # it has the states of before

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles: as torch's, plus the bookkeeping."""
        low_words.restore(self)  # a copy may be alone
        state_writes.check_codes(self)  # and has no note of them
        state: Any = super().__getstate__()  # a user's class may return anything
        if isinstance(state, dict) and not inner_optimizers.are_copied(self, state):
            name = self._collage_base.__name__
            raise UnsupportedUpdate(
                f"{name}.__getstate__() leaves out the optimizer inside, so that a copy or a pickle of a {name} could "
                "take no step, in plain torch too: make a new one, compile it, and load state_dict() into it"
            )
        return {**state, ATTRIBUTE: bookkeeping(self)} if isinstance(state, dict) else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by copying, unpickling and loading; torch's own code looks for `step` in the first state.

        A parameter before its first step may have only its low word; such states are hidden from torch's code. What is
        not in `state` stays.
        """
        for settings in (*state.get("param_groups", ()), state.get("defaults", {})):
            settings.pop(UNSUPPORTED, None)
        whole = {**vars(self), **state}["state"]
        idle = {p: s for p, s in whole.items() if is_idle(s)}
        started = defaultdict(dict, {p: s for p, s in whole.items() if p not in idle})
        ours = {ATTRIBUTE: state[ATTRIBUTE].of_copy()} if ATTRIBUTE in state else {}  # loading keeps what is there
        super().__setstate__({**state, **ours, "state": started})
        # copy.copy shares it
        inner_optimizers.put_states(self, whole if isinstance(whole, States) else States.of(started | idle))
        if bookkeeping(self).leaving is None:  # a copy may be let go before it steps
            low_words.leave_all(self, bookkeeping(self))
        _sync_xla(whole.values())
        bypass.watch(self)

    def _check_implied(self, implied: Mapping[str, Any]) -> None:
        wrong = [k for k, v in implied.items() if k not in self.defaults or self.defaults[k] != v]
        if wrong:
            name = self._collage_base.__name__
            raise TypeError(
                f"{name} takes no argument {wrong[0]!r}, got {wrong[0]}={implied[wrong[0]]!r}; leave it out"
            )


def _warn_of_step(cls: type, step: Any) -> None:
    if step is not None and "__class__" not in getattr(getattr(step, "__code__", None), "co_freevars", ()):
        warn_user(
            f"{cls.__name__}.step() does not call super().step(), and updates the high words of weights alone, in pure "
            f"bf16: derive {cls.__name__} from the plain class, and compile it: collage_neuron.compile({cls.__name__})"
        )


def _sync_xla(states: Iterable[Mapping[Any, Any]]) -> None:
    """Ends the graph of XLA if states are there, so that copies of tensors (`copy.deepcopy`) are none of their buffers.

    Until then, a copy is only another name of a buffer. A step that writes the copy in the same graph gives the buffer
    away, and what was copied is lost.
    """
    if any(isinstance(x, torch.Tensor) and x.device.type == "xla" for state in states for x in state.values()):
        import torch_xla  # an extra: imported only where parameters are on an XLA device

        torch_xla.sync()


def _implied(base: type[Optimizer], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that the constructor of `base` does not take, although libraries pass all of `defaults` to it.

    AdamW's own `defaults` have one (`decoupled_weight_decay`), which its constructor sets itself.
    """
    accepted = inspect.signature(base).parameters
    if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        return {}
    return {k: v for k, v in settings.items() if k not in accepted}


def settings_of(cls: type) -> Settings:
    """The settings that a compiled class gives to groups without settings."""
    assert isinstance(cls, CompiledMeta)
    return cls._collage_settings


@cache
def _metaclass(of_base: Any) -> Any:
    """CompiledMeta, combined with the metaclass of the user's class if that has one of its own (ABCMeta, say)."""
    if issubclass(CompiledMeta, of_base):
        return CompiledMeta
    combined: Any = type(CompiledMeta.__name__, (CompiledMeta, of_base), {})
    copyreg.pickle(combined, _reduce_class)
    return combined


@cache
def _make(base: Any, settings: Settings) -> type[Optimizer]:
    body: dict[str, Any] = {
        "_collage_base": base,
        "_collage_settings": settings,
        strategy_checks.WARNED: {},
        "__module__": "collage_neuron.optimizer",
        "__doc__": base.__doc__,
    }
    body |= exact_methods.methods_of(base)
    of_base: Any = type(base)
    cls: Any = _metaclass(of_base)(f"Collage{base.__name__}", (base, Compiled), body)
    cls.step = bypass.noted(Optimizer.profile_hook_step(cls.step))
    torch_privates.mark_hooked(cls.step)
    made: type[Optimizer] = cls
    return made


def compiled_class(base: type[Optimizer], settings: Settings) -> type[Optimizer]:
    """The compiled subclass of `base`; one class object for equal arguments."""
    plain: Any = base_of(base) if issubclass(base, Compiled) else base
    return _make(plain, settings)


def _reduce_class(cls: Any) -> tuple[Any, ...] | str:
    if "_collage_base" not in cls.__dict__:
        return str(cls.__qualname__)  # a user's subclass of a compiled class: found by its name, as classes are
    return compiled_class, (base_of(cls), settings_of(cls))


copyreg.pickle(CompiledMeta, _reduce_class)


def become_compiled(optimizer: Optimizer, settings: Settings) -> None:
    """Turns an optimizer object into a compiled one, in place: hooks, schedulers and references to it stay valid."""
    # A scheduler wraps `step` in an attribute of the object, which would hide the compiled class's `step`.
    step = optimizer.__dict__.pop("step", None)
    if step is not None and not torch_privates.is_counted_by_scheduler(step):
        optimizer.step = step  # type: ignore[method-assign]  # put back where the user had put it
        raise TypeError(
            f"optimizer.step of this {type(optimizer).__name__} was replaced by hand, and compiling would drop the "
            "replacement; compile first, then replace it"
        )
    optimizer.__class__ = compiled_class(type(optimizer), settings)
    optimizer.defaults.update(settings.as_group())
    inner_optimizers.put_states(optimizer, States.of(optimizer.state))
    bypass.watch(optimizer)
    for group in optimizer.param_groups:
        for key, value in settings.as_group().items():
            group.setdefault(key, value)
    if step is not None:
        optimizer.step = _counted_by_scheduler(optimizer)  # type: ignore[method-assign]  # as the scheduler did


def change_settings(optimizer: Optimizer, settings: Settings) -> None:
    """New settings for a compiled optimizer: groups added later, and optimizers built from its class, get them too."""
    optimizer.__dict__.pop("_collage_defaults", None)
    optimizer.defaults.update(settings.as_group())
    if "_collage_base" in type(optimizer).__dict__:
        optimizer.__class__ = compiled_class(type(optimizer), settings)


def _counted_by_scheduler(optimizer: Optimizer) -> Any:
    """The bound `step` by which an LR scheduler that was attached before compiling notices steps."""
    weak = ref(optimizer)

    @wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        target = weak()
        assert target is not None
        torch_privates.count_step(target)
        return type(target).step(target, *args, **kwargs)

    torch_privates.mark_counted(step)
    return step
