"""Measures the source: lines, files, names, imports, comments, and how much of it a steady step passes.

A newcomer who follows a step with a debugger opens these files and functions, and makes these jumps::

    python benchmarks/code_size.py
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import torch
from own_modules import FOLDERS, longest_chain, modules

import collage_neuron

ROOT = Path(collage_neuron.__file__).resolve().parents[1]
PARAMETERS, WARM_UP = 4, 6


class Passed:
    """A profile function that notes which of our functions run, and which calls leave one file for another."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        """Between files."""
        self.functions: set[tuple[str, str]] = set()
        self._names: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        called = self._file(frame) if event == "call" else None
        if called is None:
            return
        self.functions.add((called, frame.f_code.co_qualname))
        caller = self._caller(frame)
        if caller and called != caller:
            self.calls[caller, called] += 1

    def _caller(self, frame: FrameType) -> str | None:
        """The nearest of our files above `frame`: torch's frames in between do not count as a place of their own."""
        above = frame.f_back
        while above is not None and self._file(above) is None:
            above = above.f_back
        return None if above is None else self._file(above)

    def _file(self, frame: FrameType) -> str | None:
        name = frame.f_code.co_filename
        if name not in self._names:
            path = Path(name)
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS
            self._names[name] = str(path.relative_to(ROOT)) if inside else None
        return self._names[name]


def steady_step(backend: str) -> Passed:
    """What one step of AdamW under `plus` passes over `PARAMETERS` parameters, all of them known to the compiler."""
    params = [torch.nn.Parameter(torch.randn(8, 8).bfloat16()) for _ in range(PARAMETERS)]
    optimizer = collage_neuron.compile(torch.optim.AdamW(params, lr=1e-3), strategy="plus", backend=backend)
    for p in params:
        p.grad = torch.randn_like(p)
    for _ in range(WARM_UP):
        optimizer.step()
    passed = Passed()
    sys.setprofile(passed)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return passed


def lines(files: Iterable[Path]) -> list[int]:
    """The lines of each file."""
    return [len(path.read_text().splitlines()) for path in files]


def comments(path: Path) -> int:
    """The comments of a file, without those for tools."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return sum(t.type == tokenize.COMMENT and not t.string.startswith(("# noqa", "# type:", "# fmt:")) for t in tokens)


def docstrings_of_names(path: Path) -> int:
    """The docstrings of constants, fields and attributes: they say what a comment would say there."""
    bodies = (getattr(node, "body", ()) for node in ast.walk(ast.parse(path.read_text())))
    below = chain.from_iterable(body[1:] for body in bodies if isinstance(body, list))
    return sum(isinstance(x, ast.Expr) and isinstance(getattr(x.value, "value", None), str) for x in below)


def rows() -> Iterator[tuple[str, object]]:
    """What is measured, and the number."""
    source = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    counts, tests = lines(source), sorted((ROOT / "tests").rglob("*.py"))
    yield "lines of source", sum(counts)
    yield "lines of tests", sum(lines(tests))
    yield "of these in tests/support", sum(lines(p for p in tests if "support" in p.parts))
    yield "files of source", len(source)
    yield (
        "lines of a file: median, 90 %, longest",
        f"{median(counts):.0f}, {quantiles(counts, n=10)[-1]:.0f}, {max(counts)}",
    )
    names = Counter(path.name for path in source if path.name != "__init__.py")
    yield "file names that occur more than once", sum(n > 1 for n in names.values())
    yield "longest chain of imports", len(longest_chain(modules(ROOT)))
    yield "comments per 100 lines of source", f"{100 * sum(map(comments, source)) / sum(counts):.1f}"
    yield "docstrings of names per 100 lines", f"{100 * sum(map(docstrings_of_names, source)) / sum(counts):.1f}"
    for backend in ("native", "reference"):
        passed = steady_step(backend)
        yield f"files that a steady AdamW step passes, {backend}", len({file for file, _ in passed.functions})
        yield f"functions that it passes, {backend}", len(passed.functions)
        named = [name for _, name in passed.functions if not name.endswith(">")]
        yield f"of these, no comprehension and no lambda, {backend}", len(named)
        yield f"calls between files, {backend}", passed.calls.total()
        apart = sum(n for (a, b), n in passed.calls.items() if a.split("/")[0] != b.split("/")[0])
        yield f"calls between collage_neuron/ and passes/, {backend}", apart


def main() -> None:
    """Prints the table."""
    for what, number in rows():
        print(f"{what:60}{number:>16}")


if __name__ == "__main__":
    main()
