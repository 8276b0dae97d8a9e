"""The generations as data: what NEURON_PLATFORM_TARGET_OVERRIDE may name, and what each has.

Sources: the architecture guides of NeuronCore-v2, v3 and v4 (SBUF, PSUM); the tiling overview; `nki.jit` (names).
"""

from __future__ import annotations

from dataclasses import dataclass

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
