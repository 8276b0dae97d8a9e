"""Private names of torch_xla, which is an extra: imported only where parameters are on an XLA device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def user_computation(name: str, tensors: Sequence[torch.Tensor], computation: Any) -> Sequence[torch.Tensor]:
    """One node of the lazy graph that runs an HLO module: torch_xla has no public way to enter one.

    Noticed by `tests/backends/test_reference_and_xla.py::test_results_have_the_shapes_of_the_words`.
    """
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    results: Sequence[torch.Tensor] = xlac._xla_user_computation(name, tensors, computation)
    return results


def xla_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of two matrices of any dtypes, in fp32: `torch.mm` has one dtype, and `_scaled_mm` runs on the CPU.

    Noticed by `tests/matmuls/test_xla.py::test_every_product_is_a_dot_of_8_bits`.
    """
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    product: torch.Tensor = xlac._xla_dot_general(a, b, (([1], [0]), ([], [])), None, torch.float32)
    return product


def xla_address(t: torch.Tensor) -> int:
    """The address of a tensor's values on torch_xla's CPU device; RuntimeError while they are not computed.

    The public `to_dlpack` ends the process in that case, and costs more.
    Noticed by `tests/backends/test_buffer_donation.py::test_memory_is_taken_back_where_nobody_else_refers_to_it`.
    """
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    address: int = xlac._unsafe_buffer_pointer(t)
    return address


def mark_sharding_like(t: torch.Tensor, p: torch.Tensor) -> None:
    """Shards `t` over devices as `p` is; `mark_sharding` asks for the mesh, which a parameter does not have at hand.

    Noticed by `tests/distributed/test_spmd.py::test_every_word_is_sharded_as_its_parameter_was`.
    """
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    if xlac._get_xla_sharding_type(p) is not None:
        xlac._xla_mark_sharding(t, xlac._get_xla_op_sharding(p))


def is_split_over_devices(p: torch.Tensor) -> bool:
    """Returns True for a tensor on an XLA device of which `mark_sharding` gave devices parts.

    Noticed by `tests/distributed/test_spmd.py::test_a_parameter_in_parts_is_not_seen_in_another_shape`.
    """
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    return xlac._get_xla_sharding_type(p) not in (None, 0)  # 0 is REPLICATED of `xla_sharding.ShardingType`


def is_of_xla_fsdp(p: torch.Tensor) -> bool:
    """Returns True for a parameter of XlaFullyShardedDataParallel.

    Noticed by `tests/conversion/test_wrapping.py::test_fsdp_of_torch_xla_is_rejected`.
    """
    return bool(getattr(p, "_is_sharded", False)) and hasattr(p, "_orig_size")


def groups_of_xla_zero(zero: Any) -> list[Any]:
    """The groups over which torch_xla's ZeroRedundancyOptimizer adds up the norm of gradients.

    The second is tensor parallelism's.
    Noticed by `tests/distributed/test_zero.py::test_a_nan_in_the_shard_of_one_rank_makes_all_skip`.
    """
    return [groups for groups in (zero.sharding_groups, zero._grad_norm_groups) if groups is not None]
