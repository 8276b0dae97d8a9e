"""The kernels of kernel_examples.py and of kernels_nki/: they are up to date, and compute what the reference does.

With NKI_BACKEND=real the vendor's simulator runs them; it, like the stand-in, has an exact square root and reciprocal.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path

import kernel_examples
import kernel_tables
import pytest
import torch
from kernel_examples import FOLDERS, KERNELS, adamw_update, job
from kernel_files import FOLDER, HASHES, KEPT
from nki_runs import Step, differing, run, wild

from collage_neuron.numerics.eft import storage_named

HASHED = {name: digest for digest, name in map(str.split, (FOLDER / HASHES).read_text().splitlines())}
KERNELS_OF_FOLDERS = [(folder, name) for folder in FOLDERS for name in KERNELS]


@cache
def step(name: str) -> Step:
    """The update of a kernel on random components."""
    update = job(name).update
    named = {k: c.storage for n, f in update.formats.items() for k, c in zip(f.keys(n), f.components, strict=True)}
    empty = {key: torch.zeros(0, dtype=storage_named(named.get(key, "bf16")).dtype) for key in update.inputs}
    return wild(Step(update, empty, torch.zeros(0)), n=128 * 5 + 3)


@pytest.mark.sampled(of=3)
@pytest.mark.slow
@pytest.mark.parametrize(("folder", "name"), KERNELS_OF_FOLDERS)
def test_a_kernel_is_up_to_date_in_the_language_and_computes_what_the_reference_does(folder: str, name: str) -> None:
    target, dialect = FOLDERS[folder]
    kernel, s = kernel_examples.kernel(name, target).in_dialect(dialect), step(name)
    file = FOLDER / folder / f"{name}.py"
    kept = sha256(file.read_bytes()).hexdigest() if name in KEPT.get(folder, ()) else HASHED[f"{folder}/{name}.py"]
    assert kept == sha256(kernel.source.encode()).hexdigest()
    assert not differing(run(kernel, s.components, s.vector).results, s.by_reciprocals().expected())


def test_every_kernel_is_a_file_or_has_a_hash() -> None:
    kept = [f"{folder}/{name}.py" for folder in KEPT for name in KEPT[folder]]
    assert sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/[a-z]*.py")) == sorted(kept)
    assert sorted([*HASHED, *kept]) == sorted(f"{folder}/{name}.py" for folder, name in KERNELS_OF_FOLDERS)


def test_the_tables_are_those_in_the_documentation() -> None:
    """A strategy and two formats; a measured step; one of a model, and AWS's."""
    document = Path(__file__).parents[3] / "docs" / "kernels.md"
    rows = kernel_tables.table(adamw_update, ["split433"], ["trn1"]).splitlines()[2:]
    rows += kernel_tables.format_costs(["i8q4", "u16q8"], ["trn1"]).splitlines()[2:]
    rows += kernel_tables.monitored_costs(["plus"], ["trn1"]).splitlines()[2:]
    rows += kernel_tables.steps(["split433"], ["trn1"]).splitlines()[2:]
    assert len(rows) == 6
    assert set(rows) <= set(document.read_text().splitlines())


def test_the_summary_compares_with_fp32_as_the_readme_says() -> None:
    lines = [line.split() for line in kernel_tables.summary(["plus", "fp32", "split433"])]
    assert ["split433", "12", "172", "(vector,", "2.0)", "121", "(gpsimd,", "1.2)", "114", "(scalar,", "1.7)"] in lines
    assert ["split433:", "0.9", "to", "1.4", "times", "as", "long", "as", "fp32"] in lines
    assert ["plus:", "0.7", "to", "1.1", "times", "as", "long", "as", "fp32"] in lines
    assert "`split433` 0.9 to 1.4, `plus` 0.7 to 1.1" in (Path(__file__).parents[3] / "README.md").read_text()
