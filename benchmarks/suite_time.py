"""Where the time of the tests goes, by folder, file and test.

It is read from the file that `make test` leaves::

make times
python benchmarks/suite_time.py build/tests.xml --lines 100
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree


class Ran(NamedTuple):
    """One example of a test."""

    file: str
    test: str
    seconds: float


KINDS: dict[str, Callable[[Ran], str]] = {
    "folder": lambda ran: ran.file.rpartition("/")[0],
    "file": lambda ran: ran.file,
    "test": lambda ran: f"{ran.file}::{ran.test}",
}
"""What seconds are summed by."""


def read(path: Path) -> Iterator[Ran]:
    """The examples in a file that `pytest --junitxml` wrote."""
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.get("classname", "").replace(".", "/")
        yield Ran(file, case.get("name", "").partition("[")[0], float(case.get("time", 0)))


def table(examples: Sequence[Ran], kind: str, lines: int) -> Iterator[str]:
    """The largest sums, and how many examples each is of."""
    seconds = defaultdict[str, float](float)
    for ran in examples:
        seconds[KINDS[kind](ran)] += ran.seconds
    counts = Counter(map(KINDS[kind], examples))
    largest = sorted(seconds.items(), key=itemgetter(1), reverse=True)[:lines]
    yield f"{'seconds':>9} {'examples':>9}  {kind}"
    yield from (f"{total:9.1f} {counts[name]:9}  {name}" for name, total in largest)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("xml", type=Path, help="what pytest --junitxml wrote")
    parser.add_argument("--lines", type=int, default=30)
    given = parser.parse_args(argv)
    examples = list(read(given.xml))
    print(f"{sum(ran.seconds for ran in examples):9.1f} {len(examples):9}  all, of all processes together")
    for kind in KINDS:
        print("", *table(examples, kind, given.lines), sep="\n")


if __name__ == "__main__":
    main()
