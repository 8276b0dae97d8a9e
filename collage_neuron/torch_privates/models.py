"""Private names of torch.nn: hooks, buffers, norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

NORMS = torch.nn.modules.batchnorm._NormBase
"""The base of BatchNorm*, SyncBatchNorm and InstanceNorm*: those that take bf16 activations beside fp32 statistics.

Noticed by
`tests/conversion/test_buffers_running.py::test_a_norm_with_statistics_stays_fp32_as_a_whole_and_gives_what_it_gets`.
"""


def has_pre_hook(module: torch.nn.Module, hook: Any) -> bool:
    """Returns True if `hook` is registered: a module that is compiled twice gets it once.

    Noticed by
    `tests/conversion/test_buffers_running.py::test_what_stays_fp32_stays_so_when_the_optimizer_is_compiled_again`.
    """
    return hook in module._forward_pre_hooks.values()


def has_load_hook(module: torch.nn.Module, hook: Any) -> bool:
    """The same for hooks before `load_state_dict`, which torch wraps.

    Noticed by `tests/conversion/test_loaded_weights.py::test_the_warning_comes_through_wrappers_once`.
    """
    found: Any = module._load_state_dict_pre_hooks.values()
    return any(wrapped.hook is hook for wrapped in found)


def drop_load_hook(module: torch.nn.Module, hook: Any) -> None:
    """Takes such a hook away; torch does so only for who has the handle, and a copied or pickled model has none.

    Noticed by `tests/conversion/test_loaded_weights.py::test_only_the_part_that_the_optimizer_trains_is_watched`.
    """
    found: Any = module._load_state_dict_pre_hooks
    for key in [key for key, wrapped in found.items() if wrapped.hook is hook]:
        del found[key]


def each_tensor(change: Callable[[torch.Tensor], torch.Tensor], nest: Any) -> Any:
    """`nest` with its tensors changed: in tuples, lists, dictionaries, and outputs that a library has registered.

    Noticed by `tests/conversion/test_keep_fp32.py::test_inside_of_a_module_that_stays_everything_is_fp32`.
    """
    return tree_map(lambda t: change(t) if isinstance(t, torch.Tensor) else t, nest)
