"""The HLO writer: its text, what XLA reads back from its bytes, and what XLA's optimiser leaves of the roundings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exact import on_xla, update_of
from worlds import run_script

from collage_neuron.numerics.eft import Value, round_to, split, two_sum
from collage_neuron.passes.backends.xla.lower import write_hlo
from collage_neuron.passes.ir.scalars import Scalar, ScalarProgram
from collage_neuron.passes.ir.update import Update

BF16, FP32 = torch.bfloat16, torch.float32


def _tiny() -> Update:
    """A bf16 component and an fp32 one, one scalar, a constant, a comparison; outputs of both dtypes."""

    def body(a: Value, x: Value, c: Value) -> list[Value]:
        hi, lo = split(x)
        larger = torch.where(a > hi, round_to(a * c, "bf16"), lo)
        return [larger, x + 0.5]

    update = update_of(("a", "x", "c0"), body, ("bf16", "fp32"))
    program = ScalarProgram([("fp32", Scalar("*", (3, 1)))])
    return Update.elementwise(update.graph.graph, ("a", "x"), update.outputs, program, {})


TINY = _tiny()


@pytest.mark.parametrize("dims", [(), (2, 3)])
def test_golden_text_of_a_tiny_update(dims: tuple[int, ...], golden: Callable[[str, str], None]) -> None:
    hlo, _ = write_hlo(TINY, dims, [BF16, FP32])
    golden(f"hlo_tiny_{len(dims)}d.txt", "\n".join(hlo.text))


def read_by_xla(update: Update, dims: tuple[int, ...], dtypes: list[torch.dtype]) -> str:
    xb = pytest.importorskip("torch_xla.core.xla_builder")
    _, module = write_hlo(update, dims, dtypes)
    text: str = xb.get_computation_hlo(xb.computation_from_module_proto("collage_update", module))
    return text


def opcodes(text: str) -> Counter[str]:
    """How often each opcode occurs in HLO text, ours or XLA's."""
    return Counter(re.findall(r"^ *(?:ROOT )?%\S+ = .*? ([a-z-]+)\(", text, re.MULTILINE))


@pytest.mark.parametrize("dims", [(), (1,), (2, 3)])
def test_xla_reads_back_what_was_written(dims: tuple[int, ...]) -> None:
    text = read_by_xla(TINY, dims, [BF16, FP32])
    hlo, _ = write_hlo(TINY, dims, [BF16, FP32])
    assert opcodes(text) == opcodes("\n".join(hlo.text))
    roundings = sum(n.target is round_to for n in TINY.graph.graph.nodes)
    assert text.count("exponent_bits=8, mantissa_bits=7") == opcodes(text)["reduce-precision"] == roundings
    assert "direction=GT" in text
    assert "slice={[0:1]}" in text
    assert "constant(0.5)" in text


# After XLA's optimiser ----------------------------------------------------------------------------------------------


def run_two_sum() -> None:
    on_xla(update_of(("a", "b"), two_sum), [torch.ones(5, dtype=BF16), torch.ones(5, dtype=BF16)])


def test_xla_optimises_a_two_sum_and_still_rounds_every_sum(tmp_path: Path) -> None:
    """A process of its own, since XLA reads where to write its modules when it starts."""
    pytest.importorskip("torch_xla")
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    run_script(tmp_path, Path(__file__).read_text(), environ={"XLA_FLAGS": flags})
    (optimised,) = tmp_path.glob("*cpu_after_optimizations.txt")
    instructions = re.findall(r"^ *(?:ROOT )?(%\S+) = .*? ([a-z-]+)\((.*)", optimised.read_text(), re.MULTILINE)
    sums = [name for name, opcode, _ in instructions if opcode in ("add", "subtract")]
    users = [opcode for name in sums for _, opcode, rest in instructions if re.search(rf"{re.escape(name)}\b", rest)]
    assert len(sums) >= 6  # a fusion may compute one again
    assert set(users) == {"reduce-precision"}


if __name__ == "__main__":
    run_two_sum()
