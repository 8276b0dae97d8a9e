"""What ran: one record an instruction, and what the memories held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from nki_standin.device import Target
from nki_standin.errors import fail, require, site
from nki_standin.loops import Nest
from nki_standin.tensors import HBM, MemoryRegion, NkiTensor, Storage


@dataclass(frozen=True)
class Record:
    """One executed instruction. `elements` (a partition) and what decides the speed of its engine are all it keeps."""

    instruction: str
    engine: str
    operators: tuple[str, ...]
    partitions: int
    elements: int
    dtypes: tuple[str, ...]
    """dst first, then the tiles that are read; operands that are broadcast are left out."""
    buffers: tuple[str, ...]
    contiguous: bool
    site: str
    hbm_read: int = 0
    hbm_written: int = 0
    """Bytes; only of a DMA."""
    traced: bool = True
    """Whether a compiler reads it: it is in the first iteration of each loop that is not unrolled."""


@dataclass
class Life:
    """A tile from its first to its last instruction, counted in records."""

    storage: Storage
    first: int
    last: int


@dataclass
class Trace:
    """The records of one run and the lives of its on-chip tiles."""

    records: list[Record] = field(default_factory=list)
    lives: dict[int, Life] = field(default_factory=dict)
    last: Sequence[NkiTensor] = ()
    """What the last instruction wrote and read."""
    nest: Nest = field(default_factory=Nest)

    def add(
        self,
        instruction: str,
        engine: str,
        operators: Iterable[str],
        tiles: Sequence[NkiTensor],
        vectors: Sequence[NkiTensor] = (),
    ) -> None:
        """Counts an instruction; `tiles` are dst and what is read element by element, `vectors` are broadcast."""
        now, self.last = len(self.records), tiles
        for t in (*tiles, *vectors):
            made = t.storage.made_in
            require(made is None or made in self.nest.open, f"{t!r} was made in the body of a loop that is over")
        for t in (*tiles, *vectors):
            if t.on_chip:
                self.lives.setdefault(id(t.storage), Life(t.storage, now, now)).last = now
        partitions, elements = tiles[0].elements
        moved = [t.size * t.dtype.size if engine == "dma" and t.buffer in HBM else 0 for t in tiles]
        self.records.append(
            Record(
                instruction,
                engine,
                tuple(operators),
                partitions,
                elements,
                tuple(t.dtype.name for t in tiles),
                tuple(t.buffer.value for t in tiles),
                all(t.is_contiguous() for t in tiles),
                site(),
                hbm_read=sum(moved[1:]),
                hbm_written=moved[0],
                traced=self.nest.traced,
            )
        )

    def redirect(self, dst: NkiTensor, tile: NkiTensor) -> bool:
        """The last instruction wrote `dst`, not the new `tile`; False if it did not make `tile`."""
        now, life = len(self.records) - 1, self.lives.get(id(tile.storage))
        if life is None or (life.first, life.last) != (now, now):
            return False
        del self.lives[id(tile.storage)]
        self.lives.setdefault(id(dst.storage), Life(dst.storage, now, now)).last = now
        self.records[now] = replace(self.records[now], buffers=(dst.buffer.value, *self.records[now].buffers[1:]))
        self.last = (dst, *self.last[1:])
        return True

    @property
    def traced(self) -> int:
        """Instructions that a compiler reads: loops count once, unless they are copies of their bodies."""
        return sum(r.traced for r in self.records)

    @property
    def hbm_read(self) -> int:
        """Bytes moved out of HBM."""
        return sum(r.hbm_read for r in self.records)

    @property
    def hbm_written(self) -> int:
        """Bytes moved into HBM."""
        return sum(r.hbm_written for r in self.records)

    def live_bytes(self, buffer: MemoryRegion = MemoryRegion.sbuf) -> int:
        """The most bytes a partition that were live at once, in the order of the program: no schedule needs less."""
        lives = [life for life in self.lives.values() if life.storage.buffer is buffer]
        events = sorted([(x.first, 0, x.storage.partition_bytes) for x in lives] + [
            (x.last + 1, -1, -x.storage.partition_bytes) for x in lives
        ])  # fmt: skip
        now = most = 0
        for _, _, change in events:
            now += change
            most = max(most, now)
        return most

    def rotating_bytes(self, in_flight: int, buffer: MemoryRegion = MemoryRegion.sbuf) -> int:
        """Bytes a partition if every allocation in the source has up to `in_flight` buffers of its own.

        This is what a loop needs whose iterations overlap (`in_flight=2`: one is loaded while one is computed).
        Allocations are told apart by their lines, from the kernel inwards, and their names.
        """
        places: dict[tuple[tuple[str, ...], str], list[int]] = {}
        for life in self.lives.values():
            if life.storage.buffer is buffer:
                place = places.setdefault((life.storage.sites, life.storage.name), [])
                place.append(life.storage.partition_bytes)
        return sum(sum(sorted(sizes)[-in_flight:]) for sizes in places.values())

    def check_capacity(self, target: Target) -> None:
        """Fails if more is live at once than the target's memories hold."""
        for buffer, most in ((MemoryRegion.sbuf, target.sbuf), (MemoryRegion.psum, target.psum)):
            live = self.live_bytes(buffer)
            if live > most:
                fail(f"{live} bytes a partition of {buffer.value} are live at once; {target.name} has {most}")
