"""The generations as data, and how an emulated device answers what the documentation leaves open: a test chooses both.

Sources: the architecture guides of NeuronCore-v2, v3 and v4 (SBUF, PSUM); the tiling overview; `nki.jit` (names).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """The defaults are what the vendor's simulator is documented to do, or a refusal where nothing is documented."""

    ulps: int = 0
    """Approximated functions (sqrt, rsqrt, reciprocal, exp, ...) are off by up to so many fp32 ulps."""
    overflow: str = "refuse"
    """A finite fp32 beyond the format it is cast to: refuse, or infinity."""
    stochastic: bool = False
    """NEURON_RT_STOCHASTIC_ROUNDING_EN=1: casts from fp32 to bf16 round up with the probability of the distance."""
    drops_bias: tuple[str, ...] = ()
    """Functions of the Scalar Engine that do not add their bias: copy on trn1, by a public report (issue 1296 of
    aws-neuron-sdk), where all are documented to add it."""
    addressed: int = 1 << 32
    """Bytes of a tensor in HBM that a DMA reaches: offsets in bytes have 32 bits."""
    order: str = "forward"
    """How `tensor_reduce` adds, which is not documented: forward, backward, or pairs."""
    precise: bool = True
    """NKI_PRECISE_FP: False keeps low-precision on-chip tiles in fp32, which separates rounding from logic."""

    def __post_init__(self) -> None:
        if self.order not in ("forward", "backward", "pairs"):
            raise ValueError(f"order={self.order!r}: choose forward, backward or pairs")
        if self.overflow not in ("refuse", "infinity"):
            raise ValueError(f"overflow={self.overflow!r}: choose refuse or infinity")


PARTITIONS = 128
"""Partitions of SBUF and PSUM: the most that the first dimension of a tile may have."""

FREE = 1 << 16
"""Elements a partition that one instruction may touch."""

FREE_PSUM = 512
"""Elements a partition that a tile in PSUM may have: a bank of fp32."""


@dataclass(frozen=True)
class Target:
    """One generation of NeuronCore. Sizes are in bytes a partition."""

    name: str
    generation: int
    sbuf: int
    psum: int = 16 << 10
    cores: int = 2
    """The most physical cores in a logical one."""


TRN1 = Target("trn1", 2, 192 << 10, cores=1)
TRN2 = Target("trn2", 3, 224 << 10)
TRN3 = Target("trn3", 4, 256 << 10)

TARGETS = {
    "trn1": TRN1, "inf2": TRN1, "gen2": TRN1, "trn2": TRN2, "gen3": TRN2, "trn3": TRN3, "gen4": TRN3,
}  # fmt: skip


def target(name: str) -> Target:
    """The target of that name; ValueError for another."""
    if name not in TARGETS:
        raise ValueError(f"unknown target {name!r}; choose one of {', '.join(TARGETS)}")
    return TARGETS[name]
