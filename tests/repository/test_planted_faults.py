"""Over sixty faults, planted in the source one at a time: a test notices each. `make mutants` runs them; CI does not.

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

pytestmark = pytest.mark.mutants


class Fault(NamedTuple):
    """What is written in a file in the place of a text that occurs there, and the test (below `tests`) to notice it."""

    file: str
    right: str
    wrong: str
    test: str


EFT, BLOCKS, FLOATS, FP32, PAPER = (
    "collage_neuron/numerics/eft.py", "collage_neuron/numerics/block_formats.py",
    "collage_neuron/numerics/scaled_floats.py", "passes/rewrite/fp32_arithmetic.py",
    "passes/rewrite/bf16_arithmetic.py",
)  # fmt: skip
RULES, NATIVE, EMIT = (
    "passes/rewrite/rules/elementwise.py", "passes/backends/native/rules.py", "passes/backends/nki/emit.py",
)  # fmt: skip
WORDS, TOTALS = "passes/backends/nki/words.py", "passes/backends/nki/chunk_totals.py"
LEGALIZE = "passes/backends/nki/legalize.py"
ALL_MAGNITUDES = "backends/nki/test_kernels.py::test_numbers_of_all_magnitudes"
EXACT_EFT, PAPERS = "numerics/test_eft.py", "numerics/test_paper.py::test_every_component_has_the_bits_of_the_paper"
OF_BLOCKS, OF_RULES = "numerics/test_block_formats.py", "optimizers/test_torch_optim.py"

FAULTS = [
    # numbers
    Fault(EFT, "z = bf16(capped(s) - a)", "z = bf16(a - capped(s))", EXACT_EFT),
    Fault(EFT, "db = bf16(b - bb)", "db = b - bb", EXACT_EFT),
    Fault(EFT, "Expansion(p, bf16(exact - capped(p)))", "Expansion(p, bf16(capped(p) - exact))", EXACT_EFT),
    Fault(EFT, "fast_two_sum(u, bf16(e.lo + v))", "fast_two_sum(u, e.lo + v)", PAPERS),
    Fault(EFT, "bf16(bf16(hi * c.lo) + bf16(e.lo * c.hi))", "bf16(hi * c.lo + e.lo * c.hi)", PAPERS),
    Fault(EFT, "(-most - _places(x))", "(1 - most - _places(x))", "numerics/test_integer_words.py"),
    Fault(EFT, "(x.view(torch.int32) + random) & -0x10000", "(x.view(torch.int32) | random) & -0x10000",
          "numerics/test_stochastic.py"),
    Fault("collage_neuron/numerics/threefry.py", "(13, 15, 26, 6, 17, 29, 16, 24)", "(13, 15, 26, 6, 17, 29, 24, 16)",
          "numerics/test_stochastic.py"),
    Fault("collage_neuron/numerics/storage.py", "largest=240.0", "largest=448.0", "matmuls/test_rounding.py"),
    Fault("collage_neuron/numerics/storage.py", "x.round().clamp(*self.limits)", "x.round()",
          "numerics/test_storage.py"),
    Fault("collage_neuron/numerics/tensor_sums.py", "x[..., :half] + x[..., half:]", "x[..., 0::2] + x[..., 1::2]",
          "numerics/test_tensor_sums.py"),
    Fault(BLOCKS, "torch.where(code > self.most, self.most, code)", "code", OF_BLOCKS),
    Fault(BLOCKS, "u * (high - low) < y - low", "u * (high - low) <= y - low", OF_BLOCKS),
    Fault(FLOATS, "code < 8.0", "code <= 8.0", OF_BLOCKS),
    Fault(FLOATS, "(power + (power - power))", "power", OF_BLOCKS),
    # rules and passes
    Fault(FP32, "a.read(factor - 1)", "a.read(1 - factor)", OF_RULES),
    Fault(FP32, "self.delta + increment", "increment", OF_RULES),
    Fault(PAPER, "decay = self.settled.hi * a.read(factor - 1)", "decay = bf16(self.settled.hi * a.read(factor)) - "
          "self.settled.hi", PAPERS),
    Fault(PAPER, "bf16(bf16(v.hi - u.hi) + bf16(v.lo - u.lo))", "bf16(v.hi - u.hi)",
          "passes/test_function_rules.py passes/test_rules.py optimizers/test_handwritten.py"),
    Fault(RULES, "times(a, y, value) / a.read(z)", "times(a, y, 1) / a.read(z)", OF_RULES),
    Fault(RULES, "a.read(y) - a.read(1 - host) * (a.read(y) - a.read(x))", "a.read(y)", "passes/test_rules.py"),
    Fault(RULES, "sub(a, y, x, alpha)", "sub(a, x, y, alpha)", "passes/test_rules.py"),
    Fault("passes/rewrite/random_bits.py", "self._calls += 1", "self._calls += 0", "numerics/test_stochastic.py"),
    Fault("passes/rewrite/instrument.py", "falling = wanted < old", "falling = wanted <= old",
          "passes/test_instrument.py"),
    Fault("passes/rewrite/instrument.py", "torch.logical_and(pushed, effective == 0.0)", "effective == 0.0",
          "passes/test_instrument.py"),
    Fault("passes/ir/verify.py", "if not is_rounded(value, storage_named(fmt), words):", "if False:",
          "numerics/test_stochastic.py::test_a_store_without_its_rounding_is_an_error"),
    Fault("passes/analysis/accumulators.py", "self.magnitudes | self.sums | self.maxima", "self.magnitudes | self.sums",
          "passes/test_accumulators.py"),
    Fault("passes/analysis/accumulators.py", "self.parities[name] == 1", "self.parities[name] != 0",
          "passes/test_accumulators.py passes/test_slow_idioms.py"),
    # backends
    Fault(NATIVE, "code.select(odd, 0x8000, 0x7FFF, INT)", "0x8000", "backends/native/test_operations.py"),
    Fault(NATIVE, 'operator.ge: _comparison("oge", "sge")', 'operator.ge: _comparison("ogt", "sgt")',
          "backends/native/test_operations.py"),
    Fault(NATIVE, 'code.compare("fcmp one", FLOAT, x, 0.0)', 'code.compare("fcmp une", FLOAT, x, 0.0)',
          "backends/native/test_operations.py"),
    Fault(NATIVE, 'shift_right: _of_kind("lshr", INT)', 'shift_right: _of_kind("ashr", INT)',
          "backends/native/test_operations.py"),
    Fault("passes/backends/xla/lower.py", "values[x]]) if node.target is count", "values[x]]) if node.target is None",
          "passes/test_instrument_pass.py"),
    Fault(LEGALIZE, "if len(types) == 1 else", "if False else", ALL_MAGNITUDES),
    Fault(LEGALIZE, "self.rounded.add(node)", "pass", ALL_MAGNITUDES),
    Fault(LEGALIZE, "return self._rounded(args[0], storage_named(args[1]).nki, node.name)", "return args[0]",
          ALL_MAGNITUDES),
    Fault(LEGALIZE, "self.new(op, (x, y), dtype, name)", "self.new(op, (y, x), dtype, name)", ALL_MAGNITUDES),
    Fault("passes/backends/nki/tiling.py", "whole -= bool(whole and share % PARTITIONS == 1)", "whole -= 0",
          "backends/nki/test_loops.py"),
    Fault(EMIT, 'tile(*d.rest, "PARTITIONS - 1")',
          'tile(*d.rest, "PARTITIONS - 2")', "backends/nki/test_loops.py"),
    Fault(EMIT, '"base + tile * PARTITIONS"', '"base"', "backends/nki/test_bodies.py"),
    Fault(EMIT, 'step={cut.tiles} * PARTITIONS', 'step=PARTITIONS', "backends/nki/test_bodies.py"),
    Fault(EMIT, '"whole - over", "(whole - over) // BLOCK"', '"whole - over", "whole // BLOCK - 1"',
          "backends/nki/test_blocks.py"),
    Fault(EMIT, 'f"{MEASURES}.shape[0] - last * {totals}"', '"0"', "backends/nki/test_measures.py"),
    Fault(WORDS, 'new("greater", (View(x, half=0', 'new("less", (View(x, half=0', "backends/nki/test_draws.py"),
    Fault(WORDS, "[seed | 1 for seed in seeds]", "[seeds[0] | 1 for seed in seeds]", "backends/nki/test_draws.py"),
    Fault(WORDS, "return View(_tile(args[0], name), half=0)", "return View(_tile(args[0], name), half=1)",
          "backends/nki/test_integer_words.py"),
    Fault(TOTALS, "torch.cat([a * a, 2.0 * (a * b), b * b], dim=-1)", "torch.cat([a * a, 2.0 * (a * b)], dim=-1)",
          "backends/nki/test_sums.py"),
    Fault("passes/backends/nki/dialects.py", "src=seed[0:1, core : core + 1]", "src=seed[0:1, 0:1]",
          "backends/nki/test_two_cores.py backends/nki/test_draws.py"),
    # states, checkpoints, wrappers
    Fault("collage_neuron/checkpoint/fp32.py", "read_fp32(p, state, k, record) for k in own",
          "own[k] for k in own", "checkpoint/test_checkpoints.py"),
    Fault("collage_neuron/checkpoint/fp32.py", "_check_model(model.state_dict(), model_state_dict)", "None",
          "checkpoint/test_checkpoints_refused.py checkpoint/test_loading.py"),
    Fault("collage_neuron/states/format_record.py", "known.is_coded:", "known is None:",
          "checkpoint/test_format_record.py checkpoint/test_dcp.py"),
    Fault("collage_neuron/states/external_writes.py", "what != LOADED and mark != mark_of(p)", "False",
          "runtime/test_written_weights.py"),
    Fault("collage_neuron/states/external_writes.py", "_drop_stale_of_states(optimizer)", "None",
          "runtime/test_states_written.py"),
    Fault("collage_neuron/states/reduced_states.py", "if id(state[name]) in seen:", "if False:",
          "optimizers/test_one_number.py runtime/test_step_counts.py"),
    Fault("collage_neuron/runtime/nonfinite.py", "return found == 0", "return finite",
          "conversion/test_wrapping.py::test_a_nan_in_one_process_makes_all_skip_and_count"),
    Fault("collage_neuron/runtime/nonfinite.py", "torch.stack(ends).isfinite().all()",
          "torch.stack(ends[1:]).isfinite().all()", "runtime/test_faults.py"),
    Fault("collage_neuron/runtime/nonfinite.py", "before + (~finite).to(torch.int32)", "before + 1",
          "runtime/test_faults.py"),
    # what is said, measured, averaged, scaled
    Fault("collage_neuron/numerics/underflow.py", "(rate / rounding) ** 2 / 2", "(rate / rounding) / 2",
          "conversion/test_update_underflow.py"),
    Fault("collage_neuron/conversion/budget.py", "if size <= budget", "if size < budget", "conversion/test_bytes.py"),
    Fault("collage_neuron/averaging.py", "1 / (n + 1)", "1 / n", "conversion/test_averaging.py"),
    Fault("collage_neuron/validation/comparison.py", "(ours - theirs).abs() > bound",
          "(ours - theirs).abs() > 4 * bound + 1", "validation/test_validate.py"),
    Fault("collage_neuron/validation/comparison.py", "bool(self.taken.grad.isfinite().all())", "True",
          "validation/test_validate.py"),
    Fault("collage_neuron/monitoring/metrics.py", '_quotient(dot, self.sums["raw"])', "_quotient(dot, raw)",
          "monitoring/test_monitor.py"),
    Fault("collage_neuron/matmuls/scales.py", "self.inverse[at] * drift", "self.inverse[at] / drift",
          "matmuls/test_changes.py matmuls/test_hard_values.py"),
    Fault("passes/scaling/rules.py", "Size(-x[0].log / 2, True)", "Size(x[0].log / 2, True)", "matmuls/test_rules.py"),
]  # fmt: skip


RUNNER = """
import os, sys
import numpy, pytest, torch, torch._dynamo
from importlib.util import find_spec
if find_spec("torch_xla"):
    import torch_xla
for line in sys.stdin:
    tests = line.split()
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
        self.runner.stdin.write(" ".join(f"tests/{test}" for test in tests.split()) + "\n")
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


@pytest.mark.parametrize("tests", dict.fromkeys(fault.test for fault in FAULTS))
def test_the_tests_pass_without_a_fault(tests: str, planted: Planted) -> None:
    assert not planted.failed(tests)


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


def test_there_are_as_many_as_said() -> None:
    assert len(FAULTS) >= 60
