"""What only the garbage collector knows: all live objects of some classes, among them the models of an optimizer.

Nobody else has a list of them, and no optimizer knows its model.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, compress
from typing import Any

import torch
from torch.optim import Optimizer


def objects_of(kinds: Collection[type]) -> list[Any]:
    """All live objects whose class is one of `kinds`, not a subclass of one.

    Of all other objects none may be held while another thread runs: Python reuses a tuple that is being filled, and
    raises SystemError, or worse, if somebody else refers to it. So there is one call of C, the last `list`, in which
    the objects are listed, looked at and let go, and no collection that could run code of others.
    """
    wanted = set(kinds)
    with _ONE, _listed_by_collector():
        steps = list(chain.from_iterable(_selected(wanted, generation) for generation in range(3)))
        objects = list(chain.from_iterable(steps))
    return [x for x in objects if type(x) in wanted]


def _selected(wanted: set[type], generation: int) -> Iterator[Iterator[Any]]:
    """The objects of a generation whose class is wanted; then nothing, twice.

    They are listed twice, one list after the other, of which only the second has the first: so each is beside its
    class. Both lists are read to their ends, for they have these iterators in them: neither would ever be let go.
    """
    objects, looked_at = _listed(generation), _listed(generation)
    yield compress(objects, map(wanted.__contains__, map(type, looked_at)))
    yield from (filter(().__contains__, rest) for rest in (objects, looked_at))


def _listed(generation: int) -> Iterator[Any]:
    """The objects of a generation, listed when the first is asked for."""
    return chain.from_iterable(map(gc.get_objects, (generation,)))


_ONE = threading.Lock()
"""Another thread that is here too would switch the collector on again."""


@contextmanager
def _listed_by_collector() -> Iterator[None]:
    """A context in which frozen objects are listed too, and nothing is collected."""
    frozen, enabled = gc.get_freeze_count() > 0, gc.isenabled()
    if frozen:
        gc.collect()
        gc.unfreeze()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        if frozen:
            gc.freeze()


def with_subclasses(cls: type) -> set[type]:
    """A class and all classes that inherit from it."""
    return {cls}.union(*map(with_subclasses, type.__subclasses__(cls)))


# --- models, and copies of these --------------------------------------------------------------------------------------


AVERAGES_EXACTLY = "_collage_averages_exactly"
"""An attribute of the class of modules whose copy of a model is no concern."""


def outermost(held: set[int]) -> list[torch.nn.Module]:
    """The living modules with a parameter among `held`, by identity, that are in no other module."""
    return _outermost(_modules(objects_of(with_subclasses(torch.nn.Module))), held)


def smallest(model: torch.nn.Module, held: set[int]) -> torch.nn.Module:
    """The innermost module with all the parameters among `held` that `model` has: others are not the optimizer's."""
    return list(_nested(model, held))[-1]


def copies_of_models(held: set[int]) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """The models that have parameters among `held`, each with another module of its class and shapes.

    The copy of an outer module stands for those in it. Copies that an optimizer trains are not among them.
    """
    living = objects_of(with_subclasses(torch.nn.Module) | with_subclasses(Optimizer))  # at once: it takes long
    modules, optimizers = _modules(living), [o for o in living if isinstance(o, Optimizer)]
    known = held | {id(p) for o in optimizers for group in groups_of(o) for p in group["params"]}
    known |= {id(p) for m in modules if hasattr(type(m), AVERAGES_EXACTLY) for p in m.parameters()}
    pairs = []
    for model in (m for outer in _outermost(modules, held) for m in _nested(outer, held)):
        alike = [m for m in modules if type(m) is type(model) and known.isdisjoint(map(id, m.parameters()))]
        for copy in (m for m in alike if _shapes(m) == _shapes(model)):
            pairs.append((model, copy))
            known.update(map(id, copy.parameters()))
    return pairs


def _modules(living: Iterable[object]) -> list[torch.nn.Module]:
    """All modules but those without `training`, which are being built or wrap another, and torch's scripted ones."""
    modules = [m for m in living if isinstance(m, torch.nn.Module) and not isinstance(m, torch.jit.ScriptModule)]
    return [m for m in modules if "training" in vars(m)]


def _outermost(living: list[torch.nn.Module], held: set[int]) -> list[torch.nn.Module]:
    inside = {id(child) for m in living for child in m.children()}
    return [m for m in living if id(m) not in inside and _params_of(m, held)]


def _nested(model: torch.nn.Module, held: set[int]) -> Iterator[torch.nn.Module]:
    """`model`, and inside of one another the modules that have all the parameters among `held` that it has."""
    yield model
    whole = _params_of(model, held)
    inner = next((child for child in model.children() if _params_of(child, held) == whole), None)
    if inner is not None:
        yield from _nested(inner, held)


def _params_of(model: torch.nn.Module, held: set[int]) -> set[int]:
    return held.intersection(map(id, model.parameters()))


def _shapes(model: torch.nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, p.shape) for name, p in model.named_parameters()]


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """The groups of an optimizer among all living ones: one may have none yet, or be the shell of a step or method."""
    # Groups of another type are those that a method runs with (`optimizer/exact_methods.py`).
    return [group for group in vars(optimizer).get("param_groups", ()) if type(group) is dict]
