"""What is private in torch is used in one folder; each use is explained, and a test notices when torch changes it.

Which test that is, `NOTICED_BY` says.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_modules import Module, modules

ROOT = Path(__file__).parents[2]
PRIVATES = "collage_neuron.torch_privates"

NOT_TORCHS = {
    "_replace": "a named tuple's",
    "_make": "a named tuple's",
    "_asdict": "a named tuple's",
    "_fields": "a named tuple's",
    "_getframe": "Python's",
    "_bit_generator": "numpy's",
    "_keep_in_fp32_modules_strict": "transformers'",
}
"""Names that begin with an underscore and are public, or private to others."""

NOTICED_BY = {
    "distributed/test_traced.py::test_sums_over_shards_are_launched":
        "all_reduce is_wrapping process_group wait_tensor",
    "trace/test_scalar_program.py::test_followed_steps_have_the_bits_of_recorded_ones": "unseen",
    "backends/test_reference_and_xla.py::test_without_fma_every_update_and_rule_gives_the_same_bits":
        "user_computation",
    "runtime/test_written_weights.py::test_a_write_between_steps_is_within_half_an_ulp":
        "version",
    "conversion/test_averaging.py::test_shards_and_replicas_end_with_the_average_of_one_process": "is_fully_sharded",
    "conversion/test_buffers_running.py::test_running_statistics_move_as_in_fp32": "NORMS",
    "conversion/test_buffers_running.py::test_what_stays_fp32_stays_so_when_the_optimizer_is_compiled_again":
        "has_pre_hook",
    "conversion/test_compile_classes.py::test_a_step_that_was_kept_from_before_compiling_is_the_compiled_one":
        "put_last",
    "conversion/test_compile_model.py::test_the_first_step_runs_hooks_around_it_and_the_closure_once": "mark_hooked",
    "conversion/test_compile_model.py::test_the_first_step_runs_its_own_code_once": "hooked_steps",
    "conversion/test_frozen.py::test_frozen_weights_that_stay_fp32_are_trained_from_their_values": "each_tensor",
    "checkpoint/test_checkpoints.py::test_what_a_models_own_hooks_make_of_weights_they_make_of_exact_ones": "holding",
    "conversion/test_loaded_weights.py::test_the_warning_comes_through_wrappers_once":
        "has_load_hook drop_load_hook",
    "conversion/test_training_script.py::test_a_scheduler_attached_before_compiling_sees_that_no_step_was_taken":
        "is_counted_by_scheduler count_step mark_counted",
    "conversion/test_uncommon.py::test_views_of_a_flat_buffer": "base_of",
    "conversion/test_wrapping.py::test_a_ddp_that_cannot_be_set_up_anew_is_rejected_before_anything_changes":
        "has_step_in_backward ddp_problems",
    "conversion/test_wrapping.py::test_a_nan_in_one_process_makes_all_skip_and_count":
        "FSDP1 of_flat_parameter device_of_zero",
    "conversion/test_wrapping.py::test_every_option_of_ddp_is_kept_when_it_is_set_up_anew": "set_up_anew",
    "conversion/test_wrapping.py::test_fsdp1_of_a_class_that_is_traced": "attributes",
    "conversion/test_wrapping.py::test_fsdp1_of_fp32_parameters_is_rejected_in_every_form": "is_flattened",
    "conversion/test_wrapping.py::test_fsdp_of_torch_xla_is_rejected": "is_of_xla_fsdp",
    "distributed/test_sharding.py::test_a_model_that_fsdp_has_laid_out_in_fp32_is_refused_and_left_alone":
        "has_laid_out",
    "distributed/test_sharding.py::test_a_step_that_finds_what_the_last_one_found_plans_nothing": "layouts parts",
    "distributed/test_sharding.py::test_every_kind_of_sharding_ends_where_one_process_ends": "offset_of_shard",
    "distributed/test_spmd.py::test_a_parameter_in_parts_is_not_seen_in_another_shape": "is_split_over_devices",
    "distributed/test_spmd.py::test_every_word_is_sharded_as_its_parameter_was": "mark_sharding_like",
    "distributed/test_traced.py::test_traced_shards_have_the_words_of_whole_parameters":
        "part sharded_like attributes exchange_shards",
    "distributed/test_zero.py::test_a_nan_in_the_shard_of_one_rank_makes_all_skip": "groups_of_xla_zero",
    "eager/test_as_written.py::test_schedulers_hooks_and_a_state_of_no_parameter": "unhooked_step",
    "eager/test_gradients.py::test_gradients_are_the_same_by_every_name": "copy_each flattened",
    "eager/test_identity.py::test_hooks_where_gradients_are_accumulated_still_run": "exchange",
    "eager/test_rollback.py::test_what_the_step_keeps_is_what_it_is_in_fp32": "holders are_held_once",
    "matmuls/test_changes.py": "Surroundings",
    "matmuls/test_sharded.py::test_fsdp_is_rejected_before_compiling_and_after_it": "is_managed_by_fsdp",
    "matmuls/test_surroundings.py::test_a_backward_can_be_kept_and_run_again": "donate_nothing",
    "matmuls/test_surroundings.py::test_what_cannot_be_captured_is_rejected_with_the_reason": "compile_errors",
    "matmuls/test_surroundings.py::test_what_changes_about_a_model_is_noticed": "guarding",
    "matmuls/test_xla.py::test_every_product_is_a_dot_of_8_bits": "xla_dot",
    "conversion/test_uncommon.py::test_grad_scaler": "unscales_itself",
    "passes/test_verify.py::test_explain_shows_formats_bytes_and_both_graphs": "is_operation",
    "repository/test_trainers.py::test_torch_compile_around_the_step_leaves_the_update_alone": "not_compiled",
    "runtime/test_exact_methods.py::test_a_method_may_have_the_model_a_function_and_new_groups": "OF_TORCH",
    "runtime/test_structure_guard.py::test_a_guard_notices_what_may_change_about_a_tensor": "guard",
    "runtime/test_step_counts.py::test_a_narrow_count_counts_on_as_in_fp32": "copy_to_all",
    "trace/test_hostile.py::test_an_update_is_right":
        "without_modes exchange_all users inside DispatchMode schema storage_id",
    "trace/test_inner.py::test_an_optimizer_inside_a_compiled_one_cannot_be_used_by_itself": "step_pre_hooks",
    "trace/test_inner.py::test_steps_are_those_of_plain_torch": "let_have_hooks _HOOKS",
    "trace/test_inner.py::test_what_cannot_be_compiled_with_its_inner_one_is_rejected": "has_hooks",
    "trace/test_method_cache.py::test_what_changes_an_operation_is_seen":
        "dispatch_modes function_modes is_autocast_enabled",
    "trace/test_placeholders.py::test_memory_is_there_for_those_who_ask": "modes without_memory",
    "trace/test_traced_step.py::test_a_step_has_the_bits_of_a_recorded_one": "on_lists exchange_each",
    "trace/test_traced_step.py::test_numbers_of_all_parameters_in_one_tensor": "_KEEPS_OBJECTS references",
}  # fmt: skip
"""The test that fails when torch changes it, and the names of the folder that use it."""

OVERRIDDEN = {("collage_neuron.averaging", "_apply")}
"""What torch calls on a module of ours: overriding it is the only way to answer."""


def reaches_into_torch(module: Module) -> Iterator[str]:
    """Private names in a file that are not its own: attributes, imports, and names given to `getattr` and the like."""
    own = {node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)} | {"self", "cls"}
    for node in ast.walk(module.tree):
        for name in _names(node, own):
            private = name.startswith("_") and not name.startswith(("__", "_collage"))
            if private and name not in NOT_TORCHS and (module.name, name) not in OVERRIDDEN:
                yield f"{module.name}:{getattr(node, 'lineno', 0)} uses {name}"


def _names(node: ast.AST, own: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        base = ast.unparse(node.value)
        if base not in own and base not in ("aten", "torch.ops.aten"):  # operations, whose names users see too
            yield node.attr
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "torch_xla"):
        yield from (node.module or "").split(".")
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.Import):
        yield from (part for alias in node.names for part in alias.name.split("."))
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("getattr", "hasattr", "setattr", ".get")):
        given = (x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str))
        yield from given


@pytest.fixture(scope="module")
def ours() -> dict[str, Module]:
    return modules(ROOT)


def test_no_other_file_reaches_into_torch(ours: dict[str, Module]) -> None:
    others = [module for name, module in ours.items() if not name.startswith(PRIVATES) and "kernels_nki" not in name]
    assert [line for module in others for line in reaches_into_torch(module)] == []


@pytest.mark.parametrize(
    "line",
    [
        "x = t._version",
        "x = optimizer.step._wrapped_by_lr_sched",
        "from torch._compile import _disable_dynamo",
        "from torch.distributed._tensor import DTensor",
        "import torch._dynamo",
        "from torch_xla import _XLAC",
        "getattr(p, '_fsdp_flattened', False)",
        "vars(optimizer).get('_step_supports_amp_scaling')",
        "torch._C._autograd",
    ],
)
def test_reaching_into_torch_is_noticed(line: str) -> None:
    assert list(reaches_into_torch(Module("a", Path("a.py"), ast.parse(line), ())))


@pytest.mark.parametrize("line", ["self._x", "cls._x", "op._replace(a=1)", "aten._to_copy.default", "x.__wrapped__"])
def test_other_names_are_not(line: str) -> None:
    assert not list(reaches_into_torch(Module("a", Path("a.py"), ast.parse(line), ())))


def entries(ours: dict[str, Module]) -> Iterator[tuple[str, str]]:
    """Every public function and constant of the folder, with what is said of it."""
    for name, module in ours.items():
        if name.startswith(f"{PRIVATES}."):
            yield from _entries(module.tree)


def _entries(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, ast.get_docstring(node) or ""
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            said = after.value if isinstance(after, ast.Expr) else None
            if name != "_DDP":
                yield name, str(said.value) if isinstance(said, ast.Constant) else ""


def test_every_use_has_a_reason_and_a_test_that_is_there(ours: dict[str, Module]) -> None:
    said, noticed = dict(entries(ours)), {name for names in NOTICED_BY.values() for name in names.split()}
    assert noticed == said.keys()
    assert [name for name, reason in said.items() if len(reason) <= 30] == []
    for path, _, test in (place.partition("::") for place in NOTICED_BY):
        assert re.search(rf"^def {test}", (ROOT / "tests" / path).read_text(), re.M), f"there is no {path}::{test}"


def test_every_use_is_used(ours: dict[str, Module]) -> None:
    text = "".join(module.path.read_text() for name, module in ours.items() if not name.startswith(PRIVATES))
    own = "".join(module.path.read_text() for name, module in ours.items() if name.startswith(f"{PRIVATES}."))
    unused = [name for name, _ in entries(ours) if name not in text and own.count(name) < 2]
    assert unused == []
