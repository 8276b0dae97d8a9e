"""Steps of torch's optimizers whose numbers are computed again without their code: the same bits, or not at all."""

import functools
import math
import sys
import unittest.mock
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import collage_neuron
from collage_neuron.errors import TranslationError, UnsupportedUpdate
from collage_neuron.trace import meta_copy as recording
from collage_neuron.trace import replayed_steps
from collage_neuron.trace.number_tape import Tape
from collage_neuron.trace.recorded_classes import played_again

FOLLOWED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AMSGrad": lambda params, lr: torch.optim.AdamW(params, lr, amsgrad=True, maximize=True),
    "SGD": torch.optim.SGD,
    "Nesterov": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda params, lr: torch.optim.RMSprop(params, lr, centered=True, momentum=0.9),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,  # takes another branch from step 6 on
    "Adamax": torch.optim.Adamax,
    "Adagrad": lambda params, lr: torch.optim.Adagrad(params, lr, lr_decay=0.01),
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "AdamW, tensors": lambda params, lr: torch.optim.AdamW(
        params, torch.tensor(lr), betas=(torch.tensor(0.9), torch.tensor(0.999))
    ),
    "SGD, tensor": lambda params, lr: torch.optim.SGD(params, torch.tensor(lr), momentum=0.9, weight_decay=0.1),
    "ASGD, tensor": lambda params, lr: torch.optim.ASGD(params, torch.tensor(lr, dtype=torch.float64)),
}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The parameters for which the optimizer's code was run."""
    found: list[Any] = []

    def record(*args: Any) -> Any:
        found.append(args[-1])
        return recording.record(*args)

    monkeypatch.setattr(replayed_steps, "record", record)
    return found


def _made(make: Any, groups: int = 1, **kwargs: Any) -> tuple[list[torch.nn.Parameter], Any]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(3, 4, generator=generator).bfloat16()) for _ in range(2 * groups)]
    parts = [{"params": params[2 * i : 2 * i + 2]} for i in range(groups)]
    with torch.no_grad():
        optimizer = collage_neuron.compile(make(parts, lr=1e-2), strategy="plus", backend="reference", **kwargs)
    for p in params:
        p.grad = torch.randn(3, 4, generator=generator).bfloat16()
    return params, optimizer


def _trained(make: Any) -> list[torch.Tensor]:
    params, optimizer = _made(make, groups=4)
    for step in range(12):
        for i, group in enumerate(optimizer.param_groups):
            rate = 1e-2 / (step + 1 + i)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        optimizer.step()
    return [t.clone() for p in params for t in (p.detach(), *optimizer.state[p].values())]


@pytest.mark.parametrize("strategy", ["fp32", "split433"])
def test_numbers_that_are_parameters_share_a_recording(strategy: str, recorded: list[Any]) -> None:
    """Their states are 0-d too; those that have a format are no counts."""
    params = [torch.nn.Parameter(torch.tensor(float(i))) for i in range(8)]
    optimizer = collage_neuron.compile(torch.optim.AdamW(params), strategy=strategy, verbose=False)
    for _ in range(6):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, i + 1.0)
        optimizer.step()
    assert len(recorded) < 2 * len(params)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOLLOWED)
def test_followed_steps_have_recorded_bits(name: str, recorded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    make = FOLLOWED[name]
    found = _trained(make)
    firsts = 2 * 4 if name in BEGIN_WITH_A_RATE else 2
    assert len(recorded) <= firsts + 2 + 4 + 3  # twice before it is followed, at powers of two, and branches
    monkeypatch.setattr(
        "collage_neuron.optimizer.compiled_step.replayed_steps.of_step", lambda *args: partial(recording.record, *args)
    )
    assert all(map(torch.equal, found, _trained(make)))


BEGIN_WITH_A_RATE = {"Rprop", "ASGD", "ASGD, tensor"}
"""A state of these begins with the learning rate: of a first step they share nothing."""


@pytest.mark.parametrize("name", sorted(FOLLOWED.keys() - BEGIN_WITH_A_RATE))
def test_groups_share_recordings_from_the_first_step(name: str, recorded: list[Any]) -> None:
    _, optimizer = _made(FOLLOWED[name], groups=9)
    assert len(recorded) <= 2
    recorded.clear()
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = group["lr"] * (i + 1)
    optimizer.step()
    assert len(recorded) <= 2


def _of_many(settings: list[dict[str, Any]]) -> list[torch.Tensor]:
    """What three steps of groups with these settings leave."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(2, 3, generator=generator).bfloat16()) for _ in settings]
    groups = [{"params": [p], **own} for p, own in zip(params, settings, strict=True)]
    optimizer = collage_neuron.compile(torch.optim.AdamW(groups), verbose=False)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(2, 3, generator=generator).bfloat16()
        optimizer.step()
    return [t.clone() for p in params for t in (p.detach(), *optimizer.state[p].values())]


def test_groups_of_all_settings_have_the_bits_of_recordings(
    recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[dict[str, Any]] = [
        {},
        {"maximize": True},
        {"amsgrad": True},
        {"collage_strategy": "plus"},
        {"collage_arithmetic": "bf16"},
    ]
    numbers: list[dict[str, Any]] = [
        {},
        {"lr": 0.1},
        {"betas": (0.8, 0.95)},
        {"eps": 1e-3},
        {"weight_decay": 0.0},
        {"weight_decay": 0.3},
    ]
    settings = [{**a, **b} for a in flags for b in numbers]
    found = _of_many(settings)
    assert len(recorded) < 4 * len(settings)
    for name in ("of_step", "before_step"):
        monkeypatch.setattr(replayed_steps, name, lambda *args: partial(recording.record, *args))
    assert all(map(torch.equal, found, _of_many(settings)))


def test_a_count_that_a_step_begins_is_begun_in_each() -> None:
    tape = Tape()
    rate, count = tape.give(2.0), torch.tensor(1.0)
    count *= 1  # nothing of the tape's
    place = tape.given(tape.apply(torch.Tensor.mul_, count, rate))
    for x in (3.0, 5.0):
        values = played_again(tape.played(), [x])
        assert values is not None
        assert values[place] == x


def test_code_put_in_the_place_of_torchs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = _made(torch.optim.AdamW)
    for _ in range(4):
        optimizer.step()
    module = sys.modules["torch.optim.adam"]
    adam = module.adam
    halved = lambda *args, **kwargs: adam(*args, **{**kwargs, "lr": 0.0})  # noqa: E731  # one line of it
    monkeypatch.setattr(module, "adam", halved)
    before = params[0].detach().clone()
    optimizer.step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("wrap", [torch.no_grad(), functools.partial, lambda f: unittest.mock.Mock(side_effect=f)])
def test_code_of_others_inside_code_of_torch_is_run_in_every_step(monkeypatch: pytest.MonkeyPatch, wrap: Any) -> None:
    """What it depends on may change from one step to the next, and change back."""
    module, boost = sys.modules["torch.optim.adam"], [1.0]
    adam = module.adam
    boosted = lambda *args, **kwargs: adam(*args, **{**kwargs, "lr": kwargs["lr"] * boost[0]})  # noqa: E731
    monkeypatch.setattr(module, "adam", wrap(boosted))
    (one, *_), optimizer = _made(torch.optim.AdamW)
    plain = torch.optim.AdamW([exact := torch.nn.Parameter(one.detach().float())], lr=1e-2)
    one.grad = torch.ones_like(one)
    for i in range(14):
        boost[0] = 30.0 if 9 <= i < 12 else 1.0
        exact.grad = torch.ones_like(exact)
        optimizer.step()
        plain.step()
    assert torch.allclose(collage_neuron.exact_value(optimizer, one), exact, atol=2e-2)  # boosted, three steps are 0.9


def test_a_method_put_on_the_object_is_noticed() -> None:
    params, optimizer = _made(torch.optim.AdamW)
    for _ in range(4):
        optimizer.step()
    optimizer._init_group = lambda *args: False  # which finds no parameters
    before = params[0].detach().clone()
    optimizer.step()
    assert torch.equal(params[0], before)


def test_a_wrong_number_is_noticed_when_the_code_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = _made(torch.optim.AdamW)
    for _ in range(5):
        optimizer.step()
    wrong = lambda program, inputs: played_again(program, [0.5 * inputs[0], *inputs[1:]])  # noqa: E731
    monkeypatch.setattr("collage_neuron.trace.recorded_classes.played_again", wrong)
    optimizer.step()
    optimizer.step()
    with pytest.raises(TranslationError, match="has other numbers than were computed"):
        optimizer.step()


@pytest.mark.parametrize(
    "take",
    [float, int, math.sqrt, math.floor, round, str, repr, hash, "{}".format, lambda x: x.is_integer(),
     lambda x: divmod(x, 2), lambda x: [0.0][x], lambda x: x.hex(), lambda x: x.real, lambda x: x + 1j,
     torch.tensor, lambda x: torch.full((2,), x), lambda x: x + "1"],
)  # fmt: skip
def test_a_number_that_leaves_the_tape_is_lost(take: Callable[[Any], Any]) -> None:
    tape = Tape()
    with pytest.raises(UnsupportedUpdate):
        take(tape.give(2.5))
    assert tape.lost


def test_a_comparison_and_a_failure_end_the_play() -> None:
    tape = Tape()
    x = tape.give(2.0)
    assert x > 1
    assert isinstance(1 / x, float)
    assert played_again(tape.played(), [3.0]) is not None
    assert played_again(tape.played(), [0.5]) is None
    other = Tape()
    1 / other.give(2.0)
    assert played_again(other.played(), [0.0]) is None
