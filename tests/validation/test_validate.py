"""Translation validation finds what it is there for, by itself and before anything is written; else it is silent."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from as_written import all_bits, everything
from models import REPRESENTATIVE_MODES, step_with
from torch.optim import SGD, Adagrad, AdamW, Optimizer, Rprop
from wrong_rules import BUGS, RIGHT, Spelled, error_of

import collage_neuron
from collage_neuron import TranslationError
from collage_neuron.optimizer import compiled_step
from collage_neuron.optimizer.launches import launches_of
from collage_neuron.passes import pipeline
from collage_neuron.passes.backends.reference import Reference, ReferenceUpdate
from collage_neuron.passes.rewrite.arithmetic import times
from collage_neuron.passes.rewrite.rules import RULES, add_to
from collage_neuron.trace import replay_validation
from collage_neuron.validation import validate
from collage_neuron.validation.perturbed_replay import RUNS

pytestmark = pytest.mark.validated

aten = torch.ops.aten


def parameters(seed: int = 0, shapes: Sequence[tuple[int, ...]] = ((30, 20), (7,))) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape) * 0.1) for shape in shapes]


def give_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)


def train(optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        step_with(optimizer, torch.randn_like)


def snapshot(optimizer: Optimizer) -> Any:
    """All that a step may change, to the last bit."""
    own = {k: v for k, v in vars(optimizer).items() if k.startswith("lr_")}
    return everything(optimizer), all_bits([torch.get_rng_state(), own])


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "is_due", lambda steps: True)


# What it must find: wrong rules


@pytest.fixture
def fresh_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrites nothing from memory: neither here nor, afterwards, what was rewritten by wrong rules."""
    monkeypatch.setattr(pipeline, "_updates", {})


@pytest.mark.sampled(of=6)
@pytest.mark.parametrize("strategy", ["plus", "full", "fp32"])
@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_rule_is_found_and_nothing_is_written(
    bug: str, strategy: str, monkeypatch: pytest.MonkeyPatch, fresh_rules: None
) -> None:
    target, wrong, make = BUGS[bug]
    monkeypatch.setitem(RULES, target, wrong)
    optimizer = collage_neuron.compile(make(parameters()), strategy=strategy)
    give_gradients(optimizer)
    for _ in range(4):  # a rule may matter from a later step on; each of these steps is due, or has a new update
        before = snapshot(optimizer)
        found = error_of(optimizer)
        if found:
            break
        give_gradients(optimizer)
    assert "param_groups[0]['params'][" in found
    assert snapshot(optimizer) == before


def test_an_overflow_that_torch_does_not_have_is_found(monkeypatch: pytest.MonkeyPatch, fresh_rules: None) -> None:
    """Squares before they are scaled leave fp32's range at 1.8e19; one gradient in a thousand is that large."""

    def squares_first(a: Any, x: Any, y: Any, z: Any, value: Any = 1) -> Any:
        return add_to(a, x, times(a, a.read(y) * a.read(z), value))

    monkeypatch.setitem(RULES, aten.addcmul.default, squares_first)
    optimizer = collage_neuron.compile(AdamW(parameters()))
    give_gradients(optimizer)
    for p in optimizer.param_groups[0]["params"]:
        p.grad[..., 5] = 2e19
    with pytest.raises(TranslationError, match=r"\[\d.*\] becomes .*, and .* by step\(\) in fp32"):
        optimizer.step()


# What it must find: backends


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, list[torch.Tensor]], list[torch.Tensor]]) -> None:
    """The reference backend changes what it writes."""

    class Wrong(ReferenceUpdate):
        def __init__(self, update: Any) -> None:
            super().__init__(update)
            self._update = update

        def __call__(self, components: Any, scalars: Any, values: Any = None) -> Any:
            return change(self._update, list(super().__call__(components, scalars, values)))

    monkeypatch.setattr(Reference, "lowered", lambda self, update: Wrong(update))


def exchanged(first: str, second: str) -> Callable[[Any, list[torch.Tensor]], list[torch.Tensor]]:
    def change(update: Any, results: list[torch.Tensor]) -> list[torch.Tensor]:
        i, j = update.outputs.index(first), update.outputs.index(second)
        results[i], results[j] = results[j], results[i]
        return results

    return change


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("param_lo", "exp_avg_sq_lo"), "param"),
        (("param", "param_lo"), "param"),  # a low word counts for half an ulp at most, so that the sum differs too
        (("exp_avg_sq", "exp_avg_sq_lo"), "the first word of exp_avg_sq"),
    ],
)
def test_words_that_a_backend_exchanges_are_found(
    words: tuple[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, exchanged(*words))
    optimizer = collage_neuron.compile(AdamW(parameters()), strategy="plus", backend="reference")
    give_gradients(optimizer)
    with pytest.raises(TranslationError, match=message):
        optimizer.step()


class OffByAnUlp(ReferenceUpdate):
    """Every product is an ulp of bf16 too large."""

    def __init__(self, update: Any) -> None:
        graph = copy.deepcopy(update.graph)
        for node in graph.graph.nodes:
            if node.target is operator.mul:
                node.target = too_large
        graph.recompile()
        super().__init__(update.with_body(graph.graph))


def too_large(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y * (1 + 2.0**-7)


@pytest.mark.parametrize("strategy", ["plus", "full", "fp32", "fp32_states"])
def test_a_backend_whose_multiply_is_off_by_an_ulp_of_bf16_is_found(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reference, "lowered", lambda self, update: OffByAnUlp(update))
    optimizer = collage_neuron.compile(AdamW(parameters()), strategy=strategy, backend="reference")
    give_gradients(optimizer)
    with pytest.raises(TranslationError):
        optimizer.step()


# What it must find: an update that is new


def test_another_update_is_validated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 3 is not due, but its update is new: `where` turned round in it alone is found."""

    def update(state: Any, p: Any, g: Any) -> None:
        state["t"] = state.get("t", 0) + 1
        p.add_(torch.where(g > 0, g, 0.5 * g) if state["t"] == 3 else g, alpha=-0.1)

    optimizer = collage_neuron.compile(Spelled(parameters(), update))
    train(optimizer, 2)
    monkeypatch.setattr(pipeline, "_updates", {})
    monkeypatch.setitem(RULES, aten.where.self, lambda a, mask, x, y: RIGHT[aten.where.self](a, mask, y, x))
    with pytest.raises(TranslationError, match="step 3 "):
        train(optimizer, 1)


# What it must not do

TORCH: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, weight_decay=0.1),
    "amsgrad": lambda p: AdamW(p, amsgrad=True, maximize=True),
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": lambda p: Adagrad(p, initial_accumulator_value=0.1),
    "Rprop": Rprop,
    "RAdam": torch.optim.RAdam,
}


@pytest.mark.sampled(of=12)
@pytest.mark.parametrize(("strategy", "arithmetic"), REPRESENTATIVE_MODES)
@pytest.mark.parametrize("name", TORCH)
def test_what_is_right_passes_at_every_step(name: str, strategy: str, arithmetic: str, every_step: None) -> None:
    first, second = parameters(0, ((30, 20), (), (0, 3))), parameters(100, ((5000,), (7,)))
    optimizer = TORCH[name]([{"params": first[:: 2 if name == "Rprop" else 1]}, {"params": second, "lr": 0.3}])
    collage_neuron.compile(optimizer, strategy=strategy, arithmetic=arithmetic)
    train(optimizer, 8)
    history = validate.history_of(optimizer)
    assert history.not_covered == 0
    assert history.compared > 0
    assert history.left_out == 0 or arithmetic == "bf16"


def test_fp32_parameters_and_gradients_of_all_sizes_pass(every_step: None) -> None:
    params = parameters(shapes=((400,), (400,)))
    optimizer = collage_neuron.compile(AdamW(params[:1]))
    with pytest.warns(UserWarning, match="float32 parameters"):
        optimizer.add_param_group({"params": params[1:]})
    for step in range(20):
        for p in params:
            g = torch.exp(torch.randn(400) * 8).to(p.dtype)
            g[step] = [torch.nan, torch.inf, -torch.inf, 0.0][step % 4]
            p.grad = g
        optimizer.step()


def orthogonal(s: dict[str, Any], p: torch.Tensor, g: torch.Tensor) -> None:
    """OrthoGrad's: of a gradient of one element nothing is left but rounding, which gets the size of the gradient."""
    rest = g.clone().sub_(p, alpha=(p * g).sum().div_((p * p).sum().add_(1e-30)))  # type: ignore[arg-type]
    s.setdefault("square", torch.zeros_like(p)).lerp_((rest * (g.norm() / rest.norm().add(1e-30))).square(), 0.1)
    p.sub_(g, alpha=0.1)


@pytest.mark.parametrize("strategy", ["fp32", "split433"])
def test_what_cancels_but_for_rounding_passes(strategy: str, every_step: None) -> None:
    optimizer = collage_neuron.compile(Spelled(parameters(shapes=((1,),) * 3), orthogonal), strategy=strategy)
    train(optimizer, 8)
    assert validate.history_of(optimizer).left_out


def test_steps_that_are_skipped_are_validated_as_such(every_step: None, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = collage_neuron.compile(AdamW(parameters()), nonfinite="skip")
    train(optimizer, 2)
    give_gradients(optimizer)
    for p in optimizer.param_groups[0]["params"]:
        p.grad[..., 0] = torch.nan
    optimizer.step()
    assert collage_neuron.skipped_steps(optimizer) == 1
    monkeypatch.setattr(compiled_step, "launches_of", lambda optimizer, job, finite: launches_of(optimizer, job, None))
    with pytest.raises(TranslationError, match="in a step that is skipped"):
        optimizer.step()


def test_a_validated_run_is_the_same_run(every_step: None) -> None:
    found = []
    for validated in ("on", "off"):
        optimizer = collage_neuron.compile(AdamW(parameters()), strategy="stochastic", validate=validated)
        train(optimizer, 10)
        found.append(everything(optimizer)[:2])
    assert found[0] == found[1]


# How it is chosen, and when it runs


def test_copies_of_a_sample_whose_elements_are_alone_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    run = replay_validation.Part.run

    def counted(part: Any, values: Any) -> Any:
        ran.append(values["param"].numel())
        return run(part, values)

    monkeypatch.setattr(replay_validation.Part, "run", counted)
    p = torch.nn.Parameter(torch.ones(10, 20, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    collage_neuron.compile(torch.optim.AdamW([p]), verbose=False).step()
    assert ran == [200, RUNS * 200]


def test_off_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "validate_job", lambda *_: pytest.fail("ran"))
    train(collage_neuron.compile(AdamW(parameters()), validate="off"), 4)
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    train(collage_neuron.compile(AdamW(parameters())), 4)


def test_another_word_is_rejected() -> None:
    with pytest.raises(ValueError, match="unknown validate 'maybe'; choose on or off"):
        collage_neuron.compile(AdamW(parameters()), validate="maybe")


def test_an_older_checkpoint_has_no_such_setting_and_loads() -> None:
    optimizer = collage_neuron.compile(AdamW(parameters()))
    train(optimizer, 3)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["collage_validate"]
    other = collage_neuron.compile(AdamW(parameters()), validate="off")
    other.load_state_dict(saved)
    assert other.param_groups[0]["collage_validate"] == "off"
    for p, q in zip(other.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
        assert torch.equal(other.state[p]["exp_avg_sq"], optimizer.state[q]["exp_avg_sq"])


def test_a_copy_knows_what_was_validated() -> None:
    optimizer = collage_neuron.compile(AdamW(parameters()))
    train(optimizer, 3)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert validate.history_of(other).steps == 3


def test_numbers_of_another_dtype_are_recorded_by_themselves(every_step: None) -> None:
    """torch loads the 0-d `mu_product` of a bf16 parameter in bf16, and multiplies it in bf16: ours is fp32 again."""
    params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((3,), (2, 3))]
    optimizer = torch.optim.NAdam(params)
    train(optimizer, 2)
    optimizer.state[params[1]]["mu_product"] = optimizer.state[params[0]]["mu_product"].bfloat16()
    optimizer.state[params[0]]["mu_product"] = optimizer.state[params[1]]["mu_product"].float()
    collage_neuron.compile(optimizer)
    train(optimizer, 2)
    assert optimizer.state[params[1]]["mu_product"].dtype == torch.float32


def test_rates_of_groups_may_be_numbers_of_numpy() -> None:
    """Whose comparison with a list is no truth value."""
    params = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    groups = [{"params": [p], "lr": np.float64(rate)} for p, rate in zip(params, (0.125, 0.25), strict=True)]
    optimizer = collage_neuron.compile(torch.optim.AdamW(groups), verbose=False)
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(4):
        optimizer.step()
    assert [float(p.detach().mean()) for p in params] == pytest.approx([0.5, 0.0], abs=0.02)
