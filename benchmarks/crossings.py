"""Counts how far a steady step travels through the code: calls from one of our files to another, and across folders.

A newcomer who follows a step with a debugger makes these jumps. `python benchmarks/crossings.py` prints them for AdamW
over 4 parameters, on the reference backend, after the first steps have recorded and rewritten everything.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import collage_neuron

ROOT = Path(collage_neuron.__file__).resolve().parents[1]
PARAMETERS, WARM_UP = 4, 4


class Crossings:
    """A profile function that counts calls which leave one of our files for another of them."""

    def __init__(self) -> None:
        self.files: Counter[tuple[str, str]] = Counter()
        self._ours: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or frame.f_back is None:
            return
        called, caller = self._file(frame), self._caller(frame)
        if called and caller and called != caller:
            self.files[caller, called] += 1

    def _caller(self, frame: FrameType) -> str | None:
        """The nearest of our files above `frame`: torch's frames in between do not count as a place of their own."""
        above = frame.f_back
        while above is not None and self._file(above) is None:
            above = above.f_back
        return None if above is None else self._file(above)

    def _file(self, frame: FrameType) -> str | None:
        name = frame.f_code.co_filename
        if name not in self._ours:
            path = Path(name)
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("collage_neuron", "passes")
            self._ours[name] = str(path.relative_to(ROOT)) if inside else None
        return self._ours[name]

    @property
    def folders(self) -> int:
        """Calls between the two top-level folders."""
        return sum(n for (a, b), n in self.files.items() if a.split("/")[0] != b.split("/")[0])


def steady_step() -> Crossings:
    """What one step of AdamW under `plus` crosses over `PARAMETERS` parameters, all of them known to the compiler."""
    params = [torch.nn.Parameter(torch.randn(8, 8).bfloat16()) for _ in range(PARAMETERS)]
    optimizer = collage_neuron.compile(torch.optim.AdamW(params, lr=1e-3), strategy="plus", backend="reference")
    for p in params:
        p.grad = torch.randn_like(p)
    for _ in range(WARM_UP):
        optimizer.step()
    crossings = Crossings()
    sys.setprofile(crossings)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return crossings


def main() -> None:
    """Prints the totals and the ten busiest pairs of files."""
    crossings = steady_step()
    print(f"steady step of AdamW, {PARAMETERS} parameters, reference backend")
    print(f"  calls between collage_neuron/ and passes/   {crossings.folders:6d}")
    print(f"  calls between files                         {crossings.files.total():6d}")
    for (caller, called), n in crossings.files.most_common(10):
        print(f"  {n:6d}  {caller} -> {called}")


if __name__ == "__main__":
    main()
