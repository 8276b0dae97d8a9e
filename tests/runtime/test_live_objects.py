"""Objects that only the garbage collector knows are found, and no other thread notices that they were looked for."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from collage_neuron.states.live_objects import objects_of, with_subclasses


class Base:
    """A class whose objects are looked for."""


class Inner(Base):
    """A subclass."""


def test_objects_of_the_classes_that_were_named() -> None:
    one, two = Base(), Inner()
    assert {id(x) for x in objects_of([Base])} == {id(one)}
    assert {id(x) for x in objects_of(with_subclasses(Base))} == {id(one), id(two)}
    del two
    assert [id(x) for x in objects_of([Inner])] == []


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled: bool) -> None:
    before, one = gc.isenabled(), Base()
    (gc.enable if enabled else gc.disable)()
    try:
        assert objects_of([Base]) == [one]
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_frozen_objects_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Base()
    gc.freeze()
    assert objects_of([Base]) == []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)  # tests hide what they freeze (conftest.py)
    assert objects_of([Base]) == [one]
    monkeypatch.undo()
    assert objects_of([Base]) == []


def test_a_tuple_that_another_thread_is_filling_is_left_alone() -> None:
    """Python raises SystemError there if somebody else refers to it."""
    stop, failed = threading.Event(), list[BaseException]()

    def fill() -> None:
        try:
            while not stop.is_set():
                tuple(i for i in range(1000))
        except SystemError as error:
            failed.append(error)

    threads = [threading.Thread(target=fill) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        objects_of([Base])
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed


def test_nothing_is_held_afterwards() -> None:
    """Not even what a generator's caller is filling."""

    def numbers() -> Iterator[int]:
        yield 1
        objects_of([Base])
        yield 2

    assert tuple(numbers()) == (1, 2)
