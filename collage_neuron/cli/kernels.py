"""`python -m collage_neuron kernels`: lists, writes and checks kernels of common optimizers; estimates their cost."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch.optim import SGD, Adam

from collage_neuron import kernels_nki
from collage_neuron.api import compile
from collage_neuron.cli import kernel_costs, kernel_sizes
from collage_neuron.cli.kernel_optimizers import Entry, Lion, adamw
from collage_neuron.numerics.formats import BUILT_IN
from collage_neuron.numerics.strategies import DEFAULT, STRATEGIES
from collage_neuron.optimizer.compiled import base_of
from collage_neuron.passes.backends.nki.hardware import TARGETS
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.ir.printer import format_graph
from collage_neuron.passes.ir.update import Update
from collage_neuron.runtime import plan
from collage_neuron.trace import dry_run

FOLDER = Path(kernels_nki.__file__).parent

KERNELS: Mapping[str, Entry] = {
    "adamw_light": Entry(adamw, "light"),
    "adamw_plus": Entry(adamw, "plus"),
    "adamw_full": Entry(adamw, "full"),
    "adamw_split433": Entry(adamw, "split433"),
    "adamw_plus_bf16": Entry(adamw, "plus", "bf16"),
    "adam_plus": Entry(Adam, "plus"),
    "sgd_momentum_light": Entry(lambda ps: SGD(ps, lr=1e-2, momentum=0.9, weight_decay=1e-4), "light"),
    "lion_light": Entry(Lion, "light"),
}
"""By the name of the file and of its function."""

FOLDERS = {"trn1": ("trn1", "nki"), "trn1_beta1": ("trn1", "beta1"), "trn2": ("trn2", "nki"), "trn3": ("trn3", "nki")}
"""Folder -> target and dialect."""

KEPT: Mapping[str, Sequence[str]] = {
    "trn1_beta1": ("sgd_momentum_light",),
    "trn2": ("adamw_plus",),
}
"""Folder -> the kernels that are kept as files, to be read; of every other one the hash is kept in `HASHES`."""

HASHES = "hashes.txt"
"""A line for each kernel that is not kept: the SHA-256 of its source, and what its file would be called."""


@cache
def job(name: str) -> plan.Job:
    """The plan of the second step of an entry's optimizer: the captured and the rewritten update."""
    return _job(KERNELS[name])


def _job(entry: Entry, measured: bool = False) -> plan.Job:
    made = entry.make([_parameter()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of formats and settings, which are for those who train
        optimizer = compile(made, strategy=entry.strategy, arithmetic=entry.arithmetic, verbose=False)
        optimizer.step()
    base = base_of(type(optimizer))
    (found,) = plan.plan(base, optimizer, optimizer.param_groups[0], 0, dry_run.foreseen(base, optimizer), measured)
    return found


@cache
def kernel(name: str, target: str) -> Kernel:
    """The kernel of KERNELS called `name`, for a target, in the newer dialect."""
    optimizer = type(KERNELS[name].make([_parameter()])).__name__
    title = [
        f"{optimizer}, strategy {KERNELS[name].strategy}, {KERNELS[name].arithmetic} arithmetic: one step, fused.",
        "",
        "The update as it was captured; s0, s1, ... are numbers of the step:",
        "",
        *(f"  {line}" for line in format_graph(job(name).recording.captured.graph).splitlines()),
    ]
    return lower_to_nki(job(name).update, target, name=name, title="\n".join(title))


def _parameter() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16, device="cpu"))
    p.grad = torch.zeros_like(p)
    return p


def source(folder: str, name: str) -> str:
    """The text of a kernel, for the target and in the dialect of a folder."""
    target, dialect = FOLDERS[folder]
    return kernel(name, target).in_dialect(dialect).source


def files() -> Iterator[tuple[Path, str]]:
    """Every file that is kept: path and text."""
    for folder, names in KEPT.items():
        target, dialect = FOLDERS[folder]
        doc = f'"""Generated kernels for {target}, dialect {dialect}: see `python -m collage_neuron kernels`."""\n'
        yield FOLDER / folder / "__init__.py", doc
        yield from ((FOLDER / folder / f"{name}.py", source(folder, name)) for name in names)
    yield FOLDER / HASHES, "".join(f"{digest}  {name}\n" for name, digest in hashes().items())


def hashes() -> dict[str, str]:
    """The hash of every kernel that is not kept as a file, by what that would be called."""
    named = ((folder, name) for folder in FOLDERS for name in KERNELS if name not in KEPT.get(folder, ()))
    return {f"{folder}/{name}.py": sha256(source(folder, name).encode()).hexdigest() for folder, name in named}


def stale() -> list[str]:
    """What is wrong with the files: one line each."""
    wanted = dict(files())
    there = {path for folder in FOLDERS for path in (FOLDER / folder).glob("*.py")}
    lines = [f"{path}: not a kernel that is kept" for path in sorted(there - wanted.keys())]
    for path, text in wanted.items():
        if not path.exists():
            lines.append(f"{path}: missing")
        elif path.read_text() != text:
            lines += _stale_hashes(path) if path.name == HASHES else [f"{path}: out of date"]
    return lines


def _stale_hashes(path: Path) -> list[str]:
    """The kernels whose hashes in the file are not those of what is generated."""
    kept = {name: digest for digest, _, name in (line.partition("  ") for line in path.read_text().splitlines())}
    now = hashes()
    wrong = sorted(name for name in {**kept, **now} if kept.get(name) != now.get(name))
    return [f"{path}: {name}: out of date" for name in wrong] or [f"{path}: out of date"]


def write() -> list[Path]:
    """Writes the files that are missing or out of date; their paths."""
    return _written(files())


def write_all(folder: Path) -> list[Path]:
    """Writes every kernel into a user's folder, one below it for each target; the paths of those that are new there."""
    return _written((folder / target / f"{name}.py", source(target, name)) for target in FOLDERS for name in KERNELS)


def _written(wanted: Iterable[tuple[Path, str]]) -> list[Path]:
    changed = [(p, text) for p, text in wanted if not p.exists() or p.read_text() != text]
    for path, text in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [path for path, _ in changed]


def overview() -> str:
    """The kernels by name, and what can be done with them."""
    rows = [(name, f"strategy {k.strategy}, {k.arithmetic} arithmetic") for name, k in KERNELS.items()]
    return "\n".join(
        [
            f"{len(KERNELS)} examples, each for {', '.join(FOLDERS)} (trn1_beta1 in the dialect of neuronxcc). Any",
            "other optimizer and strategy gets its kernel in its first step, so nothing here is needed to train.",
            "",
            *(f"  {line}" for line in _aligned(rows)),
            "",
            "Nothing was written. --write FOLDER writes them, --costs estimates what steps take; --help has the rest.",
        ]
    )


def sizes(model: str, strategy: str = DEFAULT) -> str:
    """The instructions and lines of a step's kernel of AdamW for the parameters of a model, as a table."""
    shapes = kernel_sizes.shapes_of(model)
    answer = kernel_sizes.answer(model, strategy, _milliseconds(strategy, shapes), _milliseconds("fp32", shapes))
    found = kernel_sizes.rows([_of_strategy(strategy, t).in_dialect(d) for t, d in FOLDERS.values()], shapes)
    return f"{answer}\n\n{kernel_sizes.HEAD}\n" + "\n".join(_aligned([kernel_sizes.TITLES, *found], left=3))


def _milliseconds(strategy: str, shapes: kernel_sizes.Shapes) -> dict[str, float]:
    """The estimated time of AdamW's step on one core of each target, in the newer dialect."""
    targets = [target for target, dialect in FOLDERS.values() if dialect == "nki"]
    return {t: kernel_sizes.size_of(_of_strategy(strategy, t).in_dialect("nki"), shapes).time / 1e6 for t in targets}


def _of_strategy(strategy: str, target: str) -> Kernel:
    """AdamW's kernel under a strategy: one of `KERNELS`, or one that has no docstring of its own."""
    name = f"adamw_{strategy}"
    return kernel(name, target) if name in KERNELS else lower_to_nki(_adamw_update(strategy), target, name=name)


def costs(*which: Iterable[str]) -> str:
    """The costs of AdamW under each strategy, on each target, in Markdown; of those that are given.

    Without any, all tables (`COSTS`).
    """
    if which:
        return kernel_costs.table(_adamw_update, *which)
    return "\n\n".join(f"**{title}**\n\n{table()}" for title, table in COSTS.items())


STEPS = ("bf16", "plus", "split433", "fp32_states", "fp32")
"""The strategies whose whole step is estimated: all of 12 bytes a parameter, and the two of plain states."""


def steps(strategies: Iterable[str] = STEPS, targets: Iterable[str] = tuple(TARGETS)) -> str:
    """The time of a step of AdamW on a large model, in loops that the device runs, in Markdown."""
    rows = [kernel_sizes.step_row(s, _of_strategy(s, t)) for s in strategies for t in targets]
    return kernel_costs.markdown(kernel_sizes.STEP_TITLES, [*rows, kernel_sizes.measured_row()])


@cache
def _adamw_update(strategy: str) -> Update:
    return _job(Entry(adamw, strategy)).update


def monitored_costs(
    strategies: Iterable[str] = ("bf16", "plus", "split433", "split423"), targets: Iterable[str] = tuple(TARGETS)
) -> str:
    """The costs of a step of AdamW with the sums and counts of a monitor, in Markdown."""

    def update_of(strategy: str) -> Update:
        return _job(Entry(adamw, strategy), measured=True).update

    return kernel_costs.table(update_of, strategies, targets, title="measured step of")


def format_costs(formats: Iterable[str] = tuple(BUILT_IN), targets: Iterable[str] = tuple(TARGETS)) -> str:
    """The costs of SGD with momentum on each target, in Markdown: a bf16 parameter, and the momentum in each format."""

    def update_of(name: str) -> Update:
        return _job(Entry(lambda ps: SGD(ps, lr=1e-2, momentum=0.9), {"param": "bf16", "*": name})).update

    return kernel_costs.table(update_of, formats, targets, title="format of the momentum")


COSTS: Mapping[str, Callable[[], str]] = {
    "A step of a large model": steps,
    "AdamW by strategy": lambda: kernel_costs.table(_adamw_update),
    "SGD with its momentum in each format": format_costs,
    "A step that a monitor measures": monitored_costs,
    "Random bits": kernel_costs.table_of_draws,
}
"""By title what makes each table of docs/kernels.md. All are estimates by the cost model, none a measurement."""


def _aligned(rows: Iterable[tuple[str, ...]], left: int = 2) -> Iterator[str]:
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `kernels`."""
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--write",
        metavar="FOLDER",
        help="write every kernel, for each target, as files in FOLDER (takes about 15 seconds)",
    )
    instead.add_argument("--update", action="store_true", help="in a clone: bring kernels_nki/ up to date")
    instead.add_argument("--check", action="store_true", help="write nothing; say what is out of date there, and fail")
    instead.add_argument(
        "--costs",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the estimated time of a step of AdamW and its accuracy, by strategy (takes up to a minute); or "
        "put all tables, of formats and monitored steps too, into FILE, between the marks that docs/kernels.md has",
    )
    instead.add_argument(
        "--model",
        metavar="MODEL",
        help=f"print the estimated time of a step of AdamW on a model, and its kernel's instructions and lines: "
        f"{', '.join(kernel_sizes.MODELS)}, or shapes such as 4096x4096,4096",
    )
    parser.add_argument(
        "--strategy", choices=list(STRATEGIES), metavar="NAME", help=f"with --model: that of AdamW (default: {DEFAULT})"
    )


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Lists, writes or checks kernels, or prints sizes or costs; returns the exit status."""
    if options.strategy and options.model is None:
        print("kernels: --strategy goes with --model", file=sys.stderr)
        return 2
    if options.model is not None:
        return _sized(options.model, options.strategy or DEFAULT)
    if options.costs:
        if options.costs != "-" and not kernel_costs.has_marks(Path(options.costs)):
            print(
                f"kernels: --costs {options.costs}: there is no such file with the marks that docs/kernels.md has; "
                "without FILE the table is printed",
                file=sys.stderr,
            )
            return 2
        if options.costs == "-":
            for line in kernel_costs.summary(_adamw_update):
                print(line, flush=True)
        else:
            print(kernel_costs.put_into(Path(options.costs), costs()))
        return 0
    if options.write or options.update:
        return _wrote(options.write)
    lines = stale() if options.check else [overview()]
    print("\n".join(lines) or "all kernels are up to date")
    return 1 if options.check and lines else 0


def _wrote(folder: str | None) -> int:
    try:
        if folder:
            _check_folder(Path(folder))
        paths = write_all(Path(folder)) if folder else write()
    except OSError as error:
        said = f"kernels: {folder or FOLDER} is not a folder that can be written to ({error}); name another one"
        print(said, file=sys.stderr)
        return 2
    lines = _of_folder(folder, len(paths)) if folder else "\n".join(f"wrote {path}" for path in paths)
    print(lines or "all kernels are up to date")
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


def _sized(model: str, strategy: str) -> int:
    try:
        print(sizes(model, strategy))
    except ValueError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 2
    return 0
