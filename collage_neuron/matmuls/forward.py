"""`model.forward` of a model whose matmuls run in fp8: captures the model's own at its first call, and runs that.

The object stands in the model's `__dict__`, as accelerate and others put theirs. So the model keeps its class, modules
and the keys of its `state_dict`; copies and pickles of it are compiled too, and capture anew.

Python binds a method when it is looked up, but nothing in a `__dict__`: a shallow copy of the model has the object of
the original. A hook, which is told what module is called, gives the copy one of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock, local
from typing import Any

import torch

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedModel, warn_user
from collage_neuron.matmuls.capture import Backend
from collage_neuron.matmuls.requirements import check_target, spread_advice, spread_part

MANY = 8
"""The number of graphs of one model from which on it is warned of them."""
MOST = 64
"""The number of graphs that are kept; before another one all of them are dropped."""


# Threads take turns: torch.compile captures in one at a time, and what `_run` switches on and off is the process's.
_ONE_AT_A_TIME = RLock()


class Fp8Forward:
    """Stands in the place of `model.forward`.

    Args:
        model: the model.
        keep: names of modules or parameters whose matmuls stay as they are; None for the heads.
        rescale: the number of calls between two measurements.
    """

    def __init__(self, model: torch.nn.Module, keep: tuple[str, ...] | None, rescale: int) -> None:
        self.model = model
        self.keep = keep
        self.rescale = rescale
        self._begun = local()  # `forward` is that of the module whose hooks have run
        self._start()

    def _start(self) -> None:
        self.backend = Backend(self.model, self.keep, self.rescale)
        self._compiled: Callable[..., Any] | None = None
        self._met: torch_privates.Surroundings | None = None

    def of(self, model: torch.nn.Module) -> Fp8Forward:
        """The forward of a model that has this one in its `__dict__`: that of a shallow copy is made anew."""
        if model is self.model:
            return self
        mine = vars(model)["forward"] = Fp8Forward(model, self.keep, self.rescale)
        return mine

    @torch_privates.not_compiled
    def begin(self, model: torch.nn.Module) -> None:
        """Says what module is called: torch has looked up its forward before it runs hooks."""
        self._begun.forward = self.of(model)

    @property
    def __signature__(self) -> Any:
        """The signature of the model's own forward: trainers look there for the columns of a batch that it takes."""
        return inspect.signature(self._own)

    @property
    def __code__(self) -> Any:
        """The code of the model's own forward: torch.export names a program after it."""
        return self._own.__code__

    @property
    def _own(self) -> Any:
        return type(self.model).forward.__get__(self.model)

    @torch_privates.not_compiled  # a compiler around the model would run the model's own forward, without a word
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self._begun).pop("forward", self).run(args, kwargs)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Runs the model in fp8, or its own forward while torch makes a program of it, which has no such matmuls."""
        jit: Any = torch.jit
        if torch.compiler.is_exporting() or jit.is_tracing():
            return self._own(*args, **kwargs)
        if self._met is not None and self._met.changed(self.model):
            self._start()
        if self._compiled is None or torch_privates.is_managed_by_fsdp(self.model):
            self._check()
        before, captured = self.backend.calls, len(self.backend.graphs)  # torch.compile may be off, without a word
        results = self._run(args, kwargs)
        if self.backend.calls == before:
            raise UnsupportedModel(
                f"torch.compile did not run, so the matmuls of this {type(self.model).__name__} are not in fp8: it is "
                "switched off (TORCHDYNAMO_DISABLE, torch._dynamo.config.disable, torch.compiler.set_stance), or the "
                "model is called while operations are traced or counted (make_fx, FlopCounterMode); leave that, or "
                "compile without matmul='fp8'"
            )
        if len(self.backend.graphs) > captured:
            self._check()  # what changes a model makes torch.compile capture it anew
            self._met = torch_privates.Surroundings(self.model)
            self._warn()
        return results

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self._compiled is None:
            self._compiled = torch.compile(_apart(self._own), backend=self.backend, fullgraph=True, dynamic=False)
            self._met = torch_privates.Surroundings(self.model)
        with _ONE_AT_A_TIME, torch_privates.guarding(MOST), _without_fast_path():
            try:
                return self._compiled(*args, **kwargs)
            except torch_privates.compile_errors() as error:
                self._check()
                raise self._reason(error, args, kwargs) from error

    def _reason(self, error: BaseException, args: Any, kwargs: Any) -> Exception:
        """Our own error out of torch.compile's, or one that says what to do; raises that of the model's own forward."""
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, ValueError):
            return inner
        self._own(*args, **kwargs)
        return UnsupportedModel(
            f"the forward of this {type(self.model).__name__} cannot be captured as one graph, and matmul='fp8' infers "
            "its scales from that: torch's reason is below. Write the forward without what breaks the graph (values of "
            "tensors in conditions, .item(), printing), compile the part of the model that has none of it, or leave "
            f"matmul='fp8' out.\n{error}"
        )

    def _warn(self) -> None:
        """Says once that there are many graphs, and each time that they were dropped."""
        if len(self.backend.graphs) == MANY + 1:
            warn_user(
                f"matmul='fp8' has captured this {type(self.model).__name__} {MANY + 1} times, once for each shape of "
                "its inputs, mode, and set of frozen layers; each time takes seconds. Pad batches to a few shapes; if "
                "you do not change shapes, the forward depends on a number that changes with each call: make it a "
                "tensor"
            )
        if len(self.backend.graphs) >= MOST:  # another one would be an error of torch.compile's
            warn_user(f"matmul='fp8' drops {MOST} graphs, and captures shapes anew")
            self._start()

    def _check(self) -> None:
        """Checks what may have happened to the model since it was compiled, or since its last capture."""
        if spread := spread_part(self.model):
            raise UnsupportedModel(spread_advice(spread))
        for device in {p.device for p in self.model.parameters()}:
            check_target(device)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "keep": self.keep, "rescale": self.rescale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # of an object that has none of it yet


def begin_fp8_call(model: torch.nn.Module, args: object) -> None:
    """A hook before the forward, which is told what module is called."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, Fp8Forward):
        forward.begin(model)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """A context in which nn.TransformerEncoder and nn.MultiheadAttention run their layers in evaluation too."""
    # Without gradients they call one fused operation instead, in which there is no matmul to rewrite.
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    # torch.compile counts captures by code objects, and models of a class share theirs: this one is of its own.
    def apart(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    apart.__code__ = apart.__code__.replace()
    return apart
