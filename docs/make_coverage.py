"""Writes docs/coverage.md: which optimizers compile, with measured errors, which are refused; operations with a rule.

    python docs/make_coverage.py                    # some two minutes
    python docs/make_coverage.py --quick            # keeps the numbers that are there: for a new rule, or other words
    python docs/make_coverage.py --check            # measures anew and compares; writes nothing
    python docs/make_coverage.py --check --quick    # measures the cases of QUICK only

A check wants all but the measured numbers to be equal, and each of those to be within a factor of two. They come from
seeded streams, but machines differ in the last bit of a division or square root, which shifts what is left after a
thousand steps by a few per cent.
"""

from __future__ import annotations

import argparse
import difflib
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from oracles import one_thread
from package_cases import COVERED, MEANING, NOTES
from package_cases import REFUSED as REFUSED_OF
from torch_cases import CASES, FORMAT_RATIO, REFUSED, STRATEGIES, Case, parameter, run, weights

import collage_neuron
from collage_neuron.passes.rewrite.rules import RULES

PAGE = Path(__file__).parent / "coverage.md"
PINNED = PAGE.parent.parent / "pyproject.toml"
STEPS, ELEMENTS = 1000, 1024
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
    """The operations of each rule, in the order of passes/rewrite/rules.py, with its algebra."""
    targets: dict[Any, list[str]] = {}
    for target, rule in RULES.items():
        name = f"operator.{target.__name__}" if target is operator.getitem else str(target)
        targets.setdefault(rule, []).append(f"`{name}`")
    return table(("operation", "what it becomes"), ((", ".join(t), algebra(rule)) for rule, t in targets.items()))


def algebra(rule: Callable[..., Any]) -> str:
    """The first line of the rule's docstring."""
    if not rule.__doc__:
        raise ValueError(f"the rule {rule.__qualname__} has no docstring: its algebra, in one line")
    return rule.__doc__.splitlines()[0].replace("|", "\\|")


def packages() -> str:
    """For each published package what is rewritten, and what is not, by reason."""
    rows = (
        [f"`{name}` {version(name)}", _names(COVERED[name].split()), _by_reason(REFUSED_OF[name])] for name in COVERED
    )
    return table(("package", "rewritten", "refused"), rows)


def version(package: str) -> str:
    """The version that is tested: what the extra `test` asks for."""
    found = re.search(rf'"{package.replace("_", "-")}==([^"]+)"', PINNED.read_text())
    if found is None:
        raise ValueError(f"pyproject.toml does not say which version of {package} is tested")
    return found[1]


def counts() -> tuple[int, int]:
    """How many optimizers of packages are rewritten, and how many refused."""
    return sum(len(names.split()) for names in COVERED.values()), sum(map(len, REFUSED_OF.values()))


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
    """The class and its options, as one would write them."""
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
        runs = run(CASES[name], STEPS, (ELEMENTS,))
    errors, size = runs.errors(), memory(CASES[name])
    cells = [f"{errors[key]:.1e} ({size[key]:g})" for key in ("bf16", *STRATEGIES, "fp32")]
    states = ([name, f"`{state}`", *(f"{of[s]:.1e}" for s in STRATEGIES)] for state, of in runs.states.items())
    return [line([name, *cells, f"{errors['full'] / errors['fp32']:.1e}"]), *map(line, states)]


def memory(case: Case) -> dict[str, float]:
    """Bytes a parameter with its gradient, which is bf16; all is fp32 in torch's own fp32."""
    size = {}
    for strategy in ("bf16", *STRATEGIES):
        p = parameter(weights((4,)), torch.bfloat16)
        p.grad = torch.ones_like(p)
        optimizer = collage_neuron.compile(case.of(p), strategy=strategy)
        optimizer.step()  # some states are created in the first step
        size[strategy] = collage_neuron.bytes_per_parameter(optimizer)
    return size | {"fp32": 2 * size["bf16"]}


def as_written(name: str) -> Rows:
    """What the page says of a case."""
    rows = (text for text in PAGE.read_text().splitlines() if text.startswith(f"| {name} |"))
    return [row for row in rows if NUMBER.search(row)]


def page(rows_of: Callable[[str], Rows]) -> str:
    """The whole page; `rows_of` gives the rows of a case."""
    rows = {name: rows_of(name) for name, case in CASES.items() if case.measured}
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
        rewritten=counts()[0],
        not_rewritten=counts()[1],
        meaning=table(("reason", "what it is"), MEANING.items()),
        refused=table(("optimizer", "reason"), ([f"`{name}`", r.reason] for name, r in REFUSED.items())),
    )


ERRORS = ("case", "bf16", *(f"`{s}`" for s in STRATEGIES), "fp32", "`full` / fp32")
STATES = ("case", "state", *(f"`{s}`" for s in STRATEGIES))

TEXT = """\
# What is covered

Written by `docs/make_coverage.py` from the table of rules and from measurements; `tests/repository/test_coverage.py`
checks it.

## Will my optimizer compile?

Yes, if its `step()`

* does to each parameter, element by element, something made of the [operations below](#operations): no norm, no mean
  over rows, no matrix product. In-place forms, `out=` forms and `torch._foreach_*` are fine;
* keeps its tensors in `self.state[p]`, each under a name of its own and with the parameter's shape; numbers there, in
  the group, or in attributes of the optimizer;
* reads no tensor's value: no `.item()`, no `float(tensor)`, no `if tensor`. `torch.where` chooses by element; clip the
  norm of gradients (`torch.nn.utils.clip_grad_norm_`) and log outside `step()`;
* tells parameters apart by what their group says, by their shape or by their state;
* calls a closure once and first, or not at all.

A step count may choose among updates (a warm-up, every tenth step): each is looked at when it comes. A refusal says
which operation it was, on which line of your `step()`. To try yours:

```python
print(collage_neuron.explain(collage_neuron.compile(MyOptimizer([torch.nn.Parameter(torch.zeros(4, 3))]))))
```

## torch.optim

Every class that torch exports is in one of two lists. These are rewritten:

{cases}

So are these, whose errors are not measured, since an option asks for another way to run the same update or adds what
another row has: {tested}.

`differentiable=True` is refused for all. So are these:

{refused}

`light` does not help these: what fails is to record the update as an elementwise one, before any strategy applies.
Leave such an optimizer uncompiled, or use it for a group of its own.

## Published packages

As they are installed, unmodified, each made from a list of parameters alone, with its own defaults: {rewritten} are
rewritten and {not_rewritten} refused. Those rewritten are held to a bound that is derived operation by operation while
the optimizer itself runs in float64 (`tests/optimizers/test_packages.py`, `tests/support/bounds.py`).

{packages}

{meaning}

## Errors of the parameters

||theta - theta64|| / ||theta64 - theta0|| after {steps} steps, for {elements} parameters that start at N(0, 0.02), with
bf16 gradients (a mean of random sign under noise twice as large); theta64 is the same optimizer of torch run in float64
on the same gradients. `bf16` and `fp32` are torch's own optimizer on parameters of that dtype. In brackets: bytes a
parameter, with its gradient. Compiled ones use `arithmetic="fp32"`.

{errors}

The last column is what the format costs. Storing a value as a pair of bf16 numbers rounds it by at most 2**-17 of
itself, storing it as fp32 by 2**-24: a ratio of {ratio}, and of 2**7 * sqrt(4 / 7) = 97 in the root mean square over
random values. Where rounding the stores is all there is, the column shows that. It is smaller where fp32 loses by
other causes: torch multiplies the parameter by 1 - lr * weight_decay, which fp32 rounds, and the rewritten update does
not. It is larger for `Rprop`, whose step sizes come to rest at their minimum: the same increment is then added again
and again, and its rounding repeats instead of averaging out.

## Errors of the states

||s - s64|| / ||s64||, at the same time. One rounding to bf16 is at most 2**-8 (3.9e-03) of the value; where a state is
off by much more, it moved by less than half an ulp of bf16 a step, and stood still.

{states}

## Operations

{rules} rules for {overloads} operations. In-place forms, `out=` forms and `torch._foreach_*` become these when the
update is captured, and views that show the whole tensor disappear. An operation without a rule is an error that names
it and the node that uses it. With `arithmetic="bf16"` the result of a rule is rounded to bf16, or is a pair where it is
a state's.

{operations}
"""


def differences(old: str, new: str) -> list[str]:
    """What a check finds: lines that differ by more than their numbers, and numbers that differ by a factor of two."""
    before, after = ([NUMBER.sub("#", text) for text in side.splitlines()] for side in (old, new))
    found = list(difflib.unified_diff(before, after, "docs/coverage.md", "measured", n=0, lineterm=""))
    if found:
        return found
    return [
        f"{was}\n  was measured as\n{now}"
        for was, now in zip(old.splitlines(), new.splitlines(), strict=True)
        if not all(map(near, NUMBER.findall(was), NUMBER.findall(now)))
    ]


def near(a: str, b: str) -> bool:
    """Whether two numbers, as written, are within a factor of two."""
    x, y = float(a), float(b)
    return x == y or (x > 0 and 0.5 <= y / x <= 2)


def check(quick: bool) -> list[str]:
    """What is wrong with the page as it is."""
    return differences(PAGE.read_text(), page(sampled if quick else measure))


def sampled(name: str) -> Rows:
    """What is measured of the cases of QUICK, and what the page says of all others."""
    return measure(name) if name in QUICK else as_written(name)


def main() -> int:
    """Writes the page, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there, write nothing")
    parser.add_argument("--quick", action="store_true", help="measure next to nothing")
    arguments = parser.parse_args()
    if not arguments.check:
        PAGE.write_text(page(as_written if arguments.quick else measure))
        return 0
    found = check(arguments.quick)
    print("\n".join(found) or "docs/coverage.md is up to date")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
