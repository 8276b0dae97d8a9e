"""The benchmarks of step times: one small run of all their parts, and tables that are what the stored runs say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import choice
import pytest
import runs
import step_time
import tables
from built import build
from contenders import COPY, FUSED, Contender
from report import Spread
from workloads import one_tensor
from worlds import forking

from collage_neuron.numerics.strategies import BY_ACCURACY, DEFAULT, bytes_with_adam

ROOT = Path(__file__).parents[2]


def test_the_pages_have_the_stored_numbers() -> None:
    """If this fails: `python benchmarks/tables.py`."""
    for path, text in tables.pages().items():
        assert path.read_text() == text


def row(name: str, kept: float, ratio: float) -> dict[str, Any]:
    spread = vars(Spread(ratio, ratio, ratio))
    fixed = {"transient": 0.0, "traffic": 22.0, "rounds": 1, "bound": 1.0, "compile_seconds": 0.0, "compilations": 0}
    spreads = dict.fromkeys(("milliseconds", "to_fused", "kernel", "to_copy", "host"), spread)
    return {"name": name, "kept": kept, **fixed, **spreads}


def test_others_stand_beside_the_most_accurate_of_ours_that_is_neither_larger_nor_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = [("fp32, native", 16, 1.2), ("plus, native", 12, 0.9), ("light, native", 10, 0.8), ("bf16, native", 8, 0.5)]
    others = [("slow", 16, 3.0), ("torch AdamW bf16, fused", 8, 0.4), ("larger", 13.0, 0.95), ("small", 5, 9.0)]
    rows = [row(*r) for r in ours + others]
    block = {"workload": "w", "parameters": 9, "tensors": 1, "threads": 2, "rows": rows}
    monkeypatch.setattr(tables, "stored", lambda name: {"results": [block]})
    lines, why = tables.peers().splitlines(), tables.WHY_NOT["torch AdamW bf16, fused"]
    assert lines[0] == "One tensor, 2 threads:"
    assert lines[4:] == [
        "| slow | 16 | 3.00 | `fp32` | 16 | 1.20 |",
        f"| torch AdamW bf16, fused | 8 | 0.40 | none; nearest is `bf16` ({why}) | 8 | 0.50 |",
        "| larger | 13 | 0.95 | `plus` | 12 | 0.90 |",
        "| small | 5 | 9.00 | none is as small |  |  |",
    ]


def test_bytes_takes_what_the_decision_table_says() -> None:
    """The first row's word, or the second's where the first has none; here from the order that `compile` uses."""
    rows = [line.strip("| ").replace("`", "").split(" | ")[1:] for line in choice.table().splitlines()[2:]]
    for memory, always, large, _ in zip(choice.MEMORY, *rows, strict=True):
        first = next(name for name in BY_ACCURACY if bytes_with_adam(name) <= memory)
        assert first == (large if always == "none" else always), memory


def test_errors_and_bytes_are_those_of_the_page_about_accuracy() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text()
    for name, error in runs.accuracy("1e-6").items():
        assert re.search(rf"^\| `?{re.escape(name)}`? \|.* {re.escape(error)} \|", page, flags=re.MULTILINE), name
    kept = runs.bytes_kept()
    assert [kept[name] for name in ("torch fp32", "fp32", "split412", "FlashAdamW 8-bit")] == [16, 16, 9, 7]


@pytest.mark.parametrize(
    ("contender", "kept", "traffic"),
    [
        (COPY, 22, 22),
        (FUSED["fp32"], 16, 28),
        (Contender("torch", "bf16", "foreach"), 8, 14),
        (Contender("plus", "fp32", "reference"), 12, 22),
        (Contender("split433", "fp32", "reference"), 12, 22),
        (Contender("plus", "fp32", "reference", "SGD"), 8, 14),
        (Contender("light", "fp32", "reference", "Lion"), 8, 14),
    ],
    ids=lambda x: x.name if isinstance(x, Contender) else "",
)
def test_bytes_of_a_contender(contender: Contender, kept: int, traffic: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from collage_neuron.passes.backends import registry

    reference = registry.get("reference")
    monkeypatch.setattr(reference, "run", reference.run)  # put back: a benchmark's process watches its backend for good
    workload = one_tensor(256)
    built = build(contender, workload.shapes)
    built.prepare()
    built.launch()
    assert (built.kept, built.traffic) == (256 * kept, 256 * traffic)
    assert built.waits
    assert (built.kernel.seconds > 0) == contender.is_compiled


def test_one_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes of their own, a round, and the file that the tables are made of."""
    forking()
    size = ["--workload", "one", "--size", "1000", "--rounds", "2", "--threads", "1"]
    what = ["--only", f"^{DEFAULT}, reference", "--json", str(tmp_path / "run.json")]
    step_time.main([*size, *what])
    (block,) = runs.blocks(json.loads((tmp_path / "run.json").read_text()))
    assert block.title == "one tensor, 1 thread"
    assert [r.name for r in block.rows] == ["memory copy", "torch AdamW fp32, fused", f"{DEFAULT}, reference"]
    (own,) = [r for r in block.rows if r.name == f"{DEFAULT}, reference"]
    assert (own.kept, own.traffic, own.rounds) == (12, 22, 2)
    assert own.to_fused
    assert own.kernel
    assert 0 < own.kernel.median < own.to_fused.median
    assert f"{DEFAULT}, reference" in capsys.readouterr().out
