"""Rejects parameters that share memory with other tensors, since an fp32 parameter gets new memory as it becomes bf16.

Other tensors over the old memory (a flat buffer, a second parameter) would then show weights that are not trained. One
case cannot be detected: another tensor over exactly the memory of one parameter (`p.data`, held by somebody).

Later, each step looks whether what it may write has come to lie in the memory of something else (`check_apart`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain, combinations
from typing import TYPE_CHECKING, NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.passes.backends.native.memory import each_lies_alone
from collage_neuron.states.live_objects import objects_of
from collage_neuron.states.sharding import ORDINARY, is_sharded, locals_of

if TYPE_CHECKING:
    from collage_neuron.states.step_inventory import Seen

RECORDED, PRESENTED = "apart for recorded steps", "apart for all others"
"""Kinds of steps, and tables of a structure: what they have found about memory, by which parameters have gradients."""


class Window(NamedTuple):
    """The range of a storage that a tensor covers, in bytes."""

    storage: int
    start: int
    end: int

    def meets(self, other: Window) -> bool:
        """Returns True if the two ranges overlap."""
        return self.storage == other.storage and self.start < other.end and other.start < self.end


def share_elements(p: torch.Tensor, q: torch.Tensor) -> bool:
    """Returns True if two tensors whose windows meet have bytes in common: they may interleave (`x[:, ::2]`).

    It marks the bytes of one in a mask that is as long as the storage, and looks there for those of the other.
    """
    if p.is_contiguous() and q.is_contiguous():
        return True
    mask = torch.zeros(p.untyped_storage().nbytes(), dtype=torch.bool, device="cpu")
    _bytes_in(mask, p).fill_(True)
    return bool(_bytes_in(mask, q).any())


def first_shared(
    tensors: Sequence[torch.Tensor], others: Iterable[torch.Tensor] = (), params: int = 0
) -> tuple[int, int] | None:
    """The numbers of two tensors that have bytes in common, one of them no `others`; None if there are none.

    On XLA two tensors of one storage have, but for parameters, which come first: where in it they lie is hidden.
    """
    by_storage: dict[int, list[tuple[Window, int, torch.Tensor]]] = defaultdict(list)
    for i, x in enumerate(chain(tensors, others)):
        if (window := _window(x) or _whole_on_xla(x)) is not None:
            by_storage[window.storage].append((window, i, x))
    for found in by_storage.values():
        found.sort(key=lambda each: each[0].start)
        for at, (window, i, x) in enumerate(found):
            for other, j, y in found[at + 1 :]:
                if not other.meets(window):  # nor does any of those that begin later
                    break
                first, second = min(i, j), max(i, j)
                is_shared = second >= params if x.device.type == "xla" else share_elements(x, y)
                if first < len(tensors) and is_shared:
                    return first, second
    return None


class Apart(NamedTuple):
    """Where steps of one kind have found that nothing which they may write has the memory of something else."""

    places: tuple[list[int], list[int]]
    memories: frozenset[int]
    of_grads: set[int]
    """The addresses of gradients that were in other memories: what has one of these still is."""


Named = Iterable[tuple[str, torch.Tensor]]
"""Parameters, called `param`, and what is in their states, by its names there, or "" if it may be shared."""


def check_apart(seen: Seen | None, kind: str, written: Callable[[], Named], grads: Sequence[torch.Tensor]) -> None:
    """Raises ValueError if memory of what a step of this `kind` writes is also that of something else, as none may be.

    What was found holds as long as steps find the same tensors at the same addresses (`Seen.places`). Gradients, which
    are others in each step, may share memory with one another: those that are written lie in one buffer in the step
    too. On XLA, which tells no addresses, other data (`x.data = y`) is not noticed.
    """
    have = None if seen is None else seen.gradients()[0]
    known: Apart | None = None if seen is None else seen.structure.table(kind).get(have)
    places = ([], []) if seen is None else seen.places()
    if known is None or known.places != places:
        named = list(written())
        memories = memories_of([x for _, x in named])
        _raise_if(len(set(memories) - {0}) < len(memories) and names_of_shared(named))
        known = Apart(places, frozenset(memories) - {0}, set())
    if not known.of_grads.issuperset(addresses := [0] if seen is None else seen.addresses(grads)):
        if known.memories.isdisjoint(memories_of(grads)):
            if len(known.of_grads) > 16 * len(grads):  # most loops have two or three addresses for each
                known.of_grads.clear()
            known.of_grads.update(addresses)
            known.of_grads.discard(0)  # which is no address
        else:
            _raise_if(names_of_shared(written(), grads))
    if seen is not None:
        seen.structure.keep(seen.structure.table(kind), have, known)


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


def memories_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of the memories in which tensors lie; 0 for one that has none of its own."""
    try:
        if ORDINARY.issuperset(map(type, tensors)):
            return [*map(_number, map(torch.Tensor.untyped_storage, tensors))]
    except (RuntimeError, NotImplementedError):
        pass
    return [*map(memory_of, tensors)]


def memory_of(t: torch.Tensor) -> int:
    """A number of the memory in which `t` lies; 0 if it has none of its own."""
    t = torch_privates.part(t)
    if t.layout is not torch.strided or t.is_meta:
        return 0
    try:
        return _number(t.untyped_storage())
    except (RuntimeError, NotImplementedError):  # a wrapper, such as what torch_xla makes on the CPU
        return 0


def _whole_on_xla(x: torch.Tensor) -> Window | None:
    """For a tensor on XLA the whole of its storage: where in it the elements are is hidden."""
    is_there = x.device.type == "xla" and x.numel() and not is_sharded(x)
    return Window(_number(x.untyped_storage()), 0, 1) if is_there else None


def _number(storage: torch.UntypedStorage) -> int:
    # Two storages may have one memory (`torch.from_dlpack`); on XLA there are no addresses.
    address = storage.data_ptr() if storage.device.type == "cpu" else 0
    return address or torch_privates.storage_id(storage)


def _bytes_in(mask: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The part of a mask with an entry for each byte of a storage that `p` covers."""
    size = p.element_size()
    return mask.as_strided((*p.shape, size), (*(s * size for s in p.stride()), 1), p.storage_offset() * size)


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
    by_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
    for p, window in windows.items():
        by_storage[window.storage].append(p)
    for params in by_storage.values():
        for p, q in combinations(params, 2):
            both = {id(p), id(q)} <= set(map(id, owned))
            concerned = both or torch.float32 in (p.dtype, q.dtype)
            if concerned and windows[p].meets(windows[q]) and share_elements(p, q):
                raise _refusal(p, f"with another parameter, of shape {list(q.shape)}", "make them one parameter object")
    parts = [
        p
        for p in windows
        if p.dtype == torch.float32
        and (p.untyped_storage().nbytes() > p.nbytes or len(by_storage[windows[p].storage]) > 1)
    ]
    _check_seen_by_others({p: windows[p] for p in parts}, {windows[p].storage for p in parts})


def _window(p: torch.Tensor) -> Window | None:
    """The memory range of a tensor; None if it is empty, has no memory (XLA, meta), or is a shard, which FSDP2 pads."""
    if is_sharded(p) or p.device.type in ("xla", "meta") or p.layout is not torch.strided or p.numel() == 0:
        return None
    with suppress(RuntimeError, NotImplementedError):  # subclasses that wrap others
        span = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
        start = int(p.storage_offset()) * p.element_size()
        return Window(_number(p.untyped_storage()), start, start + int(span) * p.element_size())
    return None


def _check_seen_by_others(parts: dict[torch.Tensor, Window], storages: set[int]) -> None:
    """Raises for a range that a live tensor covers too, unless that is a view of the range or covers all of it."""
    living = objects_of((torch.Tensor, torch.nn.Parameter)) if parts else ()  # but those of subclasses
    for other in living:
        if (window := _window(other)) is None or window.storage not in storages:
            continue
        for p, own in parts.items():
            if other is p or own == window or not own.meets(window) or torch_privates.base_of(other) is p:
                continue
            if share_elements(p, other):
                raise _refusal(
                    p,
                    f"with a tensor of shape {list(other.shape)}, of which it is a view",
                    "give each parameter memory of its own (p.data = p.data.clone()) before you compile, or convert "
                    "the buffer to bfloat16 and make the parameters views of that",
                )


def _refusal(p: torch.Tensor, how: str, advice: str) -> ValueError:
    return ValueError(
        f"a {p.dtype} parameter of shape {list(p.shape)} shares its memory {how}; compiled, it would be trained apart "
        f"from it: {advice}"
    )
