"""`python -m collage_neuron kernels`: lists and writes kernels of common optimizers; estimates what steps cost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from collage_neuron.cli import kernel_costs
from collage_neuron.cli.kernel_examples import FOLDERS, KERNELS, source
from collage_neuron.numerics.strategies import DEFAULT, STRATEGIES


def write_all(folder: Path) -> list[Path]:
    """Writes every kernel into a user's folder, one below it for each target; the paths of those that are new there."""
    return written((folder / target / f"{name}.py", source(target, name)) for target in FOLDERS for name in KERNELS)


def written(wanted: Iterable[tuple[Path, str]]) -> list[Path]:
    """Writes the files that are missing or out of date; their paths."""
    changed = [(p, text) for p, text in wanted if not p.exists() or p.read_text() != text]
    for path, text in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [path for path, _ in changed]


def overview() -> str:
    """The kernels by name, and what can be done with them."""
    rows = [(name, f"strategy {k.strategy}, {k.arithmetic} arithmetic") for name, k in KERNELS.items()]
    width = max(map(len, KERNELS))
    return "\n".join(
        [
            f"{len(KERNELS)} examples, each for {', '.join(FOLDERS)} (trn1_beta1 in the dialect of neuronxcc). Any",
            "other optimizer and strategy gets its kernel in its first step, so nothing here is needed to train.",
            "",
            *(f"  {name:<{width}}  {what}" for name, what in rows),
            "",
            "Nothing was written. --write FOLDER writes them, --costs estimates what steps take; --help has the rest.",
        ]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `kernels`."""
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--write",
        metavar="FOLDER",
        help="write every kernel, for each target, as files in FOLDER (takes about 15 seconds)",
    )
    instead.add_argument(
        "--costs",
        action="store_true",
        help="print the estimated time of a step of AdamW and its accuracy, by strategy (takes up to a minute)",
    )
    instead.add_argument(
        "--model",
        metavar="MODEL",
        help=f"print the estimated time of a step of AdamW on a model: {', '.join(kernel_costs.MODELS)}, or shapes "
        "such as 4096x4096,4096",
    )
    parser.add_argument(
        "--strategy", choices=list(STRATEGIES), metavar="NAME", help=f"with --model: that of AdamW (default: {DEFAULT})"
    )


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Lists or writes kernels, or prints what steps cost; returns the exit status."""
    if options.strategy and options.model is None:
        print("kernels: --strategy goes with --model", file=sys.stderr)
        return 2
    if options.write:
        return _wrote(options.write)
    try:
        for line in _said(options):
            print(line, flush=True)
    except ValueError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 2
    return 0


def _said(options: argparse.Namespace) -> Iterable[str]:
    if options.model is not None:
        return [kernel_costs.answer(options.model, options.strategy or DEFAULT)]
    return kernel_costs.summary() if options.costs else [overview()]


def _wrote(folder: str) -> int:
    try:
        _check_folder(Path(folder))
        paths = write_all(Path(folder))
    except OSError as error:
        print(f"kernels: {folder} is not a folder that can be written to ({error}); name another one", file=sys.stderr)
        return 2
    print(_of_folder(folder, len(paths)))
    return 0


def _check_folder(path: Path) -> None:
    """Raises NotADirectoryError if a file is in the way: before anything is generated, which takes a while."""
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise NotADirectoryError(f"{part} is a file")


def _of_folder(folder: str, new: int) -> str:
    """What was done in a user's folder."""
    total = len(FOLDERS) * len(KERNELS)
    if not new:
        return f"all {total} kernels in {folder} are up to date"
    count = f"{total}" if new == total else f"{new} of {total}"
    each = f"{len(KERNELS)} for each of {', '.join(FOLDERS)}"
    return f"wrote {count} kernels ({each}) to {folder}; each begins with its update as equations"
