"""Private names of FSDP, DTensor and ZeRO: parameters that are spread over processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

FSDP1 = "torch.distributed.fsdp._flat_param", "FlatParamHandle"
"""Module and class of what FSDP1 keeps of its flat parameters: no public list has them.

Noticed by `tests/conversion/test_wrapping.py::test_a_nan_in_one_process_makes_all_skip_and_count`.
"""


def is_flattened(p: torch.Tensor) -> bool:
    """Returns True for a parameter of FSDP1, with `use_orig_params` or without.

    Noticed by `tests/conversion/test_wrapping.py::test_fsdp1_of_fp32_parameters_is_rejected_in_every_form`.
    """
    return bool(getattr(p, "_fsdp_flattened", False))


def of_flat_parameter(handle: Any) -> set[torch.Tensor]:
    """A flat parameter of FSDP1 and the parameters that are views of it.

    Noticed by `tests/conversion/test_wrapping.py::test_a_nan_in_one_process_makes_all_skip_and_count`.
    """
    return {handle.flat_param, *(handle.flat_param._params or ())}


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Returns True for a module given to `fully_shard` (FSDP2), without an import of torch.distributed.

    Noticed by `tests/conversion/test_averaging.py::test_shards_and_replicas_end_with_the_average_of_one_process`.
    """
    return hasattr(module, "_get_fsdp_state")


def is_managed_by_fsdp(module: torch.nn.Module) -> bool:
    """Returns True for a module whose parameters FSDP1 or FSDP2 holds: both mark it for torch.compile.

    Noticed by `tests/matmuls/test_sharded.py::test_fsdp_is_rejected_before_compiling_and_after_it`.
    """
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def has_laid_out(module: torch.nn.Module) -> bool:
    """Returns True if FSDP2 has laid out its buffers: the first forward does, and sets `_is_root`.

    Noticed by `tests/distributed/test_sharding.py::test_a_model_that_fsdp_has_laid_out_in_fp32_is_refused_and_left_alone`.
    """  # noqa: E501  # names of tests stay in one piece
    state = getattr(module, "_get_fsdp_state", None)
    return state is not None and getattr(state(), "_is_root", None) is not None


def offset_of_shard(p: Any) -> Sequence[int]:
    """Where in a DTensor the part of this process begins, as torch.distributed.checkpoint asks.

    Noticed by `tests/distributed/test_sharding.py::test_given_the_same_gradients_the_update_has_the_same_bits`.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return offset


def part(t: Any) -> Any:
    """What is in a DTensor, or `t` itself; the newest `to_local()` makes a view of it.

    Noticed by `tests/distributed/test_traced.py::test_traced_shards_have_the_words_of_whole_parameters`.
    """
    is_plain = type(t) in (torch.Tensor, torch.nn.Parameter)  # most are: a tensor takes .5 us to say what it has not
    return t if is_plain or not hasattr(t, "to_local") else t._local_tensor


def sharded_like(part: torch.Tensor, t: Any) -> Any:
    """A DTensor that is sharded like the DTensor `t`, around a part of any dtype that may have no memory.

    `DTensor.from_local` calls an operation on the part.
    Noticed by `tests/distributed/test_traced.py::test_traced_shards_have_the_words_of_whole_parameters`.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = TensorMeta(t.shape, t.stride(), part.dtype)
    make: Any = DTensor
    return make(part, DTensorSpec(t.device_mesh, t.placements, tensor_meta=whole), requires_grad=False)


def device_of_zero(zero: Any) -> torch.device:
    """The device on which torch's ZeroRedundancyOptimizer talks to other processes.

    Noticed by `tests/conversion/test_wrapping.py::test_a_nan_in_one_process_makes_all_skip_and_count`.
    """
    device: torch.device = zero._default_device
    return device
