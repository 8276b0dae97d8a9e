"""Every code block of README and docs/ either runs here, or is parsed, with the reason why it cannot run."""

from __future__ import annotations

import ast
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import run_script

ROOT = Path(__file__).parents[2]
PAGES = {str(p.relative_to(ROOT)): p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}

SCRIPT = """
import torch
from torch.nn.functional import cross_entropy
import collage_neuron
model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
optimizer = torch.optim.AdamW(model.parameters())
tokens, targets = torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)
"""

RUN = {
    **dict.fromkeys(("README.md", "docs/usage.md"), SCRIPT),
    **{
        f"docs/{page}.md": ""
        for page in ("as_written", "checkpoints", "development/formats", "development/validation", "extending", "fp8",
                     "migration", "monitor", "tutorial")
    },
}  # fmt: skip
"""Pages whose Python runs from top to bottom, and what stands before it: the reader's own script."""

NOT_RUN = (
    "model, optimizer = collage_neuron.compile(model, optimizer)\nmodel = ",
    "print(collage_neuron.explain(optimizer))",
)
"""How blocks of these pages begin that are parsed only: forms and calls to choose from."""

PARSED = {
    "docs/fine_tuning.md": "run in examples/trainers: tests/repository/test_finetuning.py, test_finetuning_xla.py",
    "docs/how_it_works.md": "lines of an explanation",
    "docs/integrations.md": "needs processes or trainers: tests/distributed/test_sharding.py, test_trainers.py",
    "docs/neuron_libraries.md": "needs Neuron's libraries: tests/distributed/test_neuron_libraries.py",
    "docs/optimizers.md": "needs the reader's optimizer",
    "docs/strategies.md": "a mapping to pass",
    "docs/trn1_all_cores.md": "needs devices: tests/distributed/test_optimizer_step.py, test_zero.py and test_spmd.py",
    "docs/troubleshooting.md": "a filter to pass",
}
"""Pages whose Python is parsed only, and why it does not run."""

KINDS = {"python", "bash", "yaml", ""}
"""Languages of blocks; without one it is something that was printed."""


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Language and text of each block of a page."""
    for language, text in re.findall(r"^ *```(\w*)\n(.*?)^ *```$", PAGES[page].read_text(), re.MULTILINE | re.DOTALL):
        yield language, textwrap.dedent(text)


def of_kind(language: str) -> dict[str, list[str]]:
    found = {page: [text for kind, text in blocks(page) if kind == language] for page in PAGES}
    return {page: texts for page, texts in found.items() if texts}


def test_every_page_with_python_runs_or_says_why_not() -> None:
    assert set(of_kind("python")) == RUN.keys() | PARSED.keys()
    assert not RUN.keys() & PARSED.keys()
    assert {kind for page in PAGES for kind, _ in blocks(page)} <= KINDS


@pytest.mark.parametrize("page", RUN)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """In a process of its own, without what is parsed only."""
    if page == "docs/checkpoints.md":
        pytest.importorskip("safetensors")
    texts = [text for text in of_kind("python")[page] if page != "docs/usage.md" or not text.startswith(NOT_RUN)]
    quiet = f"import os, warnings\nos.chdir({str(tmp_path)!r})\nwarnings.simplefilter('ignore')\n"
    printed = run_script(tmp_path, quiet + "\n".join([RUN[page], *texts]))
    if page == "docs/tutorial.md":
        assert [line for line in printed.splitlines() if "loss" in line] == losses_in(page)


def losses_in(page: str) -> list[str]:
    return [line for kind, text in blocks(page) if not kind for line in text.splitlines() if ": loss " in line]


def test_python_that_does_not_run_is_python() -> None:
    for texts in of_kind("python").values():
        for text in texts:
            ast.parse(text)


def test_shell_commands_and_settings_can_be_read() -> None:
    for texts in of_kind("bash").values():
        for text in texts:
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    yaml = pytest.importorskip("yaml")
    for texts in of_kind("yaml").values():
        for text in texts:
            assert yaml.safe_load(text)


LINKED = [*PAGES.values(), *(ROOT / f"{p}.md" for p in ("CONTRIBUTING", "CHANGELOG", "benchmarks/README",
                                                       "examples/README", "docker/README"))]  # fmt: skip


def test_links_inside_the_repository_lead_somewhere() -> None:
    """Also where mkdocs is not installed; `make docs` checks the site's."""
    for page in LINKED:
        for to in re.findall(r"\]\(([^)\s:]+)\)", FENCE.sub("", page.read_text())):
            path, _, anchor = to.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), (page, to)
            assert not anchor or anchor in anchors(target), (page, to)


FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).lower()).strip().replace(" ", "-")
        for head in heads
    }
