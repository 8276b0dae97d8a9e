"""What a model and its device must be for fp8 matmuls: in one process, and on a chip that gains by them.

What neuronx-cc is documented to accept of fp8, the flag that it needs, and what each Trainium gains, from the
documentation of the Neuron SDK, not tried on a device:

* NCC_EVRF051: trn1 and trn2 reject operands in f8e4m3fn, unless a flag makes the compiler read them as f8e4m3; trn3
  takes them. NCC_EVRF052: generations after trn3 reject f8e4m3 itself. NCC_EVRF005: f8e4m3fnuz, f8e5m2fnuz and
  f8e4m3b11fnuz are rejected everywhere. f8e5m2 is accepted.
* The two types share every code up to 240, the largest number of f8e4m3. Beyond it f8e4m3 has infinity and NaN, so what
  is read in this way must be clamped to 240, as all our casts are: the flag changes no value of ours.
* NxD passes the flag inside `--internal-hlo2tensorizer-options`. A note of a user says that neuronx-cc 2.27 has dropped
  it; if the compiler still answers NCC_EVRF051, it does not know the flag.
* torch has a dot of two fp8 tensors on XLA alone (`passes/fp8_scaling/scaled_matmul.py`). On TorchNeuron's device the
  operands are rounded to fp8 and multiplied in fp32.
* Rates of dense matmuls per chip: trn1 190 TFLOPS in bf16 and in fp8, trn2 667 and 1299, trn3 671 and 2517 (the latter
  in MXFP8, whose scales are of 32 elements: other than ours).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache

import torch

from collage_neuron import torch_privates
from collage_neuron.errors import Fp32Products, UnsupportedModel, warn_user
from collage_neuron.passes.backends.nki.target import generation
from collage_neuron.passes.backends.torch_neuron import NAME
from collage_neuron.states.sharding import is_sharded

FLAG = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
OPTION = f"--internal-hlo2tensorizer-options='{FLAG}'"
"""What NEURON_CC_FLAGS must contain on a trn2."""


def check_target(device: torch.device, environ: Mapping[str, str] | None = None) -> None:
    """Checks that fp8 matmuls can run on a device, and are worth it; what is no Trainium passes.

    Warns once where the products of fp8 operands are computed in fp32.

    Raises:
        UnsupportedModel: the device is a trn1, or the compiler lacks the flag that it needs for the device.
    """
    target = generation(device)
    if target == "trn1":
        raise UnsupportedModel(
            "matmul='fp8' gains nothing on trn1: its matmuls have the same rate in fp8 and in bf16 (190 TFLOPS a "
            "chip), and it would round more; leave matmul out, or use a trn2"
        )
    flags = (os.environ if environ is None else environ).get("NEURON_CC_FLAGS", "")
    if target == "trn2" and FLAG not in flags:
        raise UnsupportedModel(
            f"neuronx-cc rejects f8e4m3fn, which XLA has for e4m3, on {target} (NCC_EVRF051); all values are clamped "
            f"to 240, up to which the codes are those of {target}'s own type, so add to NEURON_CC_FLAGS before the "
            f"process starts: {OPTION}"
        )
    if device.type == NAME:
        _tell(device)


@cache  # once for a device
def _tell(device: torch.device) -> None:
    warn_user(
        f"matmul='fp8' on {device}: operands are rounded to fp8, but torch has no dot of them there, so products are "
        "fp32's: this rounds more than without it, and is slower. Leave matmul out, but to find out what fp8 would do "
        "to the loss",
        Fp32Products,
    )


def spread_part(model: torch.nn.Module) -> str | None:
    """What of a model FSDP, tensor parallelism or torch_xla's FSDP holds, or None."""
    # First modules: while the forward runs, FSDP has whole parameters in them, which look like any other.
    for name, module in model.named_modules():
        if torch_privates.is_managed_by_fsdp(module):
            return f"FSDP holds {name or 'the model'}"
    for name, p in model.named_parameters():
        if is_sharded(p) or torch_privates.is_flattened(p) or torch_privates.is_of_xla_fsdp(p):
            return f"model parameter {name!r} is spread over processes"
    return None


def spread_advice(spread: str) -> str:
    """The sentence of an error."""
    return f"{spread}, and matmul='fp8' does not follow what gathers parameters yet: use DDP, or leave matmul='fp8' out"
