"""What each instruction may be given, as data, and the checks that read it.

Sources: the pages of `nki.isa` (engines, operand types, memories), SDK 2.26 and 2.32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nki_standin.device import FREE, Target
from nki_standin.errors import fail, require
from nki_standin.operators import Operator
from nki_standin.tensors import ON_CHIP, MemoryRegion, NkiTensor

ENGINES: dict[str, dict[str, int]] = {
    "tensor_tensor": {"vector": 2, "gpsimd": 2},
    "tensor_scalar": {"vector": 2, "gpsimd": 2},
    "scalar_tensor_tensor": {"vector": 2},
    "activation": {"scalar": 2},
    "reciprocal": {"vector": 2},
    "tensor_copy": {"vector": 2, "gpsimd": 2},
    "tensor_reduce": {"vector": 2},
    "memset": {"vector": 2, "gpsimd": 2},
    "tensor_copy_predicated": {"vector": 2},
    "rng": {"vector": 2, "gpsimd": 3},
    "set_rng_seed": {"vector": 2},
}
"""Instruction -> engine -> first NeuronCore generation. The first engine is taken where a kernel names none."""

START_OF = {64: (0,), 32: (0, 64), 0: (0, 32, 64, 96)}
"""More partitions than the key: the partitions an operand may start at."""


def check_engine(instruction: str, engine: str, target: Target) -> None:
    """The engine has the instruction on this target."""
    since = ENGINES[instruction].get(engine)
    require(since, f"{instruction} does not run on engine {engine}; it runs on {', '.join(ENGINES[instruction])}")
    require(
        target.generation >= (since or 0),
        f"{instruction} on engine {engine} needs NeuronCore-v{since}; {target.name} is v{target.generation}",
    )


def check_operator(op: Operator, instruction: str, engine: str, target: Target) -> None:
    """The engine has the operator on this target."""
    since = op.engines.get(engine)
    where = ", ".join(op.engines) or "none as an ALU operator, only in activation"
    require(since, f"{instruction}: {op} does not run on engine {engine}; engines that have it: {where}")
    require(
        target.generation >= (since or 0),
        f"{instruction}: {op} on engine {engine} needs NeuronCore-v{since}; {target.name} is v{target.generation}",
    )


def check_tile(t: object, what: str, where: Sequence[MemoryRegion] = ON_CHIP, dma: bool = False) -> None:
    """`t` is a tensor in one of `where` that one instruction of an engine, or a DMA, can address."""
    if not isinstance(t, NkiTensor):
        fail(f"{what} must be a tensor, got {t!r}")
    if t.buffer not in where:
        fail(f"{what} must be in {' or '.join(w.value for w in where)}, it is {t!r}")
    if dma or not t.on_chip:
        return
    partitions, free = t.elements
    require(free <= FREE, f"{what}: {free} elements a partition; an instruction takes up to {FREE}")
    starts = next(v for k, v in START_OF.items() if partitions > k)
    require(t.partition in starts, f"{what}: {partitions} partitions start at {t.partition}; allowed: {starts}")
    require(t.ndim <= 5, f"{what}: {t.ndim} dimensions; an access pattern has up to 5")
    require(max(t.strides[1:]) < 1 << 15, f"{what}: a stride of {max(t.strides[1:])} elements; the field has 15 bits")


def check_sizes(tiles: dict[str, NkiTensor]) -> None:
    """All have the same partitions and elements a partition: instructions do not broadcast."""
    sizes = {name: t.elements for name, t in tiles.items()}
    if len(set(sizes.values())) != 1:
        text = ", ".join(f"{name} {list(size)}" for name, size in sizes.items())
        fail(f"operands differ in [partitions, elements a partition]: {text}")


def check_overlap(dst: NkiTensor, src: NkiTensor, what: str) -> None:
    """An instruction may write what it reads only element for element."""
    places = [(t.offset, t.strides, t.shape, t.dtype.size) for t in (dst, src)]
    if dst.storage is not src.storage or places[0] == places[1]:
        return
    require(not np.may_share_memory(dst.raw, src.raw), f"dst overlaps {what} in part: the order of access is undefined")


def check_distinct(dst: NkiTensor) -> None:
    """No element is written twice by one instruction."""
    if any(s == 0 and n > 1 for s, n in zip(dst.strides, dst.shape, strict=True)):
        fail(f"dst {dst.get_pattern()} writes elements more than once")


def check_not_both_psum(a: NkiTensor, b: NkiTensor, text: str) -> None:
    """The two are not both in PSUM."""
    require(not (a.buffer is b.buffer is MemoryRegion.psum), f"{text} cannot both be in PSUM")


def check_gpsimd(tiles: Sequence[NkiTensor], instruction: str) -> None:
    """The GpSimd Engine has no access to PSUM."""
    in_psum = any(t.buffer is MemoryRegion.psum for t in tiles)
    require(not in_psum, f"{instruction}: the GpSimd Engine cannot access PSUM")
