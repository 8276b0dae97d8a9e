"""Keeps kernels_nki/: a kernel as a file, to be read, and hashes of the others in `kernel_examples.py`.

python benchmarks/kernel_files.py            # writes what is missing or out of date
python benchmarks/kernel_files.py --check    # generates every kernel, says what is out of date, and fails
python benchmarks/kernel_files.py --all out  # writes every kernel, for each target, as files in the folder `out`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from kernel_examples import FOLDERS, KERNELS, source

from collage_neuron import kernels_nki

FOLDER = Path(kernels_nki.__file__).parent

KEPT: Mapping[str, Sequence[str]] = {"trn2": ("adamw_plus",)}
"""Folder -> the kernels that are kept as files, to be read; of every other one the hash is kept in `HASHES`."""

HASHES = "hashes.txt"
"""A line for each kernel that is not kept: the SHA-256 of its source, and what its file would be called."""


def files() -> Iterator[tuple[Path, str]]:
    """Every file that is kept: path and text."""
    for folder, names in KEPT.items():
        target, dialect = FOLDERS[folder]
        doc = f'"""Generated kernels for {target}, dialect {dialect}: see `benchmarks/kernel_files.py`."""\n'
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


def written(wanted: Iterable[tuple[Path, str]]) -> list[Path]:
    """Writes the files that are missing or out of date; their paths."""
    # A file that is up to date keeps its time.
    changed = [(p, text) for p, text in wanted if not p.exists() or p.read_text() != text]
    for path, text in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [path for path, _ in changed]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the files, or checks them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say what is out of date, and fail")
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write every kernel, for each target, into FOLDER")
    options = parser.parse_args(arguments)
    every = ((options.all / folder / f"{name}.py", source(folder, name)) for folder in FOLDERS for name in KERNELS)
    wanted = every if options.all else files()
    lines = stale() if options.check else [f"wrote {path}" for path in written(wanted)]
    print("\n".join(lines) or "all kernels are up to date")
    return int(options.check and bool(lines))


if __name__ == "__main__":
    sys.exit(main())
