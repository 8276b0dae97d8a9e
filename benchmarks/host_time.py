"""Times what one optimizer step costs on the host: AdamW over 148, 300 and 600 tensors, shrunk to almost nothing.

With tensors this small a step is all bookkeeping. `nothing` is a backend that takes launches and computes nothing, so
that only the host's part is left; 148 tensors are those of GPT-2 small. Checkouts are compared interleaved, each in
processes of its own, and the ratio is taken within a round, since a machine is not the same from one minute to the
next::

    python benchmarks/host_time.py
    python benchmarks/host_time.py --against ../older-checkout --rounds 9
    python benchmarks/host_time.py --cases nothing native --tensors 148 600
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from workloads import gpt2_small

HERE = Path(__file__).resolve()
WARM_UP, STEPS = 34, 29
"""Between steps 34 and 63 no step is validated: those are 1, 2, 4, 8, ... ."""
Params = list[torch.nn.Parameter]


class Counting(torch.optim.SGD):
    """A class with a sign of looking at positions (`enumerate`): each of its steps is compared with a joint step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for _, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


def _one_group(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def _decayed(params: Params) -> torch.optim.Optimizer:
    """Matrices decay and vectors do not, as usual: two groups, and two recordings."""
    groups = [[p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-3
    )


def _counting(params: Params) -> torch.optim.Optimizer:
    return Counting(params, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """An optimizer on a backend."""

    backend: str
    make: Callable[[Params], torch.optim.Optimizer] = _one_group


CASES = {
    "nothing": Case("nothing"),
    "decay": Case("nothing", _decayed),
    "aware": Case("nothing", _counting),
    "reference": Case("reference"),
    "native": Case("native"),
    "xla": Case("xla"),
}
"""By name, in the order in which they are printed."""


def register_nothing() -> None:
    """Registers the backend `nothing`."""
    from collage_neuron.passes.backends import protocol, registry

    class Nothing(protocol.Backend):
        name, devices = "nothing", ("cpu",)

        def run(self, launches: Sequence[protocol.Launch]) -> None:
            """Takes the launches."""

        def is_exact_on(self, device: torch.device) -> bool:
            return True

    registry.register(Nothing())


def shapes(count: int) -> Iterator[tuple[int, ...]]:
    """The shapes of `count` tensors, those of GPT-2 small again and again."""
    own = gpt2_small(1 / 192).shapes
    return (own[i % len(own)] for i in range(count))


def step_times(case: Case, count: int, strategy: str) -> list[float]:
    """Seconds of processor time of each measured step: others on the machine count less than in the time of a clock."""
    import collage_neuron  # that of the checkout in PYTHONPATH

    torch.set_num_threads(1)
    torch.manual_seed(0)
    register_nothing()
    params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes(count)]
    if case.backend == "xla":
        import torch_xla

        params = [torch.nn.Parameter(p.detach().to(torch_xla.device())) for p in params]
    checked = "off" if case.backend == "nothing" else "on"  # its results are those of no update
    optimizer = collage_neuron.compile(case.make(params), strategy=strategy, backend=case.backend, validate=checked)
    for p in params:
        p.grad = torch.randn_like(p)
    times = []
    for _ in range(WARM_UP + STEPS):
        start = process_time()
        optimizer.step()
        times.append(process_time() - start)
        if case.backend == "xla":
            torch_xla.sync()
    return times[WARM_UP:]


def measured(checkout: Path, case: str, count: int, strategy: str) -> float | None:
    """The median step of a new process with the package of `checkout`, in milliseconds; None if it cannot run."""
    command = [sys.executable, str(HERE), "--once", "--strategy", strategy, "--cases", case, "--tensors", str(count)]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    environment.setdefault("PJRT_DEVICE", "CPU")
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each checkout (default 3)")
    parser.add_argument("--strategy", default="plus")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tensors", nargs="+", type=int, default=[148, 300, 600])
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def slope(counts: Sequence[int], times: Sequence[float]) -> float:
    """Microseconds that a further tensor costs, by least squares."""
    x, y = sum(counts) / len(counts), sum(times) / len(times)
    squares = sum((n - x) ** 2 for n in counts)
    return 1e3 * sum((n - x) * (t - y) for n, t in zip(counts, times, strict=True)) / squares if squares else 0.0


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the median step of each case by the number of tensors, and the ratio to another checkout."""
    given = options(argv)
    if given.once:
        print(1e3 * median(step_times(CASES[given.cases[0]], given.tensors[0], given.strategy)))
        return
    checkouts = [HERE.parents[1], *([given.against.resolve()] if given.against else [])]
    print(f"{'':24}" + "".join(f"{n:>9}" for n in given.tensors) + "  tensors: ms a step; us a further tensor")
    for case in given.cases:
        rounds = [
            [[measured(checkout, case, n, given.strategy) for n in given.tensors] for checkout in checkouts]
            for _ in range(given.rounds)
        ]
        for i, checkout in enumerate(checkouts):
            columns = [
                [t for t in column if t is not None] for column in zip(*(times[i] for times in rounds), strict=True)
            ]
            if not all(columns):
                print(f"{case:10}{checkout.name[:13]:14}  cannot run here")
                continue
            times = list(map(median, columns))
            print(f"{case:10}{checkout.name[:13]:14}" + "".join(f"{t:9.2f}" for t in times)
                  + f"{slope(given.tensors, times):9.1f}")  # fmt: skip
        if given.against:
            ratios = [a / b for ours, theirs in rounds for a, b in zip(ours, theirs, strict=True) if a and b]
            print(f"{case:10}{median(ratios):.2f} is the median ratio" if ratios else f"{case:10}no ratio")


if __name__ == "__main__":
    main()
