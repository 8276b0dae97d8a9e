"""PyTorch's own test inputs for its optimizers, and what its test/test_optim.py checks with them, on compiled ones.

Not adapted: complex parameters, sparse gradients, parameters on several devices, CUDA graphs, gradient scaling inside
fused kernels, and peak memory: what they need is refused, or is not there.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable

import pytest
import torch
from sampling import part
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch_problems import CANNOT, COVERED, INFOS, Options, Problem, db, inputs

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate

pytestmark = pytest.mark.usefixtures("rejecting")


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


# --- what test_optim.py checks, each for one input -----------------------------------------------------------------


def goes_right_direction(name: str, options: Options) -> None:
    for problem in (Problem(), Problem(torch.float32, contiguous=False)):
        problem.goes_right(problem.compiled(name, options), options)


def goes_right_direction_with_schedulers(name: str, options: Options) -> None:
    for makers in INFOS[name].scheduler_inputs:
        problem = Problem()
        optimizer = problem.compiled(name, options)
        problem.goes_right(optimizer, options, [make(optimizer) for make in makers])


def schedulers_made_before_compiling_still_work(name: str, options: Options) -> None:
    makers = INFOS[name].scheduler_inputs[0]
    problem = Problem()
    optimizer = INFOS[name].optim_cls(problem.params, **options)
    schedulers = [make(optimizer) for make in makers]
    problem.goes_right(collage_neuron.compile(optimizer), options, schedulers)


def groups_have_their_learning_rates(name: str, options: Options) -> None:
    """A third parameter, without a gradient, stays what it was."""
    problem, irrelevant = Problem(), Parameter(torch.randn(2).bfloat16())
    before = irrelevant.detach().clone()
    (weight, bias), lr = problem.params, float(options.get("lr", 1e-3))
    groups = [{"params": [weight], "lr": lr / 10}, {"params": [bias, irrelevant]}]
    optimizer = problem.compiled(name, options | {"lr": lr}, groups)
    problem.goes_right(optimizer, options)
    assert torch.equal(irrelevant, before)
    assert optimizer.param_groups[0]["lr"] == lr / 10


def groups_have_their_weight_decay(name: str, options: Options) -> None:
    """With gradients of zero, only the group that decays moves."""
    if "weight_decay" not in INFOS[name].optim_cls([Parameter(torch.zeros(1))], **options).defaults:
        return
    problem = Problem()
    weight, bias = problem.params
    groups = [{"params": [weight], "weight_decay": 0.5}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = problem.compiled(name, options, groups)
    before = problem.values(optimizer)
    for _ in range(3):
        for p in problem.params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, problem.values(optimizer), strict=True)]
    assert moved == [True, name == "ASGD"]  # ASGD decays every parameter by `lambd`


def state_dict_round_trip(name: str, options: Options) -> None:
    """Also through a file that is read with `weights_only`; both go on with equal bits."""
    problem, other = Problem(), Problem()
    optimizer, fresh = problem.compiled(name, options), other.compiled(name, options)
    problem.train(optimizer, 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    for mine, theirs in zip(problem.params, other.params, strict=True):
        theirs.data = mine.detach().clone()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    problem.train(optimizer, 5)
    other.train(fresh, 5)
    assert same(problem.values(optimizer), other.values(fresh))


def an_older_state_dict_loads(name: str, options: Options) -> None:
    """One without the flags that were added to the optimizer since, and with `step` as a number."""
    problem = Problem()
    optimizer = problem.compiled(name, options)
    problem.train(optimizer, 3)
    old, twin = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(problem)
    fresh = twin.compiled(name, options)
    for group in old["param_groups"]:
        for flag in INFOS[name].not_og_supported_flags:
            group.pop(flag, None)
    for state in old["state"].values():
        if "step" in state:
            state["step"] = float(state["step"])
    fresh.load_state_dict(old)
    twin.train(fresh, 1)
    problem.train(optimizer, 1)
    if not options.get("maximize"):  # the flag was dropped
        assert same(problem.values(optimizer), twin.values(fresh))


def hooks_run_in_order(name: str, options: Options) -> None:
    problem, calls = Problem(), list[str]()
    optimizer = problem.compiled(name, options)

    def note(what: str) -> Callable[..., None]:
        return lambda *_: calls.append(what)

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
        optimizer.register_step_pre_hook(note("pre")),
        optimizer.register_step_post_hook(note("post")),
        optimizer.register_state_dict_pre_hook(note("save")),
        optimizer.register_state_dict_post_hook(note("saved")),
        optimizer.register_load_state_dict_pre_hook(note("load")),
        optimizer.register_load_state_dict_post_hook(note("loaded")),
    ]
    problem.train(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    for handle in handles:
        handle.remove()
    problem.train(optimizer, 1)
    assert calls == ["global pre", "pre", "post", "global post", "save", "saved", "load", "loaded"]


def a_learning_rate_may_be_a_tensor(name: str, options: Options) -> None:
    """Both go the same way, also when it is filled with another number."""
    lr = torch.tensor(float(options.get("lr", 2e-3)))
    values = []
    for own in (lr.clone(), lr.item()):
        problem = Problem()
        optimizer = problem.compiled(name, options | {"lr": own})
        problem.train(optimizer, 2)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr.item() / 2)
            else:
                group["lr"] = (lr / 2).item()
        problem.train(optimizer, 2)
        values.append(problem.values(optimizer))
    for by_tensor, by_number in zip(*values, strict=True):
        torch.testing.assert_close(by_tensor, by_number, rtol=2**-16, atol=2**-16)  # torch computes with an fp32 lr


def without_gradients_nothing_happens(name: str, options: Options) -> None:
    problem = Problem()
    optimizer = problem.compiled(name, options)
    before, state = problem.values(optimizer), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.step()
    assert same(before, problem.values(optimizer))
    assert str(optimizer.state_dict()["state"]) == str(state)


def a_copy_steps_like_the_original(name: str, options: Options) -> None:
    problem = Problem()
    optimizer = problem.compiled(name, options)
    problem.train(optimizer, 2)
    twin, twin_optimizer = copy.deepcopy((problem, optimizer))
    assert {k for k in vars(twin_optimizer) if k[0] != "_"} == {k for k in vars(optimizer) if k[0] != "_"}
    problem.train(optimizer, 2)
    twin.train(twin_optimizer, 2)
    assert same(problem.values(optimizer), twin.values(twin_optimizer))


def it_can_be_printed(name: str, options: Options) -> None:
    """With all of its options: torch prints `lr: 0.001` and so on for each group."""
    optimizer = Problem().compiled(name, options)
    assert all(f"{key}: {value}" in repr(optimizer) for key, value in options.items())


def its_states_are_tensors(name: str, options: Options) -> None:
    problem = Problem()
    optimizer = problem.compiled(name, options)
    problem.train(optimizer, 2)
    assert all(isinstance(v, Tensor) or v is None for state in optimizer.state.values() for v in state.values())


def any_way_to_run_takes_the_same_steps(name: str, options: Options) -> None:
    """foreach and fused, where there is one, against the plain loop; RAdam changes its formula in the sixth step."""
    values = []
    for impl in (None, "foreach", "fused"):
        tensor_lr = impl == "foreach" and isinstance(
            options.get("lr"), Tensor
        )  # torch itself wants capturable for this
        if impl is None or (impl in INFOS[name].supported_impls and not tensor_lr):
            problem = Problem()
            optimizer = problem.compiled(name, options | ({} if impl is None else {impl: True}))
            problem.train(optimizer, 7)
            values.append(problem.values(optimizer))
    assert all(same(values[0], other) for other in values[1:])
    assert len(values) > 1 or isinstance(options.get("lr"), Tensor)


CHECKS = (
    goes_right_direction,
    goes_right_direction_with_schedulers,
    schedulers_made_before_compiling_still_work,
    groups_have_their_learning_rates,
    groups_have_their_weight_decay,
    state_dict_round_trip,
    an_older_state_dict_loads,
    hooks_run_in_order,
    a_learning_rate_may_be_a_tensor,
    without_gradients_nothing_happens,
    a_copy_steps_like_the_original,
    it_can_be_printed,
    its_states_are_tensors,
    any_way_to_run_takes_the_same_steps,
)


NOT_CAPTURED = {("Adafactor", a_learning_rate_may_be_a_tensor)}
"""Adafactor multiplies it by a number that it reads from a tensor: tests/optimizers/test_items.py has it on copies."""


@pytest.mark.sampled(of=8)
@pytest.mark.parametrize(
    ("name", "check"), [pair for pair in itertools.product(COVERED, CHECKS) if pair not in NOT_CAPTURED]
)
def test_every_input_passes(name: str, check: Callable[[str, Options], None]) -> None:
    failed = {}
    for description, options in part(inputs(name), 3, check.__name__):
        try:
            check(name, options)
        except Exception as error:  # noqa: PERF203  # every one is tried, and all that fail are shown
            failed[description] = f"{type(error).__name__}: {error}"
    assert not failed


# --- what cannot run -----------------------------------------------------------------------------------------------


def refused(name: str, options: Options) -> bool:
    params = [Parameter(torch.randn(10, 5).bfloat16())]
    optimizer = INFOS[name].optim_cls(params, **options)
    try:
        collage_neuron.compile(optimizer)
        if name == "LBFGS":  # what a closure is for is seen in a step
            params[0].grad = torch.ones_like(params[0])
            optimizer.step(lambda: torch.tensor(1.0))
    except (UnsupportedUpdate, ValueError):
        return True
    return False


def test_the_optimizers_that_cannot_run_are_the_listed_ones() -> None:
    verdicts = {name: {refused(name, options) for _, options in inputs(name)} for name in INFOS}
    assert {name for name, verdict in verdicts.items() if verdict == {True}} == set(CANNOT)
    assert all(verdicts[name] == {False} for name in COVERED)


def test_of_91_inputs_75_run() -> None:
    """Another release of torch has other inputs: look at them, and count again."""
    counts = {name: len(list(inputs(name))) for name in INFOS}
    assert (sum(counts.values()), sum(counts[name] for name in COVERED)) == (91, 75)


@pytest.mark.parametrize("name", [name for name in COVERED if "differentiable" in INFOS[name].supported_impls])
def test_differentiable_is_refused_with_every_input(name: str) -> None:
    assert all(refused(name, options | {"differentiable": True}) for _, options in inputs(name))


@pytest.mark.parametrize("name", COVERED)
def test_errors_are_those_of_the_class(name: str) -> None:
    """What the class refuses, when built or when it steps, its compiled class refuses with the same words."""
    cls = collage_neuron.compile(INFOS[name].optim_cls)
    tried = 0
    for one in INFOS[name].optim_error_inputs_func("cpu", torch.bfloat16):
        if one.error_on is not db.OptimizerErrorEnum.CONSTRUCTION_ERROR:
            continue
        given = one.optimizer_error_input
        expects = pytest.warns if issubclass(one.error_type, Warning) else pytest.raises
        with expects(one.error_type, match=one.error_regex):
            cls(given.params, **given.kwargs)
        tried += 1
    assert tried
