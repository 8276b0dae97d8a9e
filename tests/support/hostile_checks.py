"""For each hostile case the check that serves it, and how a test takes that check away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from collage_neuron import api
from collage_neuron.conversion import convert
from collage_neuron.optimizer import launches, step
from collage_neuron.passes.capture import (
    capture,
    captured_graph,
    functionalize,
    host_state,
    joint,
    recorder,
    state_checks,
)
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.rewrite import rules
from collage_neuron.recording import bucketing, independence, repeated, visible
from collage_neuron.states import cleared, rewritten
from collage_neuron.torch_privates import unhooked_step

Removal = Callable[[pytest.MonkeyPatch], None]


def _nothing(*_: Any, **__: Any) -> None:
    return None


def recorded_anew_each_step(patch: pytest.MonkeyPatch) -> None:
    """The first recording of a parameter serves all of its steps."""
    first: dict[Any, Any] = {}
    true = bucketing.record

    def once(base: Any, optimizer: Any, group: Any, p: Any) -> Any:
        return first.setdefault(p, true(base, optimizer, group, p))

    patch.setattr(plan, "record", once)
    patch.setattr(repeated.Repeats, "record", lambda repeats, *args: once(repeats._base, repeats._optimizer, *args))


def compared_with_a_joint_step(patch: pytest.MonkeyPatch) -> None:
    """What a recording of one parameter says is believed."""
    patch.setattr(independence, "check", _nothing)
    patch.setattr(independence, "check_step", _nothing)
    patch.setattr(independence, "_differences", lambda *_: iter(()))


def grouped_by_what_is_asked(patch: pytest.MonkeyPatch) -> None:
    """One recording stands for parameters of every shape."""
    patch.setattr(plan, "learn", lambda *_: False)
    patch.setattr(bucketing, "learn", lambda *_: False)
    compared_with_a_joint_step(patch)


def grouped_by_numbers(patch: pytest.MonkeyPatch) -> None:
    """One recording stands for all parameters of a group, however many steps each has taken."""
    patch.setattr(plan, "buckets", lambda optimizer, params: [params] if params else [])
    compared_with_a_joint_step(patch)


def states_are_tensors_of_their_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_checks, "_check_single", _nothing)
    compared_with_a_joint_step(patch)


def states_are_floating(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_checks, "check_floating", _nothing)
    patch.setattr(visible, "check_floating", _nothing)


def states_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture, "_check_not_dropped", _nothing)


def updates_are_elementwise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(functionalize.Builder, "_check_elementwise", _nothing)


def views_are_of_one_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(launches, "_seen", lambda t, key, update: t.detach().clone().view(update.seen_as))


def operations_have_rules(patch: pytest.MonkeyPatch) -> None:
    """An operation without a rule gives zeros."""
    true = rules.rule_for

    def lenient(target: Any, node: str) -> Any:
        return true(target, node) if target in rules.RULES else lambda *_, **__: Scalar.constant(0.0)

    patch.setattr("collage_neuron.passes.rewrite.expand.rule_for", lenient)


def foreign_tensors_are_seen(patch: pytest.MonkeyPatch) -> None:
    """A step that fails on what has no data is taken to have done nothing."""

    def quiet(base: Any, optimizer: Any, watch: Any, recorder: Any) -> None:
        try:
            with torch.no_grad(), watch, recorder:
                unhooked_step(base)(optimizer)
        except Exception:
            return

    patch.setattr(capture, "run_step", quiet)
    patch.setattr(joint, "run_step", quiet)
    patch.setattr(recorder.Recorder, "_is_foreign", lambda *_: False)
    compared_with_a_joint_step(patch)


def what_cannot_be_copied_is_guarded(patch: pytest.MonkeyPatch) -> None:
    """Generators are used by each recording, and host objects are not put back."""
    patch.setattr(host_state.HostState, "enter", _nothing)
    patch.setattr(host_state.HostState, "restore", _nothing)
    compared_with_a_joint_step(patch)


def gradients_are_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(captured_graph, "_new_gradient", lambda *_: {})
    patch.setattr(captured_graph, "_captures", {})


def outs_are_followed(patch: pytest.MonkeyPatch) -> None:
    """What is written through `out=` is not seen."""
    true = functionalize.Builder.add

    def blind(builder: Any, op: Any) -> None:
        if "out" not in dict(op.kwargs):
            true(builder, op)

    patch.setattr(functionalize.Builder, "add", blind)
    patch.setattr(captured_graph, "_captures", {})


def words_outlive_their_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cleared, "restore", _nothing)


def writers_are_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rewritten, "_tell", _nothing)


def rewritten_at_all(patch: pytest.MonkeyPatch) -> None:
    """The optimizer's own code updates the bf16 weights."""

    def plain(base: Any, optimizer: Any) -> None:
        unhooked_step(base)(optimizer)

    patch.setattr(step, "take_step", plain)


def everything_is_checked(patch: pytest.MonkeyPatch) -> None:
    """For what more than one check would stop: all of them are gone."""
    for remove in (
        what_cannot_be_copied_is_guarded, foreign_tensors_are_seen, operations_have_rules, updates_are_elementwise,
        states_stay, states_are_floating, states_are_tensors_of_their_own,
    ):  # fmt: skip
        remove(patch)
    for name in ("check_kept", "check_no_stand_ins"):
        patch.setattr(capture, name, _nothing)
    patch.setattr(joint, "check_no_stand_ins", _nothing)
    patch.setattr(host_state.HostState, "check", _nothing)
    patch.setattr(api, "check_unshared", _nothing)
    patch.setattr(convert, "check_step", _nothing, raising=False)


SERVED: Mapping[str, Removal] = {
    "DividesByTheNumberOfParameters": compared_with_a_joint_step,
    "FavoursTheFirst": compared_with_a_joint_step,
    "UsesTheGradientOfItsNeighbour": foreign_tensors_are_seen,
    "CountsParameters": compared_with_a_joint_step,
    "SumsTheRatesOfTheOthers": compared_with_a_joint_step,
    "LooksAtTheShape": grouped_by_what_is_asked,
    "KeepsItsOwnList": foreign_tensors_are_seen,
    "KeepsMomentsInADictionary": foreign_tensors_are_seen,
    "KeepsOneTensorTwice": states_are_tensors_of_their_own,
    "KeepsTheParameterItself": states_are_tensors_of_their_own,
    "DropsAState": states_stay,
    "WritesAFlatView": views_are_of_one_memory,
    "WritesTheFirstRow": updates_are_elementwise,
    "WritesThroughOut": outs_are_followed,
    "CountsInIntegers": states_are_floating,
    "AddsNoise": operations_have_rules,
    "LooksAtTheClock": compared_with_a_joint_step,
    "HasAGenerator": what_cannot_be_copied_is_guarded,
    "HasAnIterator": what_cannot_be_copied_is_guarded,
    "HasASchedule": what_cannot_be_copied_is_guarded,
    "decays_into_the_gradient_which_nobody_clears": gradients_are_written,
    "some_parameters_have_no_gradient_now_and_then": grouped_by_numbers,
    "the_state_is_cleared_to_restart": words_outlive_their_state,
    "two_optimizers_share_the_parameters": writers_are_told,
    "a_hook_decays_the_weights": writers_are_told,
}
"""The check that serves a case; where none is named, that each step is recorded anew."""


OF_STRANGERS: Mapping[Removal, str] = {
    states_are_tensors_of_their_own: ("SharedStates keeps_gradient_written_in_place AliasOfWeights"),
    everything_is_checked: (
        "StateOnParameter StateInWeakDictionary StateObject TupleKeys FinallySteps weights_in_one_memory "
        "views_of_a_flat_buffer LeavesTheModel OddNames LowNames"
    ),
    rewritten_at_all: (
        "OwnMaster EpsilonOfType OnlyIfOrdinary NumbersOfAllKinds update_of_the_instance closure_makes_gradients "
        "gradients_dropped_by_step frozen_and_thawed copied_before copied_and_pickled_midway "
        "compiled_again_and_again state_of_another_moment tiny_and_huge nan_guard_by_element ClipsByOwnHistory "
        "CautiousByHalf parameter_replaced hook_with_arguments"
    ),
    compared_with_a_joint_step: ("CountsUpdates DiceOfEach LocalDecay OneAtATime RatesByIdentity MembersOnly"),
    what_cannot_be_copied_is_guarded: (
        "CountsOnClass Iterator Generated Dice group_values_are_called counts_log_records counts_what_is_written "
        "default_argument Locked"
    ),
    operations_have_rules: ("Noise Rolled ByHand"),
    foreign_tensors_are_seen: (
        "NoiseByGenerator NumpyNoise FallsBackFromOperation ByPosition MaskOfItsOwn ComparesTensors ThroughNumpy "
        "ThroughLists"
    ),
    grouped_by_what_is_asked: ("ByDimensions"),
    updates_are_elementwise: ("FallsBack Suppresses"),
    gradients_are_written: ("momentum_in_gradients gradients_zeroed_by_step gradient_is_exchanged_in_step"),
}
"""The same for the cases of the folder `strangers`."""

WITHOUT = frozenset(
    {
        "CautiousByCount",
        "CountsByElement",
        "CountsInContext",
        "HalfOfIt",
        "KeepsGradient",
        "MasterName",
        "OwnKahan",
        "Prints",
        "SetsData",
        "StateInDictionary",
        "StateInGroup",
        "StateInLists",
        "Transposed",
        "ZeroGradOfItsOwn",
        "from_the_model",
        "groups_rebuilt",
        "other_arguments_of_step",
        "own_state_dict",
        "step_patched_before",
    }
)
"""Cases that stay right, or rejected, with any of these checks away, or all: several serve them, or none is needed."""


def removal_of(case: str) -> Removal:
    """How the check that serves a case is taken away."""
    found = next((removal for removal, names in OF_STRANGERS.items() if case in names.split()), recorded_anew_each_step)
    return SERVED.get(case, found)
