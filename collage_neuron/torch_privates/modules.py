"""Private names of torch.nn and torch.compile: hooks, norms; what is captured, and what is raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map

NORMS = torch.nn.modules.batchnorm._NormBase
"""The base of BatchNorm*, SyncBatchNorm and InstanceNorm*: those that take bf16 activations beside fp32 statistics.
"""


def has_pre_hook(module: torch.nn.Module, hook: Any) -> bool:
    """Returns True if `hook` is registered: a module that is compiled twice gets it once."""
    return hook in module._forward_pre_hooks.values()


def has_load_hook(module: torch.nn.Module, hook: Any) -> bool:
    """The same for hooks before `load_state_dict`, which torch wraps."""
    hooks: Any = module._load_state_dict_pre_hooks.values()
    return any(wrapped.hook is hook for wrapped in hooks)


def drop_load_hook(module: torch.nn.Module, hook: Any) -> None:
    """Takes such a hook away; torch does so only for who has the handle, and a copied or pickled model has none."""
    hooks: Any = module._load_state_dict_pre_hooks
    for key in [key for key, wrapped in hooks.items() if wrapped.hook is hook]:
        del hooks[key]


@contextmanager
def holding(model: torch.nn.Module, values: Mapping[torch.Tensor, torch.nn.Parameter]) -> Iterator[None]:
    """A context in which the modules of a model hold other parameters in the place of their own."""
    own: list[tuple[Any, ...]] = [
        (m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items()
    ]
    there = [place for place in own if place[2] in values]
    try:
        for params, name, p in there:
            params[name] = values[p]
        yield
    finally:
        for params, name, p in there:
            params[name] = p


def each_tensor(change: Callable[[torch.Tensor], torch.Tensor], nest: Any) -> Any:
    """`nest` with its tensors changed: in tuples, lists, dictionaries, and outputs that a library has registered."""
    return tree_map(lambda t: change(t) if isinstance(t, torch.Tensor) else t, nest)


def not_compiled(function: Callable[..., Any]) -> Any:
    """Keeps a compiler around the training loop out of a function, as torch.optim does.

    `torch.compiler.disable` imports the compiler, seconds that `import collage_neuron` would take longer.
    """
    return _disable_dynamo(function)


def guarding(graphs: int) -> Any:
    """A context in which torch.compile looks at all of a model before it runs a captured graph again.

    And keeps so many graphs, where 8 are its default, before it gives up.

    To save time it takes for granted that hooks of modules stay as they are, and each parameter's dtype, shape and
    `requires_grad`, and which of them are tied: a layer that is thawed would never get a gradient.
    """
    return torch._dynamo.config.patch(
        skip_nnmodule_hook_guards=False,
        skip_tensor_guards_with_matching_dict_tags=False,
        skip_no_tensor_aliasing_guards_on_parameters=False,
        recompile_limit=graphs,
    )


def donate_nothing() -> None:
    """Keeps what the graph that is being compiled saves for its backward as it is, so that this may run again.

    Else torch lets a backward write there, and rejects `retain_graph=True` if the first backward did not ask for it. A
    setting of torch's would do it too, but that counts when a backward runs, also for the graphs of others.
    """
    metadata: Any = torch._guards.TracingContext.get().fw_metadata
    metadata.bw_donated_idxs = []


class Surroundings:
    """What torch.compile takes for granted of a model: its class, hooks of all modules, the forward of each class."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._kind = type(model)
        self._hooks = _global_hooks()
        self._forwards = {type(m): type(m).forward for m in model.modules()}

    def changed(self, model: torch.nn.Module) -> bool:
        """Returns True if something of it is not what it was."""
        forwards = any(c.forward is not f for c, f in self._forwards.items())
        return type(model) is not self._kind or _global_hooks() != self._hooks or forwards


def _global_hooks() -> list[tuple[Any, ...]]:
    m = torch.nn.modules.module
    kinds = m._global_forward_pre_hooks, m._global_forward_hooks, m._global_backward_pre_hooks, m._global_backward_hooks
    return [tuple(kind.items()) for kind in kinds]


def compile_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises of a function that it cannot capture, or for whose result our backend raised."""
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit
