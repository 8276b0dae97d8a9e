"""What every optimizer with states of other shapes than its parameters does: a number, rows, heads, or norms alone.

What each kind computes is tested in test_reductions.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from as_written import compiled, everything, parameters, run
from headed import Mini
from models import through_torch_save
from rowed import Came
from staged import Lamb, Novograd
from torch.nn import Parameter

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states.bookkeeping import bookkeeping

BACKENDS = ("reference", "native")
Shapes = Sequence[tuple[int, ...]]


class StepKind(NamedTuple):
    """An optimizer, and shapes of parameters with states of its kind."""

    make: Any
    shapes: Shapes

    def compiled(self, strategy: str = "full", **settings: Any) -> tuple[Any, list[Parameter]]:
        return compiled(self.make, strategy, self.shapes, verbose=False, **settings)


KINDS = {
    "number": StepKind(Novograd, ((24, 40), (16,), (1,), (0, 3))),
    "rows": StepKind(Came, ((40, 40), (3, 5, 37), (1, 48))),
    "heads": StepKind(Mini, ((6, 10), (2, 6, 10), (1, 40))),
    "norms": StepKind(Lamb, ((24, 40), (16,), (1,))),
}

pytestmark = [pytest.mark.usefixtures("rejecting"), pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)]


def words(optimizer: Any) -> Any:
    params, states, _ = everything(optimizer)
    return params, [dict(sorted(state.items())) for state in states]


@pytest.mark.parametrize("strategy", ["full", "plus", "bf16", "fp32", "split433"])
def test_checkpoints_copies_and_pickles_resume_bit_for_bit(kind: StepKind, strategy: str) -> None:
    optimizer, params = kind.compiled(strategy)
    run(optimizer, 2)
    saved, weights = through_torch_save([optimizer.state_dict(), [p.detach() for p in params]], weights_only=True)
    each = [optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for known in (True, False):
        other, others = kind.compiled(strategy)
        if not known:  # as an optimizer that was pickled before there were such states
            bookkeeping(other).small.clear()
        with torch.no_grad():
            for p, q in zip(weights, others, strict=True):
                q.copy_(p)
        other.load_state_dict(copy.deepcopy(saved))
        each.append(other)
    for one in each:
        run(one, 2, first=2)
    assert all(words(one) == words(optimizer) for one in each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_checkpoint_is_loaded_and_training_that_has_begun_compiled(kind: StepKind, dtype: torch.dtype) -> None:
    """In bf16 training its numbers are bf16: they are read as they are, and kept in fp32 from the next step on."""
    theirs = parameters(dtype, kind.shapes)
    plain = kind.make(theirs)
    run(plain, 3)
    loaded, params = kind.compiled("fp32")
    loaded.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for p, q in zip(params, theirs, strict=True):
            collage_neuron.set_exact_value(loaded, p, q.float())
    exact = [Parameter(p.detach().double()) for p in theirs]
    other = kind.make(exact)
    other.load_state_dict(copy.deepcopy(plain.state_dict()))
    run(loaded, 1, first=3)
    run(other, 1, first=3)
    begun = collage_neuron.compile(plain, strategy="fp32", verbose=False) if dtype == torch.bfloat16 else loaded
    if begun is not loaded:
        run(begun, 1, first=3)
    for one in (loaded, begun):
        assert not bookkeeping(one).as_written
        for p, q in zip(one.param_groups[0]["params"], exact, strict=True):
            for name in bookkeeping(one).small.intersection(one.state[p]):
                value, wanted = one.state[p][name], other.state[q][name]
                assert value.dtype == torch.float32
                assert torch.allclose(value.double(), wanted, rtol=2**-18, atol=0, equal_nan=True)
            found = collage_neuron.exact_value(one, p).double()
            assert torch.allclose(found, q, rtol=2**-18, atol=2**-22, equal_nan=True)


@pytest.mark.parametrize("special", [torch.inf, torch.nan])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skipped_step_changes_nothing(kind: StepKind, backend: str, special: float) -> None:
    optimizer, params = kind.compiled(backend=backend, nonfinite="skip")
    run(optimizer, 2)
    before = words(optimizer)
    for p in params:
        p.grad = torch.full_like(p, special)
    optimizer.step()
    assert words(optimizer) == before
    run(optimizer, 1)
    assert words(optimizer) != before


def test_groups_frozen_parameters_and_missing_gradients(kind: StepKind) -> None:
    """Within 2**-16 of the largest weight of a run in float64."""
    ours = [*parameters(torch.bfloat16, kind.shapes), Parameter(torch.ones(4, 8).bfloat16(), requires_grad=False)]
    exact = [p.detach().double().requires_grad_(p.requires_grad) for p in ours]
    optimizer, plain = (kind.make([{"params": ps[:2]}, {"params": ps[2:], "lr": 0.05}]) for ps in (ours, exact))
    optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
    for number in range(5):
        for i, (p, q) in enumerate(zip(ours, exact, strict=True)):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)).bfloat16()
            p.grad, q.grad = (g, g.double()) if p.requires_grad and (i + number) % 3 else (None, None)
        optimizer.step()
        plain.step()
    for p, q in zip(ours, exact, strict=True):
        far = (collage_neuron.exact_value(optimizer, p).double() - q).abs()
        assert (far <= 2**-16 * q.detach().abs().max()).all() if far.numel() else True


@pytest.mark.parametrize("mark", ["_fsdp_flattened", "tensor_model_parallel"])  # of FSDP1, and of Megatron
def test_a_part_of_a_parameter_is_not_taken_for_the_whole(kind: StepKind, mark: str) -> None:
    optimizer, params = kind.compiled()
    run(optimizer, 1)
    vars(params[0])[mark] = True
    with pytest.raises(UnsupportedUpdate, match="this process has a part only"):
        run(optimizer, 1)
