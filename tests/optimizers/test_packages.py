"""Optimizers of published packages, as they are installed: each is within its derived bound, or refused for a reason.

Every optimizer of a package that can be made from a list of parameters is put through the pass, with a matrix as its
parameter. Those refused must be the ones that tests/support/package_cases.py lists, for the reason it gives.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from agreement import Agreement, compare, gradients, initial
from package_cases import (
    CLOSURE,
    CONTAINER,
    COVERED,
    META,
    NO_PARAMETER,
    NOT_FLOATING,
    NOTES,
    NUMBER,
    ORDER,
    OTHER_SHAPE,
    READS,
    REFUSED,
    SECOND_BACKWARD,
    STAGED,
)

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

REASONS = {
    r"reads a tensor's value back into Python": READS,
    r"the update keeps tensors in optimizer\.state\[p\]": CONTAINER,
    r"without a closure, it raised (?:(?!A step should).)*closure": CLOSURE,
    r"uses optimizer\.state\['\w+'\], which belongs to no parameter": NO_PARAMETER,
    r"between instances of 'dict' and 'int'": NO_PARAMETER,
    r"the update keeps optimizer\.state\[p\]\['[\w:]+'\] in torch\.": NOT_FLOATING,
    r"does not require grad|does not have grad_fn": SECOND_BACKWARD,
    r"it raised (RuntimeError|NotImplementedError)": META,
    r"not elementwise: .* works, beside the parameter|a tensor that is neither|in another order": OTHER_SHAPE,
    r"another tensor of shape|, a tensor of shape": OTHER_SHAPE,
    r"takes the norm of order": ORDER,
    r"to a 0-d tensor, which counts as a number": NUMBER,
    r"not elementwise: (aten\.\w+)": "",
    r"(aten\.\w+)\.\w+ \(node \w+\), which has no rule": "",
    r"calls (aten\.\w+)\.\w+, which has no form": "",
    r"(steps another optimizer)": "",
}
"""What a message says, in short; without words of its own, the operation that it names."""

NOT_BOUNDED = {
    "AccSGD": "torch_optimizer",
    **dict.fromkeys(("Adai", "FAdam", "LARS"), "pytorch_optimizer"),
}
"""Optimizers of a package that no bound follows; they are compared below.

AccSGD copies the parameter by `copy.deepcopy`, LARS calls `torch._foreach_norm`, FAdam has no step in float64, and Adai
adds up over all parameters.
"""


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
            if NOT_BOUNDED.get(attribute) != name:
                found[attribute] = cls
    return found


@cache
def outcome(package_name: str, name: str, strategy: str, arithmetic: str) -> Agreement | str:
    """The agreement, or in short why it was refused."""
    cls = optimizers(package_name)[name]
    try:
        return compare(lambda params: make(cls, params), strategy, arithmetic, steps=6)
    except UnsupportedUpdate as refusal:
        return reason(str(refusal))


def reason(message: str) -> str:
    for pattern, short in REASONS.items():
        found = re.search(pattern, message)
        if found:
            return short or found[1]
    return message


@pytest.mark.parametrize("name", REFUSED)
def test_each_agrees_or_is_refused_for_the_reason_in_the_table(name: str) -> None:
    """In fp32 arithmetic with the default strategy; `compare` holds every element to its bound."""
    outcomes = {o: outcome(name, o, "plus", "fp32") for o in optimizers(name)}
    refused = {o: why for o, why in REFUSED[name].items() if NOT_BOUNDED.get(o) != name}
    assert {o: why for o, why in outcomes.items() if isinstance(why, str)} == refused
    bounded = {o for o in COVERED[name].split() if NOT_BOUNDED.get(o) != name}
    assert outcomes.keys() - REFUSED[name].keys() == bounded


@pytest.mark.parametrize("name", REFUSED)
def test_none_has_more_than_three_graphs(name: str) -> None:
    """In six steps: a fill value or a bound that changes with the step is a number, not another graph."""
    found = [outcome(name, o, "plus", "fp32") for o in optimizers(name) if o not in REFUSED[name]]
    assert all(isinstance(f, Agreement) and f.graphs <= 3 for f in found)


@pytest.mark.parametrize("name", REFUSED)
def test_each_agrees_in_the_papers_arithmetic_too(name: str) -> None:
    """But those in stages: arithmetic="bf16" defines no sums."""
    outcomes = {o: outcome(name, o, "full", "bf16") for o in optimizers(name) if o not in REFUSED[name]}
    for o, found in outcomes.items():
        if isinstance(found, str):
            assert "which arithmetic='bf16' does not define" in found
        assert isinstance(found, str) == (o in STAGED[name])


def run(optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Steps with the gradients of `agreement.gradients`, in the dtype of each parameter."""
    for gradient in gradients(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = gradient.to(p.dtype, copy=True)
        optimizer.step()


def test_a_state_that_is_a_deep_copy_of_the_parameter() -> None:
    cls = package("torch_optimizer").AccSGD
    p, exact = torch.nn.Parameter(initial()), torch.nn.Parameter(initial().double())
    optimizer = collage_neuron.compile(cls([p], lr=1e-3), strategy="full")
    run(optimizer)
    run(cls([exact], lr=1e-3))
    # Three steps; each stores pairs (2**-17), and adds and takes away a momentum of at most 2**4 times the parameter.
    error = (collage_neuron.exact_value(optimizer, p).double() - exact.detach()).abs().max()
    assert error <= 3 * 2**4 * 2**-17 * exact.detach().abs().max()


@pytest.mark.parametrize("name", ["FAdam", "LARS"])
def test_what_no_bound_follows_is_as_near_to_fp32_as_roundings_are(name: str) -> None:
    cls = package("pytorch_optimizer")
    p, exact = torch.nn.Parameter(initial()), torch.nn.Parameter(initial().float())
    optimizer, plain = (make(getattr(cls, name), [x]) for x in (p, exact))
    optimizer = collage_neuron.compile(optimizer, strategy="fp32")
    run(optimizer)
    run(plain)
    moved = (exact.detach() - initial().float()).abs()
    off = (collage_neuron.exact_value(optimizer, p) - exact.detach()).abs()
    assert (off <= 2**-18 * moved + 3 * 2**-24 * exact.detach().abs()).all()


def test_sums_over_all_parameters_are_not_sums_over_each() -> None:
    cls = package("pytorch_optimizer").Adai
    with pytest.raises(UnsupportedUpdate, match=r"not elementwise|with tensors of"):
        collage_neuron.compile(cls([torch.nn.Parameter(initial()) for _ in range(2)]))


@pytest.mark.parametrize("name", NOTES)
def test_what_is_rewritten_without_a_rank_is_refused_with_one(name: str) -> None:
    groups = [{"params": [torch.nn.Parameter(initial())], "rank": 2, "update_proj_gap": 1, "scale": 1.0,
               "projection_type": "std"}]  # fmt: skip
    with pytest.raises(UnsupportedUpdate, match=r"not elementwise: aten\._linalg_svd"):
        collage_neuron.compile(getattr(package("pytorch_optimizer"), name)(groups))


def test_a_list_with_an_entry_for_each_group_is_read_at_the_groups_place() -> None:
    """AdaBound keeps the initial learning rate of each group in a list beside its groups."""
    cls = package("torch_optimizer").AdaBound

    def made(dtype: torch.dtype) -> torch.optim.Optimizer:
        groups = [{"params": [torch.nn.Parameter(initial().to(dtype))], "lr": lr} for lr in (1e-3, 1e-1)]
        return cls(groups, final_lr=0.5, gamma=0.1)  # type: ignore[no-any-return]

    optimizer, exact = collage_neuron.compile(made(torch.bfloat16), strategy="full"), made(torch.float64)
    run(optimizer)
    run(exact)
    for group, group64 in zip(optimizer.param_groups, exact.param_groups, strict=True):
        value = collage_neuron.exact_value(optimizer, group["params"][0]).double()
        moved = (group64["params"][0].detach() - initial().double()).abs().max()
        # Three steps, of which each stores pairs of numbers below 4; the other group's rate would be 100 times off.
        assert (value - group64["params"][0].detach()).abs().max() <= 3 * 4 * 2**-17 < 0.1 * moved


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
            run(o, steps=3)
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
