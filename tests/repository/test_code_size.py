"""How far a steady step travels through the code: at most half of what it did before the layout had sub-packages."""

from pathlib import Path

from worlds import run_script

SCRIPT = """
import code_size
calls = code_size.steady_step("native").calls
print(sum(n for (a, b), n in calls.items() if a.split("/")[0] != b.split("/")[0]), calls.total())
"""
FIRST = (93, 446)
"""What was counted at first: calls between collage_neuron/ and passes/, and between files; on the reference alone."""


def test_a_steady_step_crosses_at_most_half_as_often_as_at_first(tmp_path: Path) -> None:
    found = map(int, run_script(tmp_path, SCRIPT).split())
    assert all(0 < number <= before // 2 for number, before in zip(found, FIRST, strict=True))
