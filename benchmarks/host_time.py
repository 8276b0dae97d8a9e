"""Times what one optimizer step costs on the host: AdamW over 37 to 600 tensors, shrunk to almost nothing.

With tensors this small a step is all bookkeeping. `nothing` is a backend that takes launches and computes nothing, so
that only the host's part is left; 148 tensors are those of GPT-2 small. `groups` has 200 groups of one parameter, each
with another learning rate, and `torch groups` torch's own AdamW with the same. Steps that are traced or run as
written are those of traced_steps.py. Checkouts are compared interleaved, each in processes of its own, and the ratio is
taken within a round, since a machine is not the same from one minute to the next::

    python benchmarks/host_time.py                                      # the table in README.md: two minutes
    python benchmarks/host_time.py --against ../older-checkout --rounds 9
    python benchmarks/host_time.py --cases native xla --tensors 148 300
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import NamedTuple

import torch
from report import machine, save, settings_of
from workloads import gpt2_small

HERE = Path(__file__).resolve()
WARM_UP, STEPS = 34, 31
"""Between steps 34 and 63 no step is validated: those are 1, 2, 4, 8, ...; step 64 is."""
Params = list[torch.nn.Parameter]


def _one_group(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def _fused(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def _decayed(params: Params) -> torch.optim.Optimizer:
    """Matrices decay and vectors do not, as usual: two groups, and two recordings."""
    groups = [[p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-3
    )


def _clamp(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Writes all weights, as clipping them does: their low words are looked at before the next step."""
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.clamp_(-2, 2)


def _number(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Sets an integer of the group, which may decide what a step does, so that it is recorded anew."""
    optimizer.param_groups[0]["number"] = step


def _count_apart(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Gives each parameter a step count of its own, once."""
    if step == 1:
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            optimizer.state[p]["step"] += i


def _grouped(params: Params) -> torch.optim.Optimizer:
    """A group for each parameter, as where learning rates decay from layer to layer."""
    return torch.optim.AdamW([{"params": [p], "lr": 1e-3 * 0.99**i} for i, p in enumerate(params)], lr=1e-3)


@dataclass(frozen=True)
class Case:
    """An optimizer on a backend; torch's own without one."""

    backend: str | None
    make: Callable[[Params], torch.optim.Optimizer] = _one_group
    tensors: tuple[int, ...] = (37, 148, 300, 600)
    between: Callable[[torch.optim.Optimizer, int], None] | None = None
    """What runs before each step, and is not timed."""


CASES = {
    "nothing": Case("nothing"),
    "decay": Case("nothing", _decayed),
    "native": Case("native"),
    "torch": Case(None, _fused),
    "groups": Case("native", _grouped, (200,)),
    "torch groups": Case(None, _grouped, (200,)),
    "clamped": Case("native", tensors=(37, 148), between=_clamp),
    "numbered": Case("native", tensors=(37, 148), between=_number),
    "counts": Case("native", tensors=(200,), between=_count_apart),
    "reference": Case("reference"),
    "xla": Case("xla", tensors=(148, 300)),
}
"""By name, in the order in which they are printed."""

APART = ("decay", "reference", "xla")
SHOWN = tuple(name for name in CASES if name not in APART)
"""The cases without --cases."""


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
    """Milliseconds of processor time of each measured step: others on the machine count less than in wall time."""
    import collage_neuron  # that of the checkout in PYTHONPATH

    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes(count)]
    if case.backend == "xla":
        import torch_xla

        params = [torch.nn.Parameter(p.detach().to(torch_xla.device())) for p in params]
    checked = "off" if case.backend == "nothing" else "on"  # its results are those of no update
    optimizer = case.make(params)
    if case.backend is not None:
        collage_neuron.compile(optimizer, strategy=strategy, backend=case.backend, validate=checked)
    for p in params:
        p.grad = torch.randn_like(p)
    times = []
    for step in range(WARM_UP + STEPS):
        if case.between is not None:
            case.between(optimizer, step)
        start = process_time()
        optimizer.step()
        times.append(1e3 * (process_time() - start))
        if case.backend == "xla":
            torch_xla.sync()
    return times[WARM_UP:]


class Time(NamedTuple):
    """Milliseconds of the median step, and of the slowest, which is the one that is validated."""

    median: float
    worst: float


def once(case: Case, counts: Sequence[int], strategy: str) -> list[Time]:
    """The times by the number of tensors, in this process."""
    logging.getLogger("collage_neuron").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    register_nothing()
    return [Time(median(times), max(times)) for times in (step_times(case, n, strategy) for n in counts)]


def measured(checkout: Path, name: str, counts: Sequence[int], strategy: str) -> list[Time] | None:
    """The same of a new process with the package of `checkout`; None if it cannot run."""
    tensors = map(str, counts)
    command = [sys.executable, str(HERE), "--once", "--strategy", strategy, "--cases", name, "--tensors", *tensors]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    environment.setdefault("PJRT_DEVICE", "CPU")
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True)
    return [Time(*t) for t in json.loads(done.stdout)] if done.returncode == 0 else None


class Row(NamedTuple):
    """A case, by the number of tensors: the medians over rounds."""

    case: str
    checkout: str
    tensors: Sequence[int]
    times: list[Time]

    @property
    def slope(self) -> str:
        """Microseconds that a further tensor costs, if there are several numbers of tensors."""
        return f"{slope(self.tensors, [t.median for t in self.times]):.1f}" if len(self.tensors) > 1 else ""

    def __str__(self) -> str:
        found = "  ".join(f"{n}: {t.median:.2f} ({t.worst:.1f})" for n, t in zip(self.tensors, self.times, strict=True))
        return f"{self.case:14}{self.checkout:14}{found}  {self.slope}"


def middle(case: str, checkout: str, counts: Sequence[int], rounds: Sequence[Sequence[Time]]) -> Row:
    columns = zip(*rounds, strict=True)
    return Row(case, checkout, counts, [Time(*map(median, zip(*column, strict=True))) for column in columns])


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each checkout (default 3)")
    parser.add_argument("--strategy", default="plus")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(SHOWN))
    parser.add_argument("--tensors", nargs="+", type=int, help="(default: those of the case)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
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
        print(json.dumps(once(CASES[given.cases[0]], given.tensors, given.strategy)))
        return
    checkouts = [HERE.parents[1], *([given.against.resolve()] if given.against else [])]
    print("case          checkout      tensors: ms a step (the slowest); us a further tensor")
    rows = []
    for name in given.cases:
        counts = given.tensors or CASES[name].tensors
        rounds = [[measured(each, name, counts, given.strategy) for each in checkouts] for _ in range(given.rounds)]
        for checkout, own in zip(checkouts, zip(*rounds, strict=True), strict=True):
            if None in own:
                print(f"{name:14}{checkout.name[:13]:14}cannot run here")
                continue
            rows.append(middle(name, checkout.name[:13], counts, [times for times in own if times]))
            print(rows[-1], flush=True)
        if given.against:
            ratios = [a.median / b.median for x, y in rounds if x and y for a, b in zip(x, y, strict=True)]
            print(f"{name:14}{median(ratios):.2f} is the median ratio" if ratios else f"{name:14}no ratio")
    if given.json:
        settings = {**settings_of(given), "processes": given.rounds, "rounds": STEPS}
        save(given.json, {"machine": machine(), "settings": settings, "rows": [r._asdict() for r in rows]})


if __name__ == "__main__":
    main()
