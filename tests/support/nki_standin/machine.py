"""The machine a kernel runs on: a target, how it answers open questions, and what reading and writing tiles means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nki_standin.device import Device, Target
from nki_standin.dtypes import FLOAT32, Array, DType, dtype, narrow, widen
from nki_standin.errors import fail, require
from nki_standin.tensors import MemoryRegion, NkiTensor, allocate
from nki_standin.trace import Trace


class Machine:
    """A logical NeuronCore. `tensor` is the class that the dialect gives tensors.

    `trace` has what the last kernel did on the first of its physical cores, `traces` what it did on each.
    """

    def __init__(self, target: Target, device: Device, tensor: type[NkiTensor] = NkiTensor) -> None:
        self.target, self.device, self.tensor, self.trace = target, device, tensor, Trace()
        self.traces = [self.trace]
        self.cores, self.core = 1, 0
        """The physical cores that run a kernel, and the one whose program runs now."""
        self.generator: np.random.Generator | None = None
        """That of the vector engine, once it is seeded."""
        self.drawn: list[Array] = []
        """What the cores drew, one core after the other."""
        self._limits = {MemoryRegion.sbuf: target.sbuf, MemoryRegion.psum: target.psum}

    def allocate(self, shape: Sequence[int], of: object, buffer: MemoryRegion, name: str = "") -> NkiTensor:
        """A tensor whose elements are not written yet."""
        made = self.tensor(allocate(shape, dtype(of), buffer, name, self.device.precise, self._limits))
        made.storage.made_in = self.trace.nest.open[-1] if self.trace.nest.open else None
        return made

    def read_bits(self, t: NkiTensor, what: str) -> Array:
        """The stored elements of a tile, all of which must have been written."""
        if not t.written.all():
            fail(f"{what} is read before it was written: {t!r}")
        self._used(t, "read")
        return t.bits()

    def read(self, t: NkiTensor, what: str) -> Array:
        """The elements of a tile as fp32, [partitions, elements a partition]."""
        return widen(self.read_bits(t, what), t.dtype).reshape(t.elements)

    def write(self, dst: NkiTensor, x: Array) -> None:
        """fp32 numbers into a tile: the one rounding of an instruction."""
        x = np.ascontiguousarray(x, np.float32)
        wide = dst.dtype is dst.storage.dtype and dst.storage.data.dtype == FLOAT32.storage
        self.write_bits(dst, x if wide else narrow(x, dst.dtype, self.device))

    def write_bits(self, dst: NkiTensor, raw: Array) -> None:
        """Stored elements into a tile, as they are."""
        if not dst.storage.mutable:
            fail(f"{dst!r} is an input that is not mutable; annotate it nt.mutable_tensor")
        self._used(dst, "written")
        dst.bits()[...] = raw.reshape(dst.shape)
        dst.written[...] = True
        dst.storage.stored = True

    def _used(self, t: NkiTensor, how: str) -> None:
        """Notes which elements of a tensor in HBM a core reads or writes; fails if another core uses them.

        Cores run side by side: what one writes, another one must neither write nor read.
        """
        if self.cores == 1 or t.on_chip:
            return
        masks = t.storage.used
        mine = masks.setdefault((self.core, how), np.zeros_like(t.storage.written))
        t.over(mine)[...] = True
        for (core, before), mask in masks.items():
            if core != self.core and "written" in (how, before):
                both = t.over(mask).any()
                require(not both, f"core {self.core} would have {how} what core {core} has {before}, in {t!r}")

    def seed(self, t: NkiTensor, what: str) -> None:
        """Seeds the generator with the 32-bit value of a tile of one element."""
        require(t.shape == (1, 1) and t.dtype.size == 4, f"{what} must be a [1, 1] tile of 32 bits, got {t!r}")
        self.generator = np.random.default_rng(int(self.read_bits(t, what).view(np.uint32).item()))

    def draw(self, shape: Sequence[int]) -> Array:
        """32 random bits for each element: not those of a device, of whose generator no algorithm is documented."""
        require(self.generator is not None, "a random number before the generator is seeded: no run gives it again")
        assert self.generator is not None
        self.drawn.append(self.generator.integers(0, 1 << 32, tuple(shape), np.uint32))
        return self.drawn[-1]

    def vector(self, x: object, data: NkiTensor, what: str, types: Sequence[DType] = (FLOAT32,)) -> Array:
        """An operand that is broadcast along the free dimension: a number, or one fp32 element a partition."""
        if isinstance(x, NkiTensor):
            names = " or ".join(t.name for t in types)
            if not x.on_chip:
                fail(f"{what} must be in sbuf or psum, it is {x!r}")
            if x.dtype not in types:
                fail(f"{what} must be {names}, got {x!r}")
            if x.elements != (data.shape[0], 1):
                fail(f"{what} must have shape ({data.shape[0]}, 1), got {x!r}")
            return self.read(x, what)
        number = isinstance(x, (int, float, np.floating)) and not isinstance(x, bool)
        require(number, f"{what} must be a number or a tile of one element a partition, got {x!r}")
        return np.float32(x).reshape(1, 1)  # type: ignore[arg-type]
