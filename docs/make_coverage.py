"""Writes docs/development/coverage.md: optimizers that compile, with errors; those that are rejected; operations.

    python docs/make_coverage.py                    # about two minutes
    python docs/make_coverage.py --quick            # keeps the measured numbers: for a new rule, or a new text
    python docs/make_coverage.py --check            # measures again and compares; writes nothing
    python docs/make_coverage.py --check --quick    # measures the cases of QUICK only

A check passes if everything but the measured numbers is equal, and each number is within a factor of two. The numbers
come from seeded streams, but machines differ in the last bit of a division or square root, which shifts errors after a
thousand steps by a few per cent.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent))  # tests import this file by its path

import measure_optimizers
import measure_packages
import torch
import torch_cases
from coverage_text import TEXT
from oracles import one_thread
from package_cases import COVERED, LAUNCHED, MEANING, NOTES, STAGED
from package_cases import REFUSED as REFUSED_OF
from package_cases import REJECTED as REJECTED_OF
from torch_cases import CASES, FORMAT_RATIO, REFUSED, Case, parameter, run, weights

import collage_neuron
from collage_neuron.numerics.reductions import ENDINGS, across
from collage_neuron.passes.rewrite.rules import RULES

PAGE = Path(__file__).parent / "development" / "coverage.md"
PINNED = Path(__file__).parents[1] / "pyproject.toml"
STEPS, ELEMENTS = 1000, 1024
STRATEGIES = (*torch_cases.STRATEGIES, "split433")
RATIOS = ("full", "split433")
"""Strategies whose errors are also shown as multiples of fp32's."""
QUICK = ("adagrad", "adamw", "sgd_momentum")

NUMBER = re.compile(r"\d\.\de[+-]\d\d")
"""How measured numbers are written, and nothing else on the page."""

Rows = list[str]
"""The lines of one case: its row of errors, then one for each state."""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    return "\n".join(line(row) for row in (head, ["---"] * len(head), *rows))


def line(row: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(row)} |"


def operations() -> str:
    """The operations of each rule, in the order of passes/rewrite/rules, with its algebra."""
    targets: dict[Any, list[str]] = {}
    for target, rule in RULES.items():
        name = f"{target.__name__} (of rows or columns)" if target in ENDINGS else str(target)
        name = "_c10d_functional.all_reduce.default (of a number)" if target is across else name
        targets.setdefault(rule, []).append(f"`{name}`")
    return table(("operation", "what it becomes"), ((", ".join(t), algebra(rule)) for rule, t in targets.items()))


def algebra(rule: Callable[..., Any]) -> str:
    """The first line of the rule's docstring."""
    if not rule.__doc__:
        raise ValueError(f"the rule {rule.__qualname__} has no docstring: its algebra, in one line")
    return rule.__doc__.splitlines()[0].replace("|", "\\|")


def packages() -> str:
    """The table of published packages: optimizers that are compiled, and the others by reason."""
    written = {of: {n: why for n, why in REFUSED_OF[of].items() if n not in REJECTED_OF[of]} for of in COVERED}
    compiled = {of: {*COVERED[of].split(), *LAUNCHED[of].split()} for of in COVERED}
    rows = (
        [
            f"`{of}` {version(of)}", _names(compiled[of] - STAGED[of]), _names(STAGED[of]),
            _by_reason(written[of]), _by_reason(REJECTED_OF[of]),
        ]
        for of in COVERED
    )  # fmt: skip
    head = ("package", "compiled", "compiled in stages", "as written, because of", "rejected")
    return table(head, rows)


def version(package: str) -> str:
    """The version that is tested: the one that the group `test` pins."""
    found = re.search(rf'"{package.replace("_", "-")}==([^"]+)"', PINNED.read_text())
    if found is None:
        raise ValueError(f"pyproject.toml does not say which version of {package} is tested")
    return found[1]


def further_packages() -> str:
    """The table of packages that are tried now and then, from the stored records."""
    rows = []
    for package, record in measure_packages.stored().items():
        by_way: dict[str, dict[str, str]] = {way: {} for way in measure_packages.WAYS}
        for name, one in record["optimizers"].items():
            by_way[one["runs"]][name] = measure_packages.short(one)
        compiled, written, *others = by_way.values()
        rows.append([f"`{package}` {record['version']}", *map(_names, (compiled, written)), *map(_by_reason, others)])
    head = ("package", *(f"{way}, because it" if i > 1 else way for i, way in enumerate(measure_packages.WAYS)))
    return table(head, rows)


def largest_difference() -> float:
    """By how much those that are compiled differ from plain fp32 at most, over the largest weight."""
    records = measure_packages.stored().values()
    return max(float(one.get("off", 0)) for record in records for one in record["optimizers"].values())


def counts() -> tuple[int, int, int]:
    """Number of optimizers of packages that are compiled, that run as written, and that are rejected."""
    refused, rejected = (sum(map(len, of.values())) for of in (REFUSED_OF, REJECTED_OF))
    return sum(len(names.split()) for of in (COVERED, LAUNCHED) for names in of.values()), refused - rejected, rejected


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`{f' ({NOTES[name]})' if name in NOTES else ''}" for name in sorted(names))


def _by_reason(refused: Mapping[str, str]) -> str:
    grouped: dict[str, list[str]] = {}
    for name, reason in refused.items():
        grouped.setdefault(reason, []).append(name)
    return "; ".join(f"{_short(reason)}: {_names(names)}" for reason, names in sorted(grouped.items()))


def _short(reason: str) -> str:
    return f"`{reason}`" if reason.startswith("aten.") else reason


def title(case: Case) -> str:
    """The class and its options as Python code."""
    options = ", ".join(f"{key}={shown(value)}" for key, value in case.options.items())
    return f"`{case.base.__name__}({options})`"


def shown(value: object) -> str:
    """The value of an option; a tensor as the number it holds."""
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))})"
    return f"tensor({value.item():g})" if isinstance(value, torch.Tensor) else str(value)


def measure(name: str) -> Rows:
    """Runs a case for STEPS steps."""
    with one_thread():
        runs = run(CASES[name], STEPS, (ELEMENTS,), STRATEGIES)
    errors, size = runs.errors(), memory(CASES[name])
    cells = [f"{errors[key]:.1e} ({size[key]:g})" for key in ("bf16", *STRATEGIES, "fp32")]
    states = ([name, f"`{state}`", *(f"{of[s]:.1e}" for s in STRATEGIES)] for state, of in runs.states.items())
    ratios = (f"{errors[strategy] / errors['fp32']:.1e}" for strategy in RATIOS)
    return [line([name, *cells, *ratios]), *map(line, states)]


def memory(case: Case) -> dict[str, float]:
    """Bytes per parameter by strategy, with a bf16 gradient; torch's own fp32 has fp32 gradients."""
    size = {}
    for strategy in ("bf16", *STRATEGIES):
        p = parameter(weights((4,)), torch.bfloat16)
        p.grad = torch.ones_like(p)
        optimizer = collage_neuron.compile(case.of(p), strategy=strategy)
        optimizer.step()  # some states are created in the first step
        size[strategy] = collage_neuron.bytes_per_parameter(optimizer)
    return size | {"fp32": 2 * size["bf16"]}


def as_written(name: str) -> Rows:
    """The rows of a case as they are on the page now."""
    rows = (text for text in PAGE.read_text().splitlines() if text.startswith(f"| {name} |"))
    return [row for row in rows if NUMBER.search(row)]


def page(rows_of: Callable[[str], Rows]) -> str:
    """The whole page; `rows_of` gives the rows of a case."""
    rows = {name: rows_of(name) for name, case in CASES.items() if case.measured}
    language = measure_optimizers.stored()
    return TEXT.format(
        operations=operations(),
        rules=len(set(RULES.values())),
        overloads=len(RULES),
        cases=table(("case", "optimizer"), ([name, title(CASES[name])] for name in rows)),
        tested=", ".join(title(case) for case in CASES.values() if not case.measured),
        steps=STEPS,
        elements=ELEMENTS,
        errors="\n".join([table(ERRORS, ()), *(own[0] for own in rows.values())]),
        states="\n".join([table(STATES, ()), *(state for own in rows.values() for state in own[1:])]),
        ratio=FORMAT_RATIO,
        packages=packages(),
        further=further_packages(),
        package_steps=measure_packages.STEPS,
        package_off=f"{largest_difference():.1e}",
        language=table(measure_optimizers.HEAD, measure_optimizers.rows(language)),
        right=sum(map(measure_optimizers.is_right, language.values())),
        of=len(language),
        language_steps=measure_optimizers.STEPS,
        near=measure_optimizers.NEAR,
        rewritten=counts()[0],
        written=counts()[1],
        rejected=counts()[2],
        meaning=table(("reason", "what it is"), MEANING.items()),
        staged=", ".join(f"`{name}`" for name in torch_cases.STAGED),
        refused=table(
            ("optimizer", "how it runs", "reason"),
            ([f"`{name}`", AS_WRITTEN if r.as_written else "rejected", r.reason] for name, r in REFUSED.items()),
        ),
    )


ERRORS = ("case", "bf16", *(f"`{s}`" for s in STRATEGIES), "fp32", *(f"`{s}` / fp32" for s in RATIOS))
AS_WRITTEN = "as written"
STATES = ("case", "state", *(f"`{s}`" for s in STRATEGIES))


def differences(old: str, new: str) -> list[str]:
    """Lines that differ in more than their numbers; if there are none, numbers that differ by a factor of two."""
    before, after = ([NUMBER.sub("#", text) for text in side.splitlines()] for side in (old, new))
    found = list(difflib.unified_diff(before, after, "docs/development/coverage.md", "measured", n=0, lineterm=""))
    if found:
        return found
    return [
        f"{was}\n  was measured as\n{now}"
        for was, now in zip(old.splitlines(), new.splitlines(), strict=True)
        if not all(map(near, NUMBER.findall(was), NUMBER.findall(now)))
    ]


def near(a: str, b: str) -> bool:
    """Returns True if two numbers, given as text, are within a factor of two."""
    x, y = float(a), float(b)
    return x == y or (x > 0 and 0.5 <= y / x <= 2)


def check(quick: bool) -> list[str]:
    """The differences between the page as it is and as it should be."""
    return differences(PAGE.read_text(), page(sampled if quick else measure))


def sampled(name: str) -> Rows:
    """Measures a case of QUICK; takes the rows of any other case from the page."""
    return measure(name) if name in QUICK else as_written(name)


def main() -> int:
    """Writes the page, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the existing page, write nothing")
    parser.add_argument("--quick", action="store_true", help="keep the measured numbers")
    arguments = parser.parse_args()
    if not arguments.check:
        PAGE.write_text(page(as_written if arguments.quick else measure))
        return 0
    found = check(arguments.quick)
    print("\n".join(found) or "docs/development/coverage.md is up to date")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
