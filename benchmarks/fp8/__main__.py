"""`python benchmarks/fp8`: train with matmuls in bf16 and fp8, and compare validation losses; `--help` says how."""

import os
import sys
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")  # torch_xla asks for this line where there is no accelerator
ROOT = Path(__file__).parents[2]
for folder in ("tests/support", "examples", "benchmarks", "."):  # the oracle, the study's records, this, the package
    sys.path.insert(0, str((ROOT / folder).resolve()))

if __name__ == "__main__":
    from fp8.command import main

    sys.exit(main())
