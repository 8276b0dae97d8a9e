"""Over eighty faults, planted in the source one at a time: a test notices each. `make mutants` runs them; CI does not.

A fault is a text of a file, what stands there instead, and the test that is to fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("collage_neuron", "passes", "kernels_nki")


class Fault(NamedTuple):
    """What is written in a file in the place of a text that occurs there, and the tests below `tests` to notice it."""

    file: str
    right: str
    wrong: str
    test: str


EFT, BLOCKS, FP32, PAPER = (
    "collage_neuron/numerics/eft.py", "collage_neuron/numerics/block_formats.py",
    "passes/rewrite/arithmetic.py", "passes/rewrite/bf16_arithmetic.py",
)  # fmt: skip
RULES, NATIVE, EMIT = (
    "passes/rewrite/rules/elementwise.py", "passes/backends/native/rules.py", "passes/backends/nki/emit.py",
)  # fmt: skip
WORDS, TOTALS = "passes/backends/nki/words.py", "passes/backends/nki/chunk_totals.py"
LEGALIZE = "passes/backends/nki/legalize.py"
TRACE, EAGER = "collage_neuron/trace", "collage_neuron/eager"
ALL_MAGNITUDES = "backends/nki/test_kernels.py::test_numbers_of_all_magnitudes[plus-fp32]"
CHANGED = "trace/test_method_cache.py::test_a_step_that_does_something_else_is_right"
UPDATES = "trace/test_hostile.py::test_an_update_is_right"
DRAWN = "eager/test_as_written.py::test_stochastic_rounding_is_reproducible_and_differs_between_values"
DECISION = "distributed/test_traced.py::test_all_processes_take_the_same_decision"
BODIES = "backends/nki/test_bodies.py::test_loops_over_several_parameters_have_the_bits_of_the_reference[2-2]"
UNROUNDED = "backends/nki/test_measures.py::test_what_is_measured_is_not_rounded_as_what_is_stored_is[nki]"
PAPERS = "numerics/test_paper.py::test_every_operation_has_the_bits_of_the_paper[plus-ordinary]"
EXACT_EFT = "numerics/test_eft.py::test_"
SHARING = "eager/test_rollback.py::test_"
LOADING = "checkpoint/test_loading_low_words.py::test_"
WEIGHTS = "runtime/test_written_weights.py::test_"
OPERATIONS = "backends/native/test_operations.py::test_an_operation_has_the_bits_of_the_reference"
CHANCES = "numerics/test_stochastic.py::test_"
DRAWS = "backends/nki/test_draws.py::test_"
SAME_IN_FP32 = "optimizers/test_torch_optim.py::test_in_fp32_it_is_the_same_optimizer[adamw]"
OF_BLOCKS, OF_RULES = "numerics/test_block_formats.py::test_", "passes/test_rules.py::test_golden_text"

FAULTS = [
    # numbers
    Fault(EFT, "z = bf16(capped(s) - a)", "z = bf16(a - capped(s))",
          EXACT_EFT + "fast_two_sum_is_exact_where_the_first_exponent_is_not_smaller[reference]"),
    Fault(EFT, "Expansion(s, bf16(da + db))", "Expansion(s, db)",
          EXACT_EFT + "two_sum_is_exact_for_all_significands_and_gaps[reference]"),
    Fault(EFT, "Expansion(p, bf16(exact - capped(p)))", "Expansion(p, bf16(capped(p) - exact))",
          EXACT_EFT + "two_prod_is_exact_for_all_significands"),
    Fault(EFT, "fast_two_sum(u, bf16(e.lo + v))", "fast_two_sum(u, e.lo + v)", PAPERS),
    Fault(EFT, "bf16(bf16(hi * c.lo) + bf16(e.lo * c.hi))", "bf16(hi * c.lo + e.lo * c.hi)", PAPERS),
    Fault(EFT, "(-most - _places(x))", "(1 - most - _places(x))",
          "numerics/test_split_words.py::"
          "test_every_number_of_the_grid_becomes_the_words_of_the_definition[bf16+int16-reference]"),
    Fault(EFT, "(x.view(torch.int32) + random) & -0x10000", "(x.view(torch.int32) | random) & -0x10000",
          CHANCES + "chances_are_exact[1.00390625]"),
    Fault("collage_neuron/numerics/threefry.py", "(13, 15, 26, 6, 17, 29, 16, 24)", "(13, 15, 26, 6, 17, 29, 24, 16)",
          CHANCES + "the_known_answers_of_random123[counter0-key0-expected0]"),
    Fault("collage_neuron/numerics/eft.py", "largest=240.0", "largest=448.0",
          "matmuls/test_rounding.py::test_to_nearest_even_and_saturating[cpu-e4m3]"),
    Fault("collage_neuron/numerics/eft.py", "x.round().clamp(*self.limits)", "x.round()",
          "numerics/test_storage.py::test_rounding_to_an_integer_is_to_nearest_even_and_saturates[int8]"),
    Fault("collage_neuron/numerics/reductions.py", "x.narrow(dim, 0, half) + x.narrow(dim, half, half)",
          "x[..., 0::2] + x[..., 1::2]",
          "numerics/test_sums.py::test_sums_of_64_runs_are_folded_with_those_of_the_second_half"),
    Fault(BLOCKS, "torch.where(code > self.most, self.most, code)", "code",
          OF_BLOCKS + "what_is_finite_is_stored_as_finite[i8q4]"),
    Fault(BLOCKS, "u * (high - low) < y - low", "u < self.code(y) - below",
          OF_BLOCKS + "chances_of_all_random_numbers[i8q4]"),
    # rules and passes
    Fault(FP32, "a.read(factor - 1)", "a.read(1 - factor)", SAME_IN_FP32),
    Fault(FP32, "self.delta + increment", "increment", SAME_IN_FP32),
    Fault(PAPER, "decay = self.settled.hi * a.read(factor - 1)", "decay = bf16(self.settled.hi * a.read(factor)) - "
          "self.settled.hi", PAPERS),
    Fault(PAPER, "bf16(bf16(v.hi - u.hi) + bf16(v.lo - u.lo))", "bf16(v.hi - u.hi)", OF_RULES + "[lerp_of_states]"),
    Fault(RULES, "times(a, y, value) / a.read(z)", "times(a, y, 1) / a.read(z)", OF_RULES + "[addcdiv]"),
    Fault(RULES, "a.read(y) + a.read(host - 1) * (a.read(y) - a.read(x))", "a.read(y)",
          "passes/test_far_factors.py::test_a_factor_far_from_one_is_a_product[towards a state-reference-fp32]"),
    Fault(RULES, "sub(a, y, x, alpha)", "sub(a, x, y, alpha)", OF_RULES + "[rsub]"),
    Fault("passes/rewrite/round_and_store.py", "self._calls += 1", "self._calls += 0",
          CHANCES + "the_graph_draws_what_the_generator_says"),
    Fault("passes/rewrite/instrument.py", "falling = wanted < old", "falling = wanted <= old",
          "monitoring/test_monitor.py::test_a_second_moment_that_stays_zero_is_not_falling"),
    Fault("passes/rewrite/instrument.py", "torch.logical_and(pushed, effective == 0.0)", "effective == 0.0",
          "monitoring/test_monitor.py::test_true_zero_updates_are_counted_apart_from_lost_ones"),
    Fault("passes/ir/verify.py", "if not is_rounded(value, storage_named(fmt), words):", "if False:",
          CHANCES + "a_store_without_its_rounding_is_an_error"),
    Fault("passes/analysis/state_roles.py", "return self.magnitudes | self.sums", "return self.sums",
          "passes/test_accumulators.py::test_a_state_is_recognised_however_it_is_written[maximum with decay]"),
    Fault("passes/analysis/state_roles.py", "self.reads_itself(n) and n not in self.odd", "self.reads_itself(n)",
          "passes/test_accumulators.py::test_a_state_is_recognised_however_it_is_written[centered]"),
    # backends
    Fault(NATIVE, "code.select(odd, 0x8000, 0x7FFF, INT)", "0x8000", OPERATIONS + "[beyond]"),
    Fault(NATIVE, 'operator.ge: _comparison("oge", "sge")', 'operator.ge: _comparison("ogt", "sgt")',
          OPERATIONS + "[ge]"),
    Fault(NATIVE, 'code.compare("fcmp one", FLOAT, x, 0.0)', 'code.compare("fcmp une", FLOAT, x, 0.0)',
          OPERATIONS + "[sign]"),
    Fault(NATIVE, 'shift_right: _of_kind("lshr", INT)', 'shift_right: _of_kind("ashr", INT)',
          OPERATIONS + "[shift_right]"),
    Fault("passes/backends/xla/lower.py", "values[x]]) if node.target is count", "values[x]]) if node.target is None",
          "passes/test_instrument.py::test_xla_adds_millions_of_equal_terms_within_the_bound"),
    Fault(LEGALIZE, "(op, same, value.dtype, value.block)", "(op, same, value.block)", UNROUNDED),
    Fault(LEGALIZE, "self.rounded.add(node)", "pass", UNROUNDED),
    Fault(LEGALIZE, "return self._rounded(args[0], storage_named(args[1]).nki, node.name)", "return args[0]",
          ALL_MAGNITUDES),
    Fault(LEGALIZE, "self.new(op, (x, y), dtype, name)", "self.new(op, (y, x), dtype, name)", ALL_MAGNITUDES),
    Fault("passes/backends/nki/tiling.py", "whole -= bool(whole and share % PARTITIONS == 1)", "whole -= 0",
          "backends/nki/test_loops.py::test_no_cut_into_two_lines_or_more_has_a_tile_of_one_line"),
    Fault(EMIT, 'tile(*d.rest, "PARTITIONS - 1")',
          'tile(*d.rest, "PARTITIONS - 2")',
          "backends/nki/test_loops.py::test_any_number_of_turns_and_any_remainder[1-nki-cut0]"),
    Fault(EMIT, '"base + tile * PARTITIONS"', '"base"', BODIES),
    Fault(EMIT, 'step={cut.tiles} * PARTITIONS', 'step=PARTITIONS', BODIES),
    Fault(EMIT, '"whole - over", "(whole - over) // BLOCK"', '"whole - over", "whole // BLOCK - 1"',
          "backends/nki/test_blocks.py::test_rows_of_every_length[i16q4-nki]"),
    Fault(EMIT, 'f"{MEASURES}.shape[0] - last * {totals}"', '"0"',
          "backends/nki/test_measures.py::test_every_element_is_counted_once_in_any_number_of_turns[0-nki]"),
    Fault(WORDS, 'new("greater", (View(x, half=0', 'new("less", (View(x, half=0',
          DRAWS + "of_all_random_numbers_as_many_round_up_as_the_distance_has_places[16256-4660-nki]"),
    Fault(WORDS, "[seed | 1 for seed in seeds]", "[seeds[0] | 1 for seed in seeds]",
          DRAWS + "each_step_parameter_shard_core_and_seed_has_a_seed_of_its_own"),
    Fault(WORDS, "return View(_tile(args[0], name), half=0)", "return View(_tile(args[0], name), half=1)",
          "backends/nki/test_integer_words.py::test_both_halves_of_a_number_that_is_read_elsewhere_too[trn1-nki]"),
    Fault(TOTALS, "torch.cat([a * a, 2.0 * (a * b), b * b], dim=-1)", "torch.cat([a * a, 2.0 * (a * b)], dim=-1)",
          "backends/nki/test_sums.py::test_sums_of_values[norm_to-shape6-matrix]"),
    Fault("passes/backends/nki/dialects.py", "src=seed[0:1, core : core + 1]", "src=seed[0:1, 0:1]",
          "backends/nki/test_two_cores.py::test_each_core_draws_with_a_seed_of_its_own"),
    # states, checkpoints, wrappers
    Fault("collage_neuron/checkpoint/fp32.py", "{id(x): read_fp32(p, state, k, record) for",
          "{id(x): x for",
          "checkpoint/test_checkpoints.py::test_weights_and_moments_that_fit_in_pairs_come_back_to_the_last_bit"),
    Fault("collage_neuron/checkpoint/fp32.py", "_check_model(own, model_state_dict)", "None",
          "checkpoint/test_checkpoints_files.py::test_a_plain_checkpoint_is_loaded_whole_or_not_at_all"),
    Fault("collage_neuron/states/format_record.py", "known.is_coded:", "known is None:",
          "checkpoint/test_format_record.py::test_what_keys_would_tell_wrong_is_saved"),
    Fault("collage_neuron/states/bookkeeping.py", "self.event != LOADED and self.mark != mark_of(p)", "False",
          WEIGHTS + "a_plain_checkpoint_leaves_no_low_words_to_weights_that_were_written_after_a_step"),
    Fault("collage_neuron/states/external_writes.py", "state_writes.drop_stale(optimizer)", "None",
          "runtime/test_states_written.py::test_what_is_written_is_what_is_read_within_half_an_ulp"),
    Fault("collage_neuron/runtime/process_agreement.py", "return found == 0", "return finite",
          "conversion/test_wrapping.py::test_a_nan_in_one_process_makes_all_skip_and_count[2-fsdp]"),
    Fault("collage_neuron/runtime/nonfinite.py", "torch.stack(ends).isfinite().all()",
          "torch.stack(ends[1:]).isfinite().all()", "runtime/test_faults.py::test_each_gradient_is_looked_at"),
    Fault("collage_neuron/runtime/nonfinite.py", "before + (~finite).to(torch.int32)", "before + 1",
          "runtime/test_faults.py::test_a_skipped_step_is_one_that_is_not_taken[adamw-plus-fp32-native-nan]"),
    Fault("collage_neuron/optimizer/load_checks.py", "if p not in kept:", "if False:",
          LOADING + "model_and_optimizer_may_be_loaded_in_either_order[True-split433-deepcopy]"),
    Fault("collage_neuron/conversion/aliased_memory.py", "and not moving.isdisjoint(_memory(x))", "and False",
          SHARING + "a_view_of_a_parameter_that_compile_moves_is_rejected[p.data]"),
    Fault(f"{EAGER}/rejections.py", '[*(("param", p) for p in params), *values]', "[*values]",
          SHARING + "so_are_those_of_a_class_whose_steps_are_recorded[a parameter]"),
    Fault("collage_neuron/states/bookkeeping.py", "shard.data_ptr() if type(shard) in ORDINARY else 0", "0",
          WEIGHTS + "what_is_written_before_the_first_step_is_where_training_begins[plus-True]"),
    Fault("collage_neuron/runtime/process_agreement.py", "same and bool(low[1] == high[1])", "same", DECISION),
    Fault("collage_neuron/runtime/process_agreement.py", "planned, same = int(high[0])", "planned, same = int(low[0])",
          DECISION),
    # what a step does: the calls that wait, and steps as written
    Fault(TRACE + "/structure_guard.py", "call.args == written and call.kwargs == named", "call.args == written",
          CHANGED + "[a name]"),
    Fault(TRACE + "/calls.py", "if len(kwargs) != self.named:", "if False:", CHANGED + "[a name beside a number]"),
    Fault(TRACE + "/calls.py", "memories[place] = memories[call.args[0]]", "memories[place] = place",
          UPDATES + "[sums_without_errors_of_its_own]"),
    Fault(TRACE + "/deferred_calls.py", "if not are_there and [*map(self._place, map(id, args))] != places:",
          "if False:", CHANGED + "[another tensor]"),
    Fault(TRACE + "/calls.py", "(x != 0.0 or math.copysign(1.0, x) > 0.0)", "True",
          UPDATES + "[made_of_another_zero_in_one_step]"),
    Fault(TRACE + "/calls.py", "return is_alike and all(_is_written(", "return is_alike and all(True or _is_written(",
          UPDATES + "[made_in_another_shape_in_one_step]"),
    Fault(TRACE + "/step_end.py", "kind.before == before and kind.left == left", "kind.before == before",
          UPDATES + "[a_state_is_one_of_two_results]"),
    Fault(TRACE + "/materialize.py", "method[1:] != operation[1:] or ", "",
          "trace/test_read_ahead.py::test_numbers_are_those_that_are_computed_when_asked_for[of_rows]"),
    Fault(TRACE + "/materialize.py", "if own > before:", "if False:",
          "trace/test_read_ahead.py::test_numbers_are_those_that_are_computed_when_asked_for[of_the_second_as_it_was]"),
    Fault(TRACE + "/partition.py", "and self._made[x] == self._written[self._ref(x).storage]", "",
          "trace/test_traced_step.py::test_a_number_that_a_step_makes_on_xla_has_what_was_written_to_it"),
    Fault(TRACE + "/partition.py", "Read(x, max(self._made[x], self._written[self._ref(x).storage]))",
          "Read(x, self._made[x])", UPDATES + "[a_sum_over_all]"),
    Fault(TRACE + "/partition.py", "!= lane for place in places)", "!= lane for place in ())",
          "optimizers/test_rows.py::test_a_number_that_two_parameters_share_is_rejected"),
    Fault(TRACE + "/escapes.py", "more = any(now[i] > then[i] for i in began.gradients)", "more = False",
          UPDATES + "[keeps_the_first_gradient]"),
    Fault("collage_neuron/states/low_words.py", "return _when(low, p) > _when(own, p)", "return False",
          "runtime/test_left_behind.py::test_a_parameter_keeps_its_value_whatever_becomes_of_lists_and_states"),
    Fault("collage_neuron/states/replaced_params.py", "id(old) not in there and id(new) not in before",
          "old is not new", "conversion/test_compile_model.py::"
          "test_parameters_of_one_shape_keep_their_low_words_where_the_list_is_edited_before_the_first_step"),
    Fault(EAGER + "/memory.py", "return self.lease() is None and _advised", "return _advised",
          "eager/test_memory_kept.py::test_the_memory_of_a_tensor_that_is_kept_is_not_used_again"),
    Fault(EAGER + "/commit.py", "number + k * len(self.presentation.groups))\n        self.stored",
          "number)\n        self.stored", DRAWN),
    Fault(EAGER + "/commit.py", "group[DRAWN] = group.get(DRAWN, 0) + 1", "group[DRAWN] = group.get(DRAWN, 0)", DRAWN),
    Fault(EAGER + "/rollback.py", "own.copy_(before)", "pass",
          "eager/test_rejected.py::test_a_step_that_raises_half_way_leaves_no_trace"),
    Fault(EAGER + "/rollback.py", "self._signs(x) != before", "False",
          "eager/test_rejected.py::test_what_cannot_be_undone_needs_a_checkpoint"),
    # what is said, measured, averaged, scaled
    Fault("collage_neuron/numerics/underflow.py", "(rate / rounding) ** 2 / 2", "(rate / rounding) / 2",
          "conversion/test_update_underflow.py::test_the_law_of_steps[4.0-bf16+int8]"),
    Fault("collage_neuron/conversion/budget.py", "if size <= budget", "if size < budget",
          "conversion/test_bytes.py::test_the_most_accurate_that_fits_is_taken"),
    Fault("collage_neuron/averaging.py", "1 / (n + 1)", "1 / n",
          "conversion/test_averaging.py::test_every_way_to_average_is_torchs_over_exact_values[mean-plus]"),
    Fault("collage_neuron/validation/validate.py", "(ours - theirs).abs() > bound",
          "(ours - theirs).abs() > 4 * bound + 1",
          "validation/test_validate.py::test_a_wrong_rule_is_found_and_nothing_is_written"),
    Fault("collage_neuron/validation/validate.py", "bool(self.taken.grad.isfinite().all())", "True",
          "validation/test_validate.py::test_steps_that_are_skipped_are_validated_as_such"),
    Fault("collage_neuron/monitoring/metrics.py", '_quotient(dot, self.sums["raw"])', "_quotient(dot, raw)",
          "monitoring/test_monitor.py::test_fp32_loses_nothing_and_its_high_word_what_bf16_would"),
    Fault("collage_neuron/matmuls/scales.py", "self.inverse[at] * drift", "self.inverse[at] / drift",
          "matmuls/test_changes.py::test_a_batch_of_another_shape_leaves_the_scales_of_inputs_alone"),
    Fault("passes/fp8_scaling/sizes.py", "Size(-x[0].log / 2, True)", "Size(x[0].log / 2, True)",
          "matmuls/test_rules.py::test_the_size_of_a_result[aten.rsqrt.default-]"),
]  # fmt: skip


RUNNER = """
import os, sys
import numpy, pytest, torch, torch._dynamo
from importlib.util import find_spec
if find_spec("torch_xla"):
    import torch_xla
for line in sys.stdin:
    tests = line.rstrip("\\n").split("\\t")
    if (child := os.fork()) == 0:
        with open("printed.txt", "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.path.insert(0, os.getcwd())
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not mutants", *tests]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs tests, line by line, in processes forked off one that has imported torch, and nothing of this project."""


class Planted(NamedTuple):
    """A copy of the source beside the tests, and what runs these."""

    place: Path
    runner: subprocess.Popen[str]

    def failed(self, tests: str) -> str:
        """What failing tests print; empty if they pass."""
        assert self.runner.stdin
        assert self.runner.stdout
        self.runner.stdin.write("\t".join(f"tests/{test}" for test in tests.split(", ")) + "\n")
        self.runner.stdin.flush()
        status, printed = int(self.runner.stdout.readline()), (self.place / "printed.txt").read_text()
        assert status in (0, 1), printed
        return printed[-3000:] if status else ""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    place = tmp_path_factory.mktemp("planted")
    for path in ROOT.iterdir():
        if path.name in SOURCES:
            shutil.copytree(path, place / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name not in (".git", "build"):
            (place / path.name).symlink_to(path)
    own = {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1", "WHOLE": ""}
    with subprocess.Popen(
        [sys.executable, "-c", RUNNER], cwd=place, env=os.environ | own, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as runner:  # fmt: skip
        yield Planted(place, runner)
        runner.kill()


NAMED = dict.fromkeys(test for fault in FAULTS for test in fault.test.split(", "))


@pytest.mark.mutants
@pytest.mark.parametrize("file", dict.fromkeys(test.partition("::")[0] for test in NAMED))
def test_the_tests_pass_without_a_fault(file: str, planted: Planted) -> None:
    assert not planted.failed(", ".join(test for test in NAMED if test.partition("::")[0] == file))


@pytest.mark.mutants
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.wrong}")
def test_a_fault_is_noticed(fault: Fault, planted: Planted) -> None:
    path = planted.place / fault.file
    text = path.read_text()
    assert fault.right in text, "the source has changed: plant the fault anew"
    path.write_text(text.replace(fault.right, fault.wrong, 1))
    try:
        assert planted.failed(fault.test)
    finally:
        path.write_text(text)


def test_there_are_as_many_as_said_each_in_one_place() -> None:
    assert len(FAULTS) >= 80
    root = Path(__file__).parents[2]
    assert [fault for fault in FAULTS if (root / fault.file).read_text().count(fault.right) != 1] == []
