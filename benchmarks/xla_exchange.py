"""Times what exchanging memory with torch_xla's CPU device takes on the host, for the words of AdamW under `plus`.

An update in place of XLA's tensors (`backend="xla_native"`) imports memory through DLPack once for each word: the call
of torch_xla that does it bounds the step from below. Beside it: all that the exchange takes (`Lender`), and a step of
torch's fused fp32 AdamW on CPU tensors of the same shapes, of which the table has the multiples. Processor time of one
thread, the least of several turns::

    python benchmarks/xla_exchange.py --json benchmarks/results/xla_exchange.json     # half a minute
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
from report import machine, save, settings_of
from workloads import Workload, gpt2_small, one_tensor

from collage_neuron.passes.backends.xla.cpu_device import Lender, lend

WORDS = 5
"""Of a parameter: itself, its low word, the first moment, and the second moment in two words."""


def shortest(run: Callable[[], object], turns: int) -> float:
    """Milliseconds of processor time."""
    found = []
    for _ in range(turns):
        start = process_time()
        result = run()  # what it returns is freed outside
        found.append(process_time() - start)
        del result
    return min(found) * 1e3


def measure(workload: Workload, turns: int) -> dict[str, Any]:
    """The times for the shapes of a workload, in milliseconds."""
    import torch_xla

    owns = [torch.zeros(shape, dtype=torch.bfloat16) for shape in workload.shapes for _ in range(WORDS)]
    tensors, lender = [own.to(torch_xla.device()) for own in owns], Lender()
    torch_xla.sync(wait=True)

    def exchange() -> None:
        lender.give(tensors, lender.take(tensors))

    exchange()  # memory of XLA's own is copied
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in workload.shapes]
    for p in params:
        p.grad = torch.zeros_like(p)
    fused = torch.optim.AdamW(params, fused=True)
    fused.step()
    return {
        "workload": workload.name,
        "tensors": len(workload.shapes),
        "imported": shortest(lambda: [lend(own) for own in owns], turns),
        "exchanged": shortest(exchange, turns),
        "fused": shortest(fused.step, turns),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [measure(workload, given.rounds) for workload in (one_tensor(1 << 24), gpt2_small(0.25))]
    for row in rows:
        print("  ".join(f"{k}: {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    if given.json:
        save(given.json, {"machine": machine(), "settings": settings_of(given) | {"processes": "1"}, "rows": rows})


if __name__ == "__main__":
    main()
