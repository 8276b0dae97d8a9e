"""PyTorch's own test inputs for its optimizers, and what its test/test_optim.py (TestOptimRenewed) checks with them.

On compiled optimizers, and on those of compiled classes. Not adapted: parameters on several devices, CUDA graphs, large
tensors and peak memory, which need CUDA or 64 GB.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import through_torch_save
from sampling import part
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch_problems import CANNOT, COVERED, INFOS, Options, Problem, db, inputs

import collage_neuron
from collage_neuron import exact_value
from collage_neuron.errors import UnsupportedUpdate

pytestmark = pytest.mark.usefixtures("rejecting")


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def of_class(name: str, params: Any, options: Options) -> Any:
    """An optimizer of the compiled class; a scheduler or a fill writes into a learning rate that is a tensor."""
    made: Any = collage_neuron.compile(INFOS[name].optim_cls)
    return made(params, **copy.deepcopy(options))


# --- what test_optim.py checks, each for one input -----------------------------------------------------------------


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
    saved = through_torch_save(optimizer.state_dict(), weights_only=True)
    for mine, theirs in zip(problem.params, other.params, strict=True):
        theirs.data = mine.detach().clone()
    fresh.load_state_dict(saved)
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


STEPS = 7
"""RAdam changes its formula in the sixth step."""


def exact_problem() -> Problem:
    """In fp32, from the same weights."""
    problem = Problem()
    for p in problem.params:
        p.data = p.data.float()
    return problem


def any_way_to_run_goes_where_plain_fp32_goes(name: str, options: Options) -> None:
    """foreach and fused, where there is one, have the bits of the plain loop."""
    exact, values = exact_problem(), []
    exact.follow(exact.plain(name, options), STEPS)
    for impl in (None, "foreach", "fused"):
        tensor_lr = impl == "foreach" and isinstance(
            options.get("lr"), Tensor
        )  # torch itself wants capturable for this
        if impl is None or (impl in INFOS[name].supported_impls and not tensor_lr):
            problem = Problem()
            optimizer = problem.compiled(name, options | ({} if impl is None else {impl: True}))
            problem.follow(optimizer, STEPS)
            assert problem.error(optimizer, exact) < STEPS
            values.append(problem.values(optimizer))
    assert all(same(values[0], other) for other in values[1:])
    assert len(values) > 1 or isinstance(options.get("lr"), Tensor)


def schedulers_go_where_they_go_in_plain_fp32(name: str, options: Options) -> None:
    """Made before compiling too; a third parameter, without a gradient, stays what it was."""
    for makers in INFOS[name].scheduler_inputs:
        exact, problem, irrelevant = exact_problem(), Problem(), Parameter(torch.randn(2).bfloat16())
        before, plain = irrelevant.detach().clone(), exact.plain(name, options)
        optimizer = problem.plain(name, options, [{"params": [*problem.params, irrelevant]}])
        exact.follow(plain, STEPS, [make(plain) for make in makers])
        schedulers = [make(optimizer) for make in makers]
        problem.follow(collage_neuron.compile(optimizer), STEPS, schedulers)
        assert problem.error(optimizer, exact) < STEPS
        assert torch.equal(irrelevant, before)


def gradients_of_zero_move_nothing(name: str, options: Options) -> None:
    if options.get("weight_decay") or name in ("AdamW", "ASGD"):
        return  # which decay by default
    p = Parameter(torch.randn(5, 1).bfloat16())
    before = p.detach().clone()
    optimizer = of_class(name, [p], options)
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(exact_value(optimizer, p), before.float())


def a_state_of_another_implementation_loads(name: str, options: Options) -> None:
    """A checkpoint that was saved with `fused` or `capturable` on, as on a GPU, goes on here."""
    for impl in ("fused", "capturable"):
        problem = Problem()
        optimizer = of_class(name, problem.params, options)
        if impl not in optimizer.param_groups[0]:
            continue
        problem.train(optimizer, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        for group in saved["param_groups"]:
            group[impl] = True
        twin, other = copy.deepcopy((problem, optimizer))
        other.load_state_dict(saved)
        problem.train(optimizer, 2)
        twin.train(other, 2)
        assert same(problem.values(optimizer), twin.values(other)), impl


def hooks_see_and_change_what_is_saved(name: str, options: Options) -> None:
    """What a hook before adds to the state is in what is saved; what a hook after returns is what is saved."""
    optimizer = of_class(name, Problem().params, options)

    def before(optimizer: Optimizer) -> None:
        optimizer.state["test"] = 1  # type: ignore[index]  # torch's own test does it

    def after(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        return saved | {"seen": saved["state"].pop("test", None)}

    optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["seen"] is None
    optimizer.register_state_dict_pre_hook(before)
    saved = optimizer.state_dict()
    assert saved["seen"] == 1
    assert "test" not in saved["state"]


def hooks_see_and_change_what_is_loaded(name: str, options: Options) -> None:
    optimizer = of_class(name, Problem().params, options)
    seen: list[float] = []

    def in_place(optimizer: Optimizer, saved: dict[str, Any]) -> None:
        saved["param_groups"][0]["lr"] = 0.002

    def anew(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        mine = copy.deepcopy(saved)
        mine["param_groups"][0]["lr"] = 0.003
        return mine

    def after(optimizer: Optimizer) -> None:
        seen.append(optimizer.param_groups[0]["lr"])

    optimizer.register_load_state_dict_post_hook(after)
    first = optimizer.register_load_state_dict_pre_hook(in_place)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(anew, prepend=True)  # runs first, and the other one overrides
    optimizer.load_state_dict(optimizer.state_dict())
    first.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [0.002, 0.002, 0.003]


def a_layer_may_be_frozen_and_thawed(name: str, options: Options) -> None:
    """Each parameter takes the steps that it would take in an optimizer of its own, with a step without gradients.

    torch's own test has a parameter without dimensions among them.
    """
    ways = []
    for together in (True, False):
        params = [Parameter(t.bfloat16()) for t in (torch.linspace(-1, 1, 6).reshape(2, 3), torch.tensor(0.3))]
        groups = [params] if together else [[p] for p in params]
        optimizers = [of_class(name, group, options) for group in groups]
        for i in range(7):
            for j, p in enumerate(params):
                p.grad = None if i == 2 or (j == 0 and i in (3, 4)) else torch.full_like(p, 0.1 * (i + 1))
            for optimizer in optimizers:
                optimizer.step()
        ways.append([exact_value(optimizers[0 if together else j], p) for j, p in enumerate(params)])
    assert same(*ways)


def dtypes_may_be_mixed(name: str, options: Options) -> None:
    """An fp32 parameter beside a bf16 one is updated in fp32, as torch updates it."""
    values = [torch.linspace(-1, 1, 6), torch.linspace(1, 2, 6)]
    pair = [Parameter(values[0].bfloat16()), Parameter(values[1].clone())]
    plain = [Parameter(values[1].clone())]
    with pytest.warns(UserWarning, match="float32"):
        optimizer = of_class(name, pair, options)
    of_torch = INFOS[name].optim_cls(plain, **copy.deepcopy(options) | {"foreach": False})
    for i in range(5):
        for p in (*pair, *plain):
            p.grad = torch.full_like(p, 0.1 * (i + 1))
        optimizer.step()
        of_torch.step()
    assert pair[1].dtype == torch.float32
    torch.testing.assert_close(pair[1], plain[0], rtol=5 * 1.3e-6, atol=5e-5)  # torch's own tolerance for this


def groups_may_be_empty_and_come_later(name: str, options: Options) -> None:
    """And have their own options then; a parameter may have no gradient before it is there."""
    exact, problem = exact_problem(), Problem()
    both = []
    for each, make in ((exact, exact.plain), (problem, problem.compiled)):
        both.append(make(name, options, [{"params": []}, {"params": each.params[:1]}]))
        each.follow(both[-1], 2)
        both[-1].add_param_group({"params": each.params[1:], "lr": 2e-3})
        each.follow(both[-1], STEPS - 2)
    assert problem.error(both[1], exact) < STEPS


CHECKS = (
    schedulers_go_where_they_go_in_plain_fp32,
    groups_have_their_weight_decay,
    state_dict_round_trip,
    an_older_state_dict_loads,
    hooks_run_in_order,
    a_learning_rate_may_be_a_tensor,
    without_gradients_nothing_happens,
    a_copy_steps_like_the_original,
    any_way_to_run_goes_where_plain_fp32_goes,
    groups_may_be_empty_and_come_later,
    gradients_of_zero_move_nothing,
    a_state_of_another_implementation_loads,
    hooks_see_and_change_what_is_saved,
    hooks_see_and_change_what_is_loaded,
    a_layer_may_be_frozen_and_thawed,
    dtypes_may_be_mixed,
)


LEFT_OUT = {("Adafactor", a_learning_rate_may_be_a_tensor), ("Adagrad", groups_may_be_empty_and_come_later)}
"""Adafactor multiplies it by a number that it reads from a tensor: tests/optimizers/test_items.py has it on copies.

Adagrad makes its states when it is built: plain torch raises a KeyError for a group that comes later.
"""


@pytest.mark.sampled(of=12)
@pytest.mark.parametrize(
    ("name", "check"), [pair for pair in itertools.product(COVERED, CHECKS) if pair not in LEFT_OUT]
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


def test_decoupled_decay_survives_loading() -> None:
    model = nn.Linear(5, 5, dtype=torch.bfloat16)
    adam, adamw = (collage_neuron.compile(INFOS[name].optim_cls) for name in ("Adam", "AdamW"))
    coupled = adam(model.parameters()).state_dict()
    decoupled = adamw(model.parameters()).state_dict()
    old = copy.deepcopy(decoupled)
    del old["param_groups"][0]["decoupled_weight_decay"]
    for make, saved, expected in ((adam, decoupled, True), (adamw, coupled, True), (adamw, old, True)):
        optimizer = make(model.parameters())
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is expected


@pytest.mark.parametrize("name", COVERED)
@pytest.mark.parametrize("named", [(False, False), (False, True), (True, False), (True, True)])
def test_names_of_parameters_survive_loading(name: str, named: tuple[bool, bool]) -> None:
    problem = Problem()
    ways = {False: problem.params, True: list(zip(("weight", "bias"), problem.params, strict=True))}
    optimizer, other = (of_class(name, ways[way], {}) for way in named)
    problem.train(optimizer, 2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    problem.train(other, 1)
    names = other.state_dict()["param_groups"][0].get("param_names")
    assert names == (["weight", "bias"] if any(named) else None)


@pytest.mark.parametrize("name", [name for name in COVERED if INFOS[name].supports_sparse])
def test_sparse_gradients_are_rejected(name: str) -> None:
    """Nothing has been changed when it is."""
    p = Parameter(torch.ones(2).bfloat16())
    optimizer = of_class(name, [p], {})
    p.grad = torch.tensor([3.0, 0.0]).bfloat16().to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(p, torch.ones(2).bfloat16())
    assert not optimizer.state_dict()["state"].get(0, {}).get("step", 0)


@pytest.mark.parametrize("name", COVERED)
def test_errors_of_a_step_are_those_of_the_class(name: str) -> None:
    """An input that torch's class fails on when it steps fails with the compiled one too, if there is such an input."""
    for one in INFOS[name].optim_error_inputs_func("cpu", torch.bfloat16):
        if one.error_on is db.OptimizerErrorEnum.STEP_ERROR:
            given = one.optimizer_error_input
            optimizer = of_class(name, given.params, given.kwargs)
            with pytest.raises((one.error_type, TypeError, ValueError, UnsupportedUpdate)):
                optimizer.step()
