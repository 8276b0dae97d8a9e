"""Rejects parameters that share memory with other tensors, since an fp32 parameter gets new memory as it becomes bf16.

Other tensors over the old memory (a flat buffer, a second parameter) would then show weights that are not trained. One
case cannot be detected: another tensor over exactly the memory of one parameter (`p.data`, held by somebody).

Later, each step looks whether what it may write has come to lie in the memory of something else (`check_apart`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from operator import itemgetter, le
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from collage_neuron import torch_privates
from collage_neuron.passes.backends.native.memory import each_lies_alone
from collage_neuron.states.live_objects import objects_of
from collage_neuron.states.sharding import ORDINARY, is_sharded, locals_of

if TYPE_CHECKING:
    from collage_neuron.states.step_inventory import Gradients, Seen

T = TypeVar("T")

RECORDED, PRESENTED = "apart for recorded steps", "apart for all others"
"""Kinds of steps, and tables of a structure: what they have found about memory, by which parameters have gradients."""


class Window(NamedTuple):
    """A range of memory: of addresses on the host, where two storages may overlap (NumPy), else of one storage."""

    storage: int
    """Its identity; 0 on the host."""
    start: int
    end: int

    def meets(self, other: Window) -> bool:
        """Returns True if the two ranges overlap."""
        return self.storage == other.storage and self.start < other.end and other.start < self.end


class Windows:
    """Ranges in order, of which each knows how far it and those before it reach."""

    def __init__(self, windows: Iterable[Window]) -> None:
        found = sorted(windows)
        self.starts = [(window.storage, window.start) for window in found]
        self.reach = [*accumulate(((window.storage, window.end) for window in found), max)]

    def are_apart(self) -> bool:
        """Returns True if no two overlap."""
        return all(map(le, self.reach, self.starts[1:]))

    def meet(self, other: Window) -> bool:
        """Returns True if one of them overlaps another one."""
        before = bisect_left(self.starts, (other.storage, other.end))
        return before > 0 and self.reach[before - 1] > (other.storage, other.start)


def _meeting(windows: Iterable[tuple[Window | None, T]]) -> Iterator[tuple[tuple[Window, T], tuple[Window, T]]]:
    """All pairs of what has ranges that overlap, with these."""
    found = sorted(((w, x) for w, x in windows if w is not None), key=itemgetter(0))
    for i, (window, x) in enumerate(found):
        for k in range(i + 1, len(found)):
            if not found[k][0].meets(window):  # nor does any of those that begin later
                break
            yield (window, x), found[k]


def share_elements(p: torch.Tensor, of_p: Window, q: torch.Tensor, of_q: Window) -> bool:
    """Returns True if two tensors whose windows meet have bytes in common: they may interleave (`x[:, ::2]`)."""
    return (p.is_contiguous() and q.is_contiguous()) or bool(_where_in(p, of_p.start, q, of_q.start).any())


def _where_in(p: torch.Tensor, at: int, q: torch.Tensor, q_at: int) -> torch.Tensor:
    """Where bytes of `q` are bytes of `p`, which begin at these addresses: looked up in a mask as long as both."""
    ends = (start + _span(x) * x.element_size() for start, x in ((at, p), (q_at, q)))
    mask, first = torch.zeros(max(ends) - min(at, q_at), dtype=torch.bool, device="cpu"), min(at, q_at)
    _bytes_in(mask, p, at - first).fill_(True)
    return _bytes_in(mask, q, q_at - first)


def first_shared(
    tensors: Sequence[torch.Tensor], others: Iterable[torch.Tensor] = (), params: int = 0
) -> tuple[int, int] | None:
    """The numbers of two tensors that have bytes in common, one of them no `others`; None if there are none."""
    return next(all_shared(tensors, others, params), None)


def all_shared(
    tensors: Sequence[torch.Tensor], others: Iterable[torch.Tensor] = (), params: int = 0
) -> Iterator[tuple[int, int]]:
    """The numbers of each two tensors that have bytes in common, one of them no `others`.

    On XLA tensors of one storage that are not views of one tensor have, but for parameters, which come first, that have
    room there: where they lie is hidden.
    """
    both = [*tensors, *others]
    places = _places(both)
    for (own, i), (other, j) in _meeting((window, i) for i, (window, _) in enumerate(places)):
        first, second = sorted((i, j))
        if first >= len(tensors):
            continue
        p, q = places[i][1], places[j][1]
        if p is None or q is None:
            is_shared = second >= params or both[i].nbytes + both[j].nbytes > both[i].untyped_storage().nbytes()
        else:
            is_shared = share_elements(p, own, q, other)
        if is_shared:
            yield first, second


def common_base(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The one tensor that each of these is, or is a view of; None if there is none that is known."""
    bases = [x if (base := torch_privates.base_of(x)) is None else base for x in tensors]
    return bases[0] if len({*map(id, bases)}) == 1 else None


def same_part(x: torch.Tensor, whole: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """The part of `other`, laid out as `whole`, that `x` is of `whole`; None if `x` has elements that this has not.

    On XLA it is found by the view that `x` is of `whole`.
    """
    if x.device.type == "xla":
        return torch_privates.same_view(x, whole, other)
    first = int(x.storage_offset() - whole.storage_offset())
    if other.stride() != whole.stride() or first < 0 or first + _span(x) > _span(whole):
        return None
    if _span(whole) > whole.numel() and not _where_in(whole, 0, x, first * x.element_size()).all():
        return None
    return other.as_strided(x.shape, x.stride(), other.storage_offset() + first)


def _places(tensors: Sequence[torch.Tensor]) -> list[tuple[Window | None, torch.Tensor | None]]:
    """The window of each, and a tensor with its strides; None if these are hidden."""
    on_xla: dict[int, list[torch.Tensor]] = {}
    for x in tensors:
        if x.device.type == "xla" and x.numel() and not is_sharded(x):
            on_xla.setdefault(memory_of(x), []).append(x)
    found = {id(x): _place_on_xla(x, base) for alike in on_xla.values() for base in [common_base(alike)] for x in alike}
    return [found.get(id(x)) or (_window(x), x) for x in tensors]


def _place_on_xla(x: torch.Tensor, base: torch.Tensor | None) -> tuple[Window, torch.Tensor | None]:
    storage, size = x.untyped_storage(), x.untyped_storage().nbytes()
    whole, made = _whole(storage)._replace(end=size), partial(torch.empty, dtype=x.dtype, device="meta")
    if base is None:
        seen = torch_privates.view_of_all(x, made(size // x.element_size()))
    else:
        seen = torch_privates.same_view(x, base, made(base.shape, dtype=base.dtype))
    if seen is None:
        return whole, None
    start, size = int(seen.storage_offset()), seen.element_size()
    return Window(whole.storage, start * size, (start + _span(seen)) * size), seen


class Places(NamedTuple):
    """What says that all lies where it lay."""

    ids: list[int]
    """Those of the tensors in states."""
    addresses: list[int]
    """Those of `Seen.lying`."""
    numbers: list[int] | None
    """0, 1, 2, ..., as torch asks for them; None if some do not lie on the host."""

    @classmethod
    def of(cls, seen: Seen) -> Places:
        """The places now."""
        lying = seen.lying()
        numbers = [*range(len(lying))] if all(t.is_cpu for t in lying) else None
        return cls(seen.ids, _storages_on_xla(lying), numbers)

    def are_those_of(self, seen: Seen) -> bool:
        """Returns True if all lies there now."""
        if self.ids != seen.ids:
            return False
        lying = seen.lying()
        if self.numbers is None:
            return _storages_on_xla(lying) == self.addresses
        return torch_privates.are_at(lying, self.addresses, self.numbers)


class Apart(NamedTuple):
    """Where steps of one kind have found that nothing which they may write has the memory of something else."""

    places: Places
    memories: Windows
    of_grads: set[int]
    """The addresses of gradients that were in other memories: what has one of these still is."""


Named = Iterable[tuple[str, torch.Tensor]]
"""Parameters, called `param`, and what is in their states, by its names there, or "" if it may be shared."""


def check_apart(seen: Seen | None, kind: str, written: Callable[[], Named], grads: Sequence[torch.Tensor]) -> None:
    """Raises ValueError if memory of what a step of this `kind` writes is also that of something else, as none may be.

    What was found holds as long as steps find the same tensors at the same addresses (`Places`). Gradients, which
    are others in each step, may share memory with one another: those that are written lie in one buffer in the step
    too. On XLA parameters may share a storage.
    """
    have = None if seen is None else seen.gradients()[0]
    known: Apart | None = None if seen is None else seen.structure.table(kind).get(have)
    if known is None or seen is None or not known.places.are_those_of(seen):
        named = list(written())
        memories = Windows(_memories([x for _, x in named]))
        _raise_if(not memories.are_apart() and names_of_shared(named))
        known = Apart(Places([], [], []) if seen is None else Places.of(seen), memories, set())
    if not known.of_grads.issuperset(addresses := [0] if seen is None else _addresses(seen, grads)):
        if not any(map(known.memories.meet, {*_memories(grads)})):
            if len(known.of_grads) > 16 * len(grads):  # most loops have two or three addresses for each
                known.of_grads.clear()
            known.of_grads.update(addresses)
            known.of_grads.discard(0)  # which is no address
        else:
            _raise_if(names_of_shared(written(), grads))
    if seen is not None:
        seen.structure.keep(seen.structure.table(kind), have, known)


def lies_apart(seen: Seen, kind: str, grads: Gradients) -> bool:
    """Returns True if a step of a `kind` has found what lies here apart from one another."""
    known = seen.structure.known.get(kind, {}).get(grads[0])
    if known is None or grads[1] is None or not known.places.are_those_of(seen):
        return False
    return bool(known.of_grads.issuperset(_addresses(seen, grads[1])))


def with_ours(seen: Seen) -> Seen:
    """What a step has found, where states have got tensors of ours: of memory that they had before, or of new one."""
    found, table = seen.with_others(), seen.structure.table(PRESENTED)
    for have, known in table.items():
        if known.places.ids == seen.ids:
            table[have] = known._replace(places=known.places._replace(ids=found.ids))
    return found


def _addresses(seen: Seen, grads: Sequence[torch.Tensor]) -> list[int]:
    """Where gradients begin in memory, or their parts; 0 where that is not known."""
    if (asked := seen.structure.once("addresses", lambda: _asking(seen.params))) is not None:
        with suppress(RuntimeError):  # sparse gradients
            return [*asked(locals_of(grads))]
    return [0] * len(grads)


def _asking(params: Iterable[torch.Tensor]) -> Callable[[Iterable[torch.Tensor]], Iterable[int]] | None:
    """What asks gradients of these for their addresses; None if some tell none."""
    if not all(map(tells, params)):
        return None
    return partial(map, torch.Tensor.data_ptr) if all(p.is_cpu for p in params) else _storages_on_xla


def _storages_on_xla(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The storages of tensors, as to ask for an address may end the process; where those on the host begin."""
    return [t.data_ptr() if t.is_cpu else torch_privates.storage_id(t.untyped_storage()) for t in tensors]


def tells(t: torch.Tensor) -> bool:
    """Returns True if `t` tells where it lies."""
    t = torch_privates.part(t)
    return t.device.type in ("cpu", "xla") and t.layout is torch.strided and not t.is_nested


def _raise_if(why: str | bool) -> None:
    if why:
        raise ValueError(
            f"{why} share memory: the step gives each values of its own, and torch would write to both; nothing was "
            "updated: clone() one of them"
        )


def names_of_shared(named: Named, grads: Sequence[torch.Tensor] = ()) -> str:
    """Two of these tensors that have bytes in common, in words; empty if there are none but two gradients."""
    both = sorted((each for each in named if each[0]), key=lambda each: each[0] != "param")
    params = sum(name == "param" for name, _ in both)
    found = first_shared(locals_of([x for _, x in both]), locals_of(grads), params)
    names = ["a parameter" if k == "param" else f"optimizer.state[p][{k!r}]" for k, _ in both]
    return " and ".join(names[i] if i < len(names) else "a gradient" for i in found) if found else ""


def memory_of(t: torch.Tensor) -> int:
    """A number of the memory in which `t` lies; 0 if it has none of its own."""
    memory = _memory_of(t)
    return 0 if memory is None else memory.start or memory.storage


def _memory_of(t: torch.Tensor) -> Window | None:
    """The memory in which `t` lies, whole; None if it has none of its own."""
    t = torch_privates.part(t)
    if t.layout is torch.strided and not t.is_meta:
        with suppress(RuntimeError, NotImplementedError):  # a wrapper, such as what torch_xla makes on the CPU
            return _whole(t.untyped_storage())
    return None


def _memories(tensors: Sequence[torch.Tensor]) -> list[Window]:
    with suppress(RuntimeError, NotImplementedError):
        if ORDINARY.issuperset(map(type, tensors)):
            return [*map(_whole, map(torch.Tensor.untyped_storage, tensors))]
    return [memory for memory in map(_memory_of, tensors) if memory is not None]


def _whole(storage: torch.UntypedStorage) -> Window:
    # Two storages may have one memory (`torch.from_dlpack`); on XLA there are no addresses.
    address = storage.data_ptr() if storage.device.type == "cpu" else 0
    return (
        Window(0, address, address + storage.nbytes()) if address else Window(torch_privates.storage_id(storage), 0, 1)
    )


def _span(x: torch.Tensor) -> int:
    """The elements from the first one to the last one, with those between that are not in `x`."""
    return 1 + sum(int((n - 1) * s) for n, s in zip(x.shape, x.stride(), strict=True))


def _bytes_in(mask: torch.Tensor, p: torch.Tensor, at: int) -> torch.Tensor:
    """The part of a mask, with an entry for each byte, that `p` covers, which begins `at` one of them."""
    size = p.element_size()
    return mask.as_strided((*p.shape, size), (*(s * size for s in p.stride()), 1), at)


def is_given_back(t: torch.Tensor) -> bool:
    """Returns True if the memory of `t` was given back, as FSDP1 does between steps: reading it ends the process."""
    t = torch_privates.part(t)
    if not t.is_cpu or not t.numel() or t.layout is not torch.strided:
        return False
    with suppress(RuntimeError, NotImplementedError):  # subclasses that wrap others
        return not t.untyped_storage().nbytes()
    return False


def overlaps_itself(p: torch.Tensor) -> bool:
    """Returns True if several elements of `p` may have the same memory, as after `expand`."""
    return p.numel() > 0 and not each_lies_alone(p)


def check_unshared(of_optimizer: Iterable[torch.Tensor], of_model: Iterable[torch.Tensor] = ()) -> None:
    """Raises ValueError for parameters that share memory with other tensors which would not see their updates."""
    owned = list(dict.fromkeys(of_optimizer))
    windows = {p: w for p in dict.fromkeys([*owned, *of_model]) if (w := _window(p)) is not None}
    for (of_p, p), (of_q, q) in _meeting((w, p) for p, w in windows.items()):
        both = {id(p), id(q)} <= set(map(id, owned))
        if (both or torch.float32 in (p.dtype, q.dtype)) and share_elements(p, of_p, q, of_q):
            raise _refusal(p, f"with another parameter, of shape {list(q.shape)}", "make them one parameter object")
    in_storages = Counter(map(memory_of, windows))
    # Memory that is not torch's own (NumPy, DLPack) may have other storages, and views that no tensor tells of.
    parts = [
        p
        for p in windows
        if (memory := p.untyped_storage()).nbytes() > p.nbytes
        or in_storages[memory_of(p)] > 1
        or not memory.resizable()
    ]
    _check_seen_by_others({p: windows[p] for p in parts if p.dtype == torch.float32})
    _check_on_xla(dict.fromkeys([*owned, *of_model]))


def _check_on_xla(params: Iterable[torch.Tensor]) -> None:
    """The same on XLA, as far as torch's notes of views, sizes and numbers of references tell."""
    found: dict[int, list[torch.Tensor]] = {}
    for p in params:
        if p.device.type == "xla" and not is_sharded(p):
            found.setdefault(memory_of(p), []).append(p)
    for memory, alike in found.items():
        size, sizes = alike[0].untyped_storage().nbytes(), [p.nbytes for p in alike]
        if memory and (sum(sizes) > size or first_shared(alike, params=len(alike)) is not None):
            raise _refusal(alike[0], "with another parameter, or with itself", "make them one parameter object")
        is_part = any(p.dtype == torch.float32 and p.nbytes < size for p in alike)
        if memory and is_part and torch_privates.holders(alike[0]) > len(alike):
            raise _refusal(alike[0], "with a tensor that something holds, of which it is a view", _OWN_MEMORY)


def _window(p: torch.Tensor) -> Window | None:
    """The memory range of a tensor; None if it is empty, has no memory (XLA, meta), or is a shard, which FSDP2 pads."""
    if is_sharded(p) or p.device.type in ("xla", "meta") or p.layout is not torch.strided or p.numel() == 0:
        return None
    with suppress(RuntimeError, NotImplementedError):  # subclasses that wrap others
        whole = _whole(p.untyped_storage())
        start = whole.start + int(p.storage_offset()) * p.element_size()
        return Window(whole.storage, start, start + _span(p) * p.element_size())
    return None


def _check_seen_by_others(parts: dict[torch.Tensor, Window]) -> None:
    """Raises for a range that a live tensor covers too, unless that is a view of the range or covers all of it."""
    living = objects_of((torch.Tensor, torch.nn.Parameter)) if parts else ()  # but those of subclasses
    all_parts = Windows(parts.values())
    for other in living:
        if (window := _window(other)) is None or not all_parts.meet(window):
            continue
        for p, own in parts.items():
            if other is p or own == window or not own.meets(window) or torch_privates.base_of(other) is p:
                continue
            if share_elements(p, own, other, window):
                raise _refusal(p, f"with a tensor of shape {list(other.shape)}, of which it is a view", _OWN_MEMORY)


_OWN_MEMORY = (
    "give each parameter memory of its own (p.data = p.data.clone()) before you compile, or convert the buffer to "
    "bfloat16 and make the parameters views of that"
)


def _refusal(p: torch.Tensor, how: str, advice: str) -> ValueError:
    return ValueError(
        f"a {p.dtype} parameter of shape {list(p.shape)} shares its memory {how}; compiled, it would be trained apart "
        f"from it: {advice}"
    )
