"""Nanoseconds a parameter that a step takes, by the number of parameters: flat, but for what fits the caches.

One tensor of each size; the contenders of a size are measured one after another, each with torch's fused fp32 AdamW
beside it, in processes of their own. The largest size needs about 7 GB::

    python benchmarks/growth.py
    python benchmarks/growth.py --sizes 100000 1000000 --only plus
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from contenders import FUSED, Contender, backends
from report import machine, save, settings_of
from worker import Worker
from workloads import one_tensor

from collage_neuron import STRATEGIES
from collage_neuron.numerics.strategies import DEFAULT

SIZES = (10**5, 10**6, 10**7, 10**8, 2 * 10**8)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=[DEFAULT])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    return parser.parse_args(argv)


def nanoseconds(contender: Contender, size: int, given: argparse.Namespace) -> float:
    """The median step of all processes, a parameter."""
    times = []
    for _ in range(given.processes):
        worker = Worker(contender, one_tensor(size).shapes)
        times += [worker.step().total for _ in range(given.rounds)]
        worker.close()
    return 1e9 * median(times) / size


def main(argv: Sequence[str] | None = None) -> None:
    given = options(argv)
    who = [FUSED["fp32"], *(Contender(s, "fp32", backends()[0]) for s in given.strategies)]
    names = [f"{c.name}, ns per parameter" for c in who]
    rows: list[tuple[int, dict[str, float]]] = []
    for size in given.sizes:
        rows.append((size, {name: nanoseconds(c, size, given) for name, c in zip(names, who, strict=True)}))
        print(f"{size:>13,}  " + "  ".join(f"{n} {t:.3f}" for n, t in rows[-1][1].items()), flush=True)
        if given.json:
            settings = settings_of(given)
            save(given.json, {"machine": machine(), "settings": settings, "names": names, "rows": rows})


if __name__ == "__main__":
    main()
