"""Runs a public suite of tests twice, as it is and with each optimizer compiled, and prints what became of its tests.

The folder is the suite's own, and is not changed; it is run from its parent (benchmarks/README.md)::

    PYTHONPATH=$PWD/../package python benchmarks/public_suites.py ../suite/tests

Of each test that passes in plain torch it says whether it passes when `benchmarks/compiles_each.py` compiles what it
constructs. A failure belongs to the first class whose pattern its message has; what has none is ours until it is known
better.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "benchmarks" / "compiles_each.py"

CLASSES: dict[str, tuple[str, str]] = {
    "sparse gradients": (r"is sparse \(", "rejected: docs/limits.md"),
    "second derivatives": (r"create_graph=True|differentiates again", "rejected: docs/limits.md"),
    "an optimizer inside two others": (
        r"is inside another optimizer",
        "rejected: the first one has its states",
    ),
    "a step inside a backward pass": (
        r"(?s)lomo.*fused_backward",
        "rejected: autograd adds to gradients while LOMO's method has their fp32 values",
    ),
    "a threshold of the loss": (
        r"(?s)(ApolloDQN|CAME|Ranger21|orthograd).*Loss did not decrease enough",
        "a model in bf16: with it plain torch, on fp32 master weights, fails there too",
    ),
}
"""Failures that are not ours: what messages have in common, and why they are none of ours."""
OURS = "ours, or not known yet"


class Ran(NamedTuple):
    """A test that was run."""

    file: str
    outcome: str
    """The message of a failure, "skipped", or nothing."""
    compiled: int
    """How many optimizers were compiled."""


def run(folder: Path, plugins: Sequence[str] = ()) -> dict[str, Ran]:
    """Runs the tests of a folder, by their names."""
    paths = [str(ROOT), str(PLUGIN.parent), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as made:
        xml = Path(made) / "ran.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(xml)]
        command += ["-W", "ignore", *(f"-p{plugin}" for plugin in plugins), folder.name]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run(command, cwd=folder.parent, env=environment, stdout=sys.stderr, check=False)
        return dict(read(xml))


def read(xml: Path) -> Iterator[tuple[str, Ran]]:
    """The tests in a file that `pytest --junitxml` wrote."""
    for case in ElementTree.parse(xml).iter("testcase"):
        failures = [x for kind in ("failure", "error") for x in case.iter(kind)]
        outcome = "".join(f"{x.get('message')}\n{x.text}" for x in failures)
        outcome = outcome or "skipped" * bool(list(case.iter("skipped")))
        names = (x.get("value", "") for x in case.iter("property") if x.get("name") == "compiled")
        file = case.get("classname", "").partition(".Test")[0]
        yield f"{case.get('classname')}::{case.get('name')}", Ran(file, outcome, len(" ".join(names).split()))


def class_of(failure: str) -> str:
    return next((name for name, (pattern, _) in CLASSES.items() if re.search(pattern, failure)), OURS)


def tables(plain: Mapping[str, Ran], compiled: Mapping[str, Ran]) -> Iterator[str]:
    """What became of the tests that pass in plain torch, by file; and of those that fail, by class."""
    passing = {name: compiled[name] for name, ran in plain.items() if not ran.outcome}
    others = Counter("skipped" if ran.outcome == "skipped" else "fail" for ran in plain.values() if ran.outcome)
    yield f"{len(plain)} tests; in plain torch {others['skipped']} are skipped and {others['fail']} fail.\n"
    yield "| file | pass in plain torch | an optimizer is compiled | pass | fail |\n| --- | --- | --- | --- | --- |"
    for file in (*dict.fromkeys(ran.file for ran in passing.values()), "all"):
        found = [ran for ran in passing.values() if file in (ran.file, "all")]
        failed = sum(bool(ran.outcome) for ran in found)
        counts = len(found), sum(bool(ran.compiled) for ran in found), len(found) - failed, failed
        yield f"| {file} | {' | '.join(map(str, counts))} |"
    yield "\n| failures | tests | why |\n| --- | --- | --- |"
    classes = {name: class_of(f"{name}\n{ran.outcome}") for name, ran in passing.items() if ran.outcome}
    failures = Counter(classes.values())
    for name in (*CLASSES, OURS):
        yield f"| {name} | {failures[name]} | {CLASSES.get(name, ('', ''))[1]} |"
    yield from (f"\n{name}:\n{passing[name].outcome}" for name, found in classes.items() if found == OURS)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the tests")
    folder: Path = parser.parse_args(argv).folder.resolve()
    print(*tables(run(folder), run(folder, [PLUGIN.stem])), sep="\n")


if __name__ == "__main__":
    main()
