"""Private names of torch_xla, which is an extra: imported only where parameters are on an XLA device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def user_computation(name: str, tensors: Sequence[torch.Tensor], computation: Any) -> Sequence[torch.Tensor]:
    """One node of the lazy graph that runs an HLO module: torch_xla has no public way to enter one."""
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    results: Sequence[torch.Tensor] = xlac._xla_user_computation(name, tensors, computation)
    return results


def is_lazy(t: torch.Tensor) -> bool:
    """Returns True for a tensor on XLA that has no value yet: torch_xla says it in a text for debugging only."""
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    return "IR: None" not in xlac._get_xla_tensor_debug_info(t)


def may_run_on_xla() -> bool:
    """Returns False within `torch_xla.compile(..., full_graph=True)`, which raises where a program would run."""
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    return bool(xlac._get_allow_execution())


def xla_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of two matrices of any dtypes, in fp32: `torch.mm` has one dtype, and `_scaled_mm` runs on the CPU."""
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    product: torch.Tensor = xlac._xla_dot_general(a, b, (([1], [0]), ([], [])), None, torch.float32)
    return product


def mark_sharding_like(t: torch.Tensor, p: torch.Tensor) -> None:
    """Shards `t` over devices as `p` is; `mark_sharding` asks for the mesh, which a parameter does not have at hand."""
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    if xlac._get_xla_sharding_type(p) is not None:
        xlac._xla_mark_sharding(t, xlac._get_xla_op_sharding(p))


def is_split_over_devices(p: torch.Tensor) -> bool:
    """Returns True for a tensor on an XLA device of which `mark_sharding` gave devices parts."""
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    return xlac._get_xla_sharding_type(p) not in (None, 0)  # 0 is REPLICATED of `xla_sharding.ShardingType`


def is_of_xla_fsdp(p: torch.Tensor) -> bool:
    """Returns True for a parameter of XlaFullyShardedDataParallel."""
    return bool(getattr(p, "_is_sharded", False)) and hasattr(p, "_orig_size")


def groups_of_xla_zero(zero: Any) -> list[Any]:
    """The groups over which torch_xla's ZeroRedundancyOptimizer adds up the norm of gradients.

    The second is tensor parallelism's.
    """
    return [groups for groups in (zero.sharding_groups, zero._grad_norm_groups) if groups is not None]
