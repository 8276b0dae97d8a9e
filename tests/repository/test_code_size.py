"""How far a steady step travels through the code: files, functions, and calls between files."""

from pathlib import Path

from worlds import run_script

SCRIPT = """
import code_size
passed = code_size.steady_step("native")
calls, named = passed.calls, [name for _, name in passed.functions if not name.endswith(">")]
apart = sum(n for (a, b), n in calls.items() if a.split("/")[0] != b.split("/")[0])
print(apart, calls.total(), len({file for file, _ in passed.functions}), len(named))
"""
MOST = (8, 65, 16, 81)
"""Calls between collage_neuron/ and passes/, and between files; files; functions, but for comprehensions."""


def test_a_steady_step_stays_together(tmp_path: Path) -> None:
    found = tuple(map(int, run_script(tmp_path, SCRIPT).split()))
    assert all(0 < number <= most for number, most in zip(found, MOST, strict=True)), found
