"""What counts as code of Python and torch: everything of torch.optim, and nothing that hides code of others."""

import functools
import sys
import unittest.mock
from types import FunctionType
from typing import Any

import pytest
import torch

from collage_neuron.passes.capture.library_code import is_of_library

CLASSES = [x for x in vars(torch.optim).values() if isinstance(x, type) and issubclass(x, torch.optim.Optimizer)]


def others(*args: Any) -> None:
    """Code that is neither Python's nor torch's."""


class Other:
    def method(self) -> None:
        """Of an object that may hold anything."""


@pytest.mark.parametrize("cls", CLASSES)
def test_what_torch_has_in_its_modules_is_of_a_library(cls: Any) -> None:
    for base in cls.__mro__[:-1]:
        for names in (vars(base), vars(sys.modules[base.__module__])):
            assert [name for name, x in names.items() if not is_of_library(x)] == []


@pytest.mark.parametrize(
    "x",
    [
        others,
        torch.no_grad()(others),
        torch.no_grad()(functools.partial(others)),
        functools.partial(others),
        functools.lru_cache(others),
        functools.wraps(sys.modules["torch.optim.adam"].adam)(others),
        staticmethod(torch.no_grad()(others)),
        classmethod(torch.no_grad()(others)),
        property(others),
        unittest.mock.Mock(side_effect=others),
        Other,
        Other().method,
        Other(),
    ],
)
def test_code_of_others_is_not(x: Any) -> None:
    assert not is_of_library(x)


def test_a_function_that_refers_to_itself_ends() -> None:
    def counted(n: int) -> int:
        return counted(n - 1) if n else 0

    own = FunctionType(counted.__code__, {"__name__": "torch.optim"}, closure=counted.__closure__)
    assert not is_of_library(own)  # it calls `counted`
