"""Host objects that a step changes: compiling and recording leave no trace, a compiled step that of one plain step."""

from __future__ import annotations

import copy
import random
from typing import Any

import hosted
import numpy as np
import pytest
import torch
from torch.optim import AdamW

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.optimizer.compiled import Compiled, base_of
from collage_neuron.passes.capture.host_state import untraced
from collage_neuron.runtime.plan import plan

pytestmark = pytest.mark.usefixtures("rejecting")

Class = Any  # a class of optimizers; each has a constructor of its own
STEPS = 8

FOLLOWED: dict[str, Class] = {
    "attribute": hosted.Attribute,
    "slots": hosted.Slots,
    "class_attribute": hosted.InTheClass,
    "attribute_of_its_type": hosted.OfItsType,
    "itertools_count": hosted.Count,
    "itertools_cycle": hosted.Cycle,
    "iterator_made_anew": hosted.OfAList,
    "method_of_an_iterator": hosted.NextOfAList,
    "python_random": hosted.Random,
    "torch_random": hosted.TorchRandom,
    "numpy_random": hosted.NumpyRandom,
    "random_generators_of_its_own": hosted.OwnRandom,
    "module_globals": hosted.Global,
    "closure": hosted.Closure,
    "object_in_the_group": hosted.InTheGroup,
    "object_in_the_state": hosted.InTheState,
    "deque": hosted.Window,
    "list_that_two_objects_hold": hosted.Listed,
    "containers_that_groups_share": hosted.SharedDefault,
    "object_exchanged_for_another": hosted.Rebound,
    "objects_that_lead_to_the_optimizer": hosted.Back,
    "switches_after_four_steps": hosted.Later,
    "numbers_and_lists": hosted.Numbers,
    "arrays": hosted.Array,
}

REJECTED: dict[str, tuple[Class, str]] = {
    "generator": (hosted.Generator, r"uses optimizer\.rates \(generator\), which can neither be copied .* itertools"),
    "generator_in_a_try": (hosted.Caught, r"uses optimizer\.rates \(generator\), which can neither be copied"),
    "file": (hosted.File, r"uses optimizer\.file \(StringIO\).*read files and log outside step\(\)"),
    "advanced_by_each_parameter": (
        hosted.PerParameter, r"changes optimizer\.clock, and not once a step: do that before the loop"),
    "random_for_each_parameter": (
        hosted.RandomPerParameter, r"draws random numbers on the host \(Python's random generator\), and not once"),
    "not_repeatable": (hosted.SystemRandom, r"Two recordings of the same step have different numbers: .*param_groups"),
    "one_state_with_two_names": (
        hosted.TwoNames, r"state\[p\]\['slow'\] and .*\['fast'\] are one tensor, .* or clone\(\) it"),
    "the_parameter_as_a_state": (
        hosted.KeepsTheParameter, r"the parameter and optimizer\.state\[p\]\['mine'\] are one tensor"),
}  # fmt: skip


def params() -> list[torch.nn.Parameter]:
    """Of four shapes, with values that bf16 has not."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((3, 4), (4,), (2, 3), (5,), ())]


def made(cls: Class) -> Any:
    """An optimizer with two groups, and generators as they always are."""
    ps = params()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    return cls([{"params": ps[:2]}, {"params": ps[2:], "lr": 0.0625}])


def step(optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
    optimizer.step()


def left(optimizer: Any) -> Any:
    """What its steps left behind; a compiled optimizer's own method would look at a copy of it."""
    cls: Any = base_of(type(optimizer)) if isinstance(optimizer, Compiled) else type(optimizer)
    return cls.trace(optimizer)


def trace(optimizer: Any) -> Any:
    return left(optimizer), random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def run(optimizer: Any, steps: int = STEPS) -> Any:
    for i in range(steps):
        step(optimizer, i)
    return optimizer


def values(optimizer: Any) -> list[torch.Tensor]:
    ps = [p for group in optimizer.param_groups for p in group["params"]]
    exact = isinstance(optimizer, Compiled)
    return [(collage_neuron.exact_value(optimizer, p) if exact else p.detach()).double() for p in ps]


def assert_equal(optimizer: Any, plain: Any, steps: int = STEPS) -> None:
    """Each step stores a pair (2**-17 of a value below 4), from arithmetic in fp32 (less than that)."""
    for value, exact in zip(values(optimizer), values(plain), strict=True):
        assert float((value - exact).abs().max()) <= steps * 4 * 2 * 2**-17


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_compiled_step_leaves_the_trace_of_one_plain_step(name: str) -> None:
    plain = run(made(FOLLOWED[name]))
    expected = trace(plain)
    optimizer = made(FOLLOWED[name])
    before = trace(optimizer)
    compiled = collage_neuron.compile(optimizer, strategy="full")
    assert trace(compiled) == before
    run(compiled)
    assert trace(compiled) == expected
    assert_equal(compiled, plain)


@pytest.mark.parametrize("name", REJECTED)
def test_what_cannot_be_followed_is_rejected_without_a_trace(name: str) -> None:
    cls, message = REJECTED[name]
    optimizer = made(cls)
    before, attributes = trace(optimizer), dict(vars(optimizer))
    with pytest.raises(UnsupportedUpdate, match=rf"{cls.__name__} cannot be compiled: .*{message}"):
        collage_neuron.compile(optimizer)
    assert trace(optimizer) == before
    assert vars(optimizer) == attributes
    assert type(optimizer) is cls
    assert all(torch.equal(v, p.detach().double()) for v, p in zip(values(optimizer), params(), strict=True))


def test_numbers_that_begin_to_differ_later_reject_the_step_without_a_trace() -> None:
    optimizer = collage_neuron.compile(made(hosted.LaterPerParameter))
    run(optimizer, 2)
    before = trace(optimizer), values(optimizer)
    with pytest.raises(UnsupportedUpdate, match=r"changes optimizer\.clock, and not once a step"):
        step(optimizer, 2)
    assert trace(optimizer) == before[0]
    assert all(map(torch.equal, values(optimizer), before[1]))


class After40(hosted.Attribute):
    def rate(self) -> Any:
        return 0.0625 if self.clock.next() <= 40 else 0.5


def test_a_change_of_behaviour_after_forty_steps_is_followed() -> None:
    plain, compiled = run(made(After40), 44), collage_neuron.compile(made(After40), strategy="full")
    assert_equal(run(compiled, 44), plain, 44)
    assert left(compiled) == left(plain)


def test_objects_stay_those_that_the_user_holds() -> None:
    optimizer = made(hosted.Listed)
    clock, past, group = optimizer.clock, optimizer.past, optimizer.param_groups[0]
    run(collage_neuron.compile(optimizer))
    assert optimizer.clock is clock
    assert optimizer.past is past is clock.past
    assert optimizer.param_groups[0] is group
    assert past == [1.0 + i for i in range(STEPS + 1)]


def test_what_only_records_leaves_no_trace() -> None:
    optimizer = run(collage_neuron.compile(made(hosted.OwnRandom)))
    saved, before = copy.deepcopy(optimizer.state_dict()), trace(optimizer)
    collage_neuron.explain(optimizer)
    collage_neuron.bytes_per_parameter(optimizer)
    optimizer.load_state_dict(saved)
    collage_neuron.compile(optimizer, strategy="full")
    assert trace(optimizer) == before


def test_a_monitored_step_leaves_the_trace_of_one() -> None:
    plain, optimizer = made(hosted.Attribute), collage_neuron.compile(made(hosted.Attribute))
    collage_neuron.monitor(optimizer, every=1)
    run(plain), run(optimizer)
    assert left(optimizer) == left(plain)


def test_compiling_a_class_leaves_no_trace_of_the_one_that_is_tried() -> None:
    random.seed(1)
    before = random.getstate(), torch.get_rng_state(), list(hosted.Registered.made)
    collage_neuron.compile(hosted.Registered)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert hosted.Registered.made == before[2]


def test_parameters_without_gradients_are_left_out_of_the_trace_too() -> None:
    traces = []
    for compiled in (False, True):
        optimizer = made(hosted.Attribute)
        optimizer = collage_neuron.compile(optimizer) if compiled else optimizer
        for _ in range(3):
            for group in optimizer.param_groups:
                for j, p in enumerate(group["params"]):
                    p.grad = torch.ones_like(p) if j else None
            optimizer.step()
        traces.append(left(optimizer))
    assert traces[0] == traces[1] == (3, [0, 1, 2, 3])


def test_generators_of_the_process_are_left_alone_by_adamw() -> None:
    optimizer = made(AdamW)
    before = torch.get_rng_state()
    run(collage_neuron.compile(optimizer))
    assert torch.equal(torch.get_rng_state(), before)


def test_recordings_of_torchs_own_optimizers_change_nothing_else_on_the_host() -> None:
    """So that their steps are not taken a second time."""
    for cls in (AdamW, torch.optim.NAdam, torch.optim.SGD):
        optimizer = run(collage_neuron.compile(made(cls)), 1)
        jobs = [job for i, group in enumerate(optimizer.param_groups) for job in plan(cls, optimizer, group, i)]
        assert not any(job.recording.host for job in jobs)


def test_the_same_parameter_twice_is_named() -> None:
    ps = params()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = AdamW([ps[0], ps[1], ps[0]])
    with pytest.raises(
        UnsupportedUpdate, match=r"\['params'\]\[0\] and .*\['params'\]\[2\] are the same parameter.*once"
    ):
        collage_neuron.compile(optimizer)


def test_states_that_are_one_tensor_are_named() -> None:
    optimizer = run(made(AdamW), 1)
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first]["exp_avg"] = optimizer.state[first]["exp_avg_sq"]
    message = r"state\[param_groups\[0\].*\]\['exp_avg'\] and .*\['exp_avg_sq'\] are one tensor"
    with pytest.raises(UnsupportedUpdate, match=message):
        collage_neuron.compile(optimizer)


def test_what_runs_untraced_leaves_no_trace() -> None:
    optimizer = made(hosted.OwnRandom)
    before, used = trace(optimizer), []
    for _ in range(2):
        with untraced(hosted.OwnRandom, optimizer) as host:
            used.append(optimizer.rate())
            assert "optimizer.a, a random generator" in host.changes()
    assert used[0] == used[1]
    assert trace(optimizer) == before
