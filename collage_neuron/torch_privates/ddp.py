"""How a DistributedDataParallel gets a new reducer: as its `__setstate__` makes one, and in no public way.

Noticed by `tests/conversion/test_wrapping.py::test_every_option_of_ddp_is_kept_when_it_is_set_up_anew`, and what
`ddp_problems` asks by the next one.
"""

from __future__ import annotations

from typing import Any

import torch

_DDP = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")


def has_step_in_backward(p: torch.Tensor) -> bool:
    """Returns True for a parameter that `_apply_optimizer_in_backward` steps: nothing else says so.

    Noticed by `tests/conversion/test_wrapping.py::test_a_ddp_that_cannot_be_set_up_anew_is_rejected_before_anything_changes`.
    """  # noqa: E501  # names of tests stay in one piece
    return hasattr(p, "_in_backward_optimizers")


def ddp_problems(ddp: Any) -> list[str]:
    """Why a DistributedDataParallel cannot be set up anew: more than its reducer depends on the dtype.

    Noticed by `tests/conversion/test_wrapping.py::test_a_ddp_that_cannot_be_set_up_anew_is_rejected_before_anything_changes`.
    """  # noqa: E501  # names of tests stay in one piece
    problems = {
        "mixed_precision": ddp.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(ddp._delay_all_reduce_params),
        "a reducer in Python (torch._dynamo.config.optimize_ddp)": ddp._use_python_reducer,
        "optimizers that step in backward": any(map(has_step_in_backward, ddp.parameters())),
        "a communication hook that has run": bool(ddp._comm_hooks) and ddp._lazy_init_ran,
        "a communication hook of torch's own": not ddp._comm_hooks and _has_hook(ddp),
        f"a reducer that torch {torch.__version__} makes in a new way": not all(hasattr(ddp, n) for n in _DDP),
    }
    return [problem for problem, there in problems.items() if there]


def _has_hook(ddp: Any) -> bool:
    return bool(ddp._get_ddp_logging_data().get("comm_hook"))


def set_up_anew(ddp: Any) -> None:
    """Gives a DistributedDataParallel a reducer for its parameters as they are now, as unpickling it does.

    Every process has to do so between the same two steps: the order of buckets is agreed on in the next ones.
    Noticed by `tests/conversion/test_wrapping.py::test_every_option_of_ddp_is_kept_when_it_is_set_up_anew`.
    """
    ddp._remove_autograd_hooks()  # of parameters that were bf16 before, and keep their nodes
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False  # the first backward learns the order of gradients
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    distributed: Any = torch.distributed
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        distributed._register_comm_hook(ddp.reducer, state, hook)
