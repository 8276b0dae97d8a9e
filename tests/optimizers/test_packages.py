"""Optimizers of published packages, as they are installed: which are near their own float64 runs.

Every optimizer of a package that can be made from a list of parameters is tried, with a matrix as its parameter. The
others are in tests/eager/test_packages.py.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from agreement import Agreement, compare, initial, stepped
from package_cases import COVERED, LAUNCHED, NOTES, STAGED
from sampling import part

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate

pytestmark = [
    pytest.mark.usefixtures("rejecting"),
    # torch_optimizer and pytorch_optimizer call deprecated overloads of add_ and addcmul_: their business.
    pytest.mark.filterwarnings("ignore:This overload of:UserWarning"),
    # pytorch_optimizer warns when it is imported without an optional dependency, and of options it ignores.
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_optimizer"),
    pytest.mark.filterwarnings("ignore::collage_neuron.SmallSteps"),  # some learning rates are too small for `plus`
]


def package(name: str) -> ModuleType:
    module: ModuleType = pytest.importorskip(name)
    return module


def make(cls: Any, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer with its own defaults, in training mode if it has modes."""
    required = {p.name for p in inspect.signature(cls).parameters.values() if p.default is p.empty}
    optimizer: torch.optim.Optimizer = cls(params, lr=1e-3) if "lr" in required else cls(params)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


@cache
def optimizers(name: str) -> dict[str, type[torch.optim.Optimizer]]:
    """The optimizers of a package that can be made from a list of parameters."""
    found = {}
    for attribute, cls in vars(package(name)).items():
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
            try:
                make(cls, [torch.nn.Parameter(torch.ones(8, 12))])
            except Exception:  # needs a model, an inner optimizer, groups of its own kind, another package
                continue
            found[attribute] = cls
    return found


def outcome(package_name: str, name: str, strategy: str, arithmetic: str) -> Agreement | str:
    """The agreement, or why it is not compiled."""
    cls = optimizers(package_name)[name]
    try:
        return compare(lambda params: make(cls, params), strategy, arithmetic, steps=6)
    except (UnsupportedUpdate, ValueError) as refusal:
        return str(refusal)


WITHOUT_FP64 = {"Adahessian", "AdaHessian", "SophiaH", "FAdam"}
"""They have no step in float64, or differentiate again."""


def tried(name: str) -> list[str]:
    """Every sixth one, whose updates share their operations with the others'."""
    return part([o for o in optimizers(name) if o not in WITHOUT_FP64], 6)


@pytest.mark.parametrize("name", COVERED)
def test_each_of_the_table_agrees(name: str) -> None:
    """In fp32 arithmetic with `plus`; `compare` has every element validated.

    None has more than three graphs in six steps: a fill value or a bound that changes is a number, not another graph.
    """
    outcomes = {o: outcome(name, o, "plus", "fp32") for o in tried(name)}
    found = {o: len(agreement.graphs) for o, agreement in outcomes.items() if isinstance(agreement, Agreement)}
    assert outcomes.keys() & COVERED[name].split() <= found.keys()
    assert found.keys() <= {*COVERED[name].split(), *LAUNCHED[name].split()}
    assert max(found.values(), default=0) <= 3


@pytest.mark.parametrize("name", COVERED)
def test_each_agrees_in_the_papers_arithmetic_too(name: str) -> None:
    """But those in stages: arithmetic="bf16" defines no sums."""
    outcomes = {o: outcome(name, o, "full", "bf16") for o in part(COVERED[name].split(), 16)}
    for found in outcomes.values():
        if isinstance(found, str):
            assert "which arithmetic='bf16' does not define" in found
    assert {o for o, found in outcomes.items() if isinstance(found, str)} == STAGED[name] & outcomes.keys()


@pytest.mark.parametrize("name", NOTES)
def test_what_is_rewritten_without_a_rank_is_refused_with_one(name: str) -> None:
    groups = [{"params": [torch.nn.Parameter(initial())], "rank": 2, "update_proj_gap": 1, "scale": 1.0,
               "projection_type": "std"}]  # fmt: skip
    with pytest.raises(UnsupportedUpdate, match=r"not elementwise: aten\._linalg_svd"):
        collage_neuron.compile(getattr(package("pytorch_optimizer"), name)(groups))


def test_schedule_free_goes_to_evaluation_and_back_as_in_float64() -> None:
    """`eval()` and `train()` move the parameter between steps, and in bf16 alone would round it each time."""
    cls = package("schedulefree").AdamWScheduleFree
    p, exact = torch.nn.Parameter(initial()), torch.nn.Parameter(initial().double())
    optimizer, reference = cls([p], lr=0.1), cls([exact], lr=0.1)
    for o in (optimizer, reference):
        o.train()
    optimizer = collage_neuron.compile(optimizer, strategy="full")
    for _ in range(4):
        for o in (optimizer, reference):
            stepped(o)
            o.eval()
        assert_within(p, optimizer, exact)
        for o in (optimizer, reference):
            o.train()
        assert_within(p, optimizer, exact)
    assert optimizer.param_groups[0]["train_mode"]
    before, bits = collage_neuron.exact_value(optimizer, p), p.detach().clone()
    optimizer.train()  # already is
    assert torch.equal(collage_neuron.exact_value(optimizer, p), before)
    assert torch.equal(p, bits)


def assert_within(p: torch.nn.Parameter, optimizer: torch.optim.Optimizer, exact: torch.Tensor) -> None:
    """Twenty stores of the parameter and of z as pairs; going to evaluation divides an error by 0.9."""
    value = collage_neuron.exact_value(optimizer, p).double()
    largest = max(1.0, float(exact.detach().abs().max()))
    assert (value - exact.detach()).abs().max() <= 2 * 20 * 2**-17 * largest / 0.9
    assert torch.equal(value.bfloat16(), p.detach())
