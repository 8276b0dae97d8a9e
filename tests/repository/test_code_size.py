"""How far a steady step travels through the code: at most half of what it did before the layout had sub-packages."""

import re
from pathlib import Path

from worlds import run_script

FIRST = {"calls between collage_neuron/ and passes/, reference": 93, "calls between files, reference": 446}
"""What was counted at first."""


def test_a_steady_step_crosses_at_most_half_as_often_as_at_first(tmp_path: Path) -> None:
    printed = run_script(tmp_path, "import code_size\ncode_size.main()\n")
    for what, before in FIRST.items():
        found = re.search(rf"{re.escape(what)} +(\d+)", printed)
        assert found, printed
        assert int(found[1]) <= before // 2, printed
