"""Objects that only the garbage collector knows are found, and no other thread notices that they were looked for."""

from __future__ import annotations

import gc
import threading

import pytest

from collage_neuron.states.live_objects import objects_of


class Base:
    """A class whose objects are looked for."""


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
