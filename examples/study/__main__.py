"""`python examples/study`: run the study; `--help` says how."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
for folder in ("tests/support", "examples", "."):  # the oracles, the model and its text, the package
    sys.path.insert(0, str((ROOT / folder).resolve()))

if __name__ == "__main__":
    from study.command import main

    sys.exit(main())
