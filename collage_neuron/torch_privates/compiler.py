"""Private names of torch.compile: what it captures, when it looks again, what it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo


def not_compiled(function: Callable[..., Any]) -> Any:
    """Keeps a compiler around the training loop out of a function, as torch.optim does.

    `torch.compiler.disable` imports the compiler, seconds that `import collage_neuron` would take longer.
    Noticed by `tests/repository/test_trainers.py::test_torch_compile_around_the_step_leaves_the_update_alone`.
    """
    return _disable_dynamo(function)


def guarding(graphs: int) -> Any:
    """A context in which torch.compile looks at all of a model before it runs a captured graph again.

    And keeps so many graphs, where 8 are its default, before it gives up.

    To save time it takes for granted that hooks of modules stay as they are, and each parameter's dtype, shape and
    `requires_grad`, and which of them are tied: a layer that is thawed would never get a gradient.
    Noticed by `tests/matmuls/test_surroundings.py::test_what_changes_about_a_model_is_noticed`.
    """
    return torch._dynamo.config.patch(
        skip_nnmodule_hook_guards=False,
        skip_tensor_guards_with_matching_dict_tags=False,
        skip_no_tensor_aliasing_guards_on_parameters=False,
        recompile_limit=graphs,
    )


class Surroundings:
    """What torch.compile takes for granted of a model: hooks of all modules, and the forward of each class.

    Noticed by `tests/matmuls/test_changes.py`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._hooks = _global_hooks()
        self._forwards = {type(m): type(m).forward for m in model.modules()}

    def changed(self) -> bool:
        """Returns True if something of it is not what it was."""
        return _global_hooks() != self._hooks or any(c.forward is not f for c, f in self._forwards.items())


def _global_hooks() -> list[tuple[Any, ...]]:
    m = torch.nn.modules.module
    kinds = m._global_forward_pre_hooks, m._global_forward_hooks, m._global_backward_pre_hooks, m._global_backward_hooks
    return [tuple(kind.items()) for kind in kinds]


def compile_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises of a function that it cannot capture, or for whose result our backend raised.

    Noticed by `tests/matmuls/test_surroundings.py::test_what_cannot_be_captured_is_rejected_with_the_reason`.
    """
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit
