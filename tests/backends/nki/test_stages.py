"""Updates in stages on kernels: norms and means of whole parameters, numbers on the device, states of one number.

Evidence level: stand-in. Where no quotient of elements is in an update, its bits are those of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from staged import Chained, Clipping, Decaying, Lamb, Lars, Novograd, StableAdamW
from torch import Tensor
from torch.nn import Parameter

import collage_neuron
from collage_neuron.optimizer.compiled import base_of
from collage_neuron.passes.backends.nki import legalize
from collage_neuron.passes.backends.nki.lower import lower_to_nki, reason_against
from collage_neuron.passes.ir.stage import NUMBERS
from collage_neuron.passes.ir.update import Update
from collage_neuron.runtime import plan
from collage_neuron.states.bookkeeping import bookkeeping

pytestmark = pytest.mark.usefixtures("rejecting", "short_search")

SHAPES = ((24, 40), (7,), (0, 3), (131, 3))


def compiled(make: Any, backend: str, strategy: Any = "full", **options: Any) -> tuple[Any, list[Parameter]]:
    """A parameter of each shape, without validation, which takes as long as the steps."""
    g = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=g)) for shape in SHAPES]
    settings = {"backend": backend, "verbose": False, "validate": "off", **options}
    return collage_neuron.compile(make(params), strategy=strategy, **settings), params


def run(
    optimizer: Any, params: list[Parameter], steps: int = 2, grad: Callable[[Tensor], Tensor] | None = None
) -> None:
    for number in range(steps):
        g = torch.Generator().manual_seed(number)
        for p in params:
            each = 0.1 * torch.randn(p.shape, generator=g)
            p.grad = (grad(each) if grad else each).to(p.dtype)
        optimizer.step()


def all_of(optimizer: Any, params: list[Parameter]) -> dict[str, Tensor]:
    """Parameters and states, by name."""
    states = {f"{k} {i}": v for i, p in enumerate(params) for k, v in optimizer.state[p].items()}
    return {f"param {i}": p.detach() for i, p in enumerate(params)} | {
        k: v for k, v in states.items() if isinstance(v, Tensor)
    }


def trained(
    make: Any, backend: str, strategy: Any = "full", grad: Callable[[Tensor], Tensor] | None = None, **options: Any
) -> dict[str, Tensor]:
    optimizer, params = compiled(make, backend, strategy, **options)
    run(optimizer, params, grad=grad)
    assert not bookkeeping(optimizer).twin
    return {name: x.clone() for name, x in all_of(optimizer, params).items()}


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(x.float().nan_to_num(7.0), wanted[k].float().nan_to_num(7.0)) for k, x in found.items()
    )


def close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return all(torch.allclose(x.float(), wanted[name].float(), rtol=2**-21, atol=2**-22) for name, x in found.items())


def test_the_bits_are_those_of_the_reference(dialect: str) -> None:
    """And the user's own step confirms them."""
    found = trained(Lars, "nki", validate="on")
    assert same(found, trained(Lars, "reference"))


WORDS = {"param": "bf16", "momentum_buffer": "i16q4"}


@pytest.mark.parametrize("dialect", ["nki"], indirect=True)
@pytest.mark.parametrize(("make", "strategy"), [(Lars, WORDS), (Decaying, "plus")])
def test_words_of_blocks_and_numbers_without_sums(make: Any, strategy: Any, dialect: str) -> None:
    assert same(trained(make, "nki", strategy), trained(make, "reference", strategy))


@pytest.mark.parametrize(
    ("make", "dialect"),
    [(Lamb, "nki"), (StableAdamW, "beta1"), (Novograd, "beta1"), (Chained, "nki"), (Clipping, "nki")],
    indirect=["dialect"],
)
def test_with_quotients_they_are_as_near(make: Any, dialect: str) -> None:
    """A kernel multiplies by a reciprocal, one rounding more; all else is the same, in fp32."""
    found, wanted = (trained(make, backend, "fp32") for backend in ("nki", "reference"))
    assert close(found, wanted)
    assert not close(found, trained(make, "reference", "fp32", grad=lambda g: g * (1 + 2**-6)))


def test_groups_that_step_alone(dialect: str) -> None:
    """Each group's parameters have numbers of their own, and a rate; one has no gradient."""
    found = []
    for backend in ("nki", "reference"):
        params = [Parameter(torch.full((5, n), 1.0 + n)) for n in (3, 4, 5)]
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]
        optimizer = collage_neuron.compile(Lars(groups), backend=backend, verbose=False, validate="off")
        for p in params[:2]:
            p.grad = torch.ones_like(p) * len(p)
        optimizer.step()
        found.append([p.detach() for p in params])
    assert all(map(torch.equal, *found))


def test_a_nan_stays_in_its_parameter_and_a_zero_norm_is_one(dialect: str) -> None:
    def grad(g: Tensor) -> Tensor:
        return torch.full_like(g, math.nan) if g.shape == (7,) else g * (g.numel() != 1)

    found, wanted = (trained(Lars, b, "fp32", grad=grad) for b in ("nki", "reference"))
    assert same(found, wanted)
    assert found["param 1"].isnan().all()
    assert not found["param 0"].isnan().any()


def test_a_skipped_step_changes_nothing(dialect: str) -> None:
    optimizer, params = compiled(Novograd, "nki", "fp32", nonfinite="skip")
    run(optimizer, params, 2)
    before = {name: x.clone() for name, x in all_of(optimizer, params).items()}
    run(optimizer, params, 1, lambda g: torch.full_like(g, math.inf))
    assert same(all_of(optimizer, params), before)
    run(optimizer, params, 1)
    assert not same(all_of(optimizer, params), before)


def test_it_is_measured_and_explained(dialect: str) -> None:
    records = []
    for backend in ("nki", "reference"):
        optimizer, params = compiled(Lars, backend)
        monitor = collage_neuron.monitor(optimizer, every=1)
        run(optimizer, params, 2)
        records.append(monitor.history[-1].total)
        monitor.close()
        text = collage_neuron.explain(optimizer, graphs=True)
        assert "stage 0, reduction: param, param_lo, grad" in text
    ours, theirs = records
    assert ours.pair.lost == theirs.pair.lost
    assert ours.pair.norm == pytest.approx(theirs.pair.norm, rel=2**-14)
    assert same(all_of(optimizer, params), trained(Lars, "nki"))


def update_of(make: Any) -> Update:
    """That of a matrix, in its second step, made for the reference."""
    p = Parameter(torch.ones(40, 40))
    optimizer = collage_neuron.compile(make([p]), strategy="plus", backend="reference", verbose=False)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    (job,) = plan.plan(base_of(type(optimizer)), optimizer, optimizer.param_groups[0], 0)
    return job.update


def test_what_has_no_instruction_is_known_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that such a step runs on copies, and no error comes when it has begun."""
    update = update_of(Lars)
    assert reason_against(update) is None
    monkeypatch.setattr(legalize, "BINARY", {})
    assert "for which no NKI instruction is known" in str(reason_against(update))


def test_the_kernels_of_lamb(golden: Callable[[str, str], None]) -> None:
    """The docstring of the reduction: tensors, arithmetic and costs."""
    parts = [part for part in update_of(Lamb).parts if part.stages[0].kind != NUMBERS]
    reduction, last = (lower_to_nki(part, "trn1", "nki") for part in parts)
    golden("nki_lamb_plus.txt", reduction.source.split('"""')[1])
    assert sum(reduction.cost.instructions.values()) <= 80
    assert last.finds
