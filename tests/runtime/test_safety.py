"""Files that others may have written are data: nothing that is installed unpickles or evaluates what they say."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from collage_neuron.passes.backends.nki import custom_op

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    p for folder in ("collage_neuron", "passes", "kernels_nki", "examples") for p in (ROOT / folder).rglob("*.py")
)

FORBIDDEN = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "joblib.load",
    "dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads", "yaml.load", "yaml.unsafe_load",
    "eval", "exec", "compile", "__import__", "os.system", "torch.jit.load", "numpy.load",
    "np.load", "pandas.read_pickle",
}  # fmt: skip
"""Calls that may run what a file says."""

LOADS = {"torch.load", "state_dict_loader.load", "dcp.load", "torch.hub.load"}
"""Calls that do so unless they are told not to."""


ALLOWED = {"passes/backends/nki/custom_op.py": {"exec", "compile"}}
"""A kernel runs from the text that this process generated, whatever lies in the folder; see the tests below."""


def name_of(node: ast.expr) -> str:
    """`a.b.c` for an attribute of a name."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe_calls(text: str) -> Iterator[str]:
    tree = ast.parse(text)
    aliases = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = name_of(node.func)
        called = aliases.get(called, called)
        safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
        if (called in FORBIDDEN and called not in own) or (called in LOADS and not safe):
            yield called


def test_nothing_in_the_package_unpickles_or_evaluates() -> None:
    found = {str(path.relative_to(ROOT)): set(unsafe_calls(path.read_text())) for path in SOURCES}
    assert {path: calls for path, calls in found.items() if calls} == ALLOWED


# --- the folder of generated kernels ----------------------------------------------------------------------------------


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(custom_op.FOLDER, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_a_file_that_somebody_changed_is_replaced_and_never_run(kernels: Path, tmp_path: Path) -> None:
    custom_op.load("kernel", "answer = 42\n")
    (path,) = kernels.iterdir()
    harm = tmp_path / "harm"
    path.write_text(f"open({str(harm)!r}, 'w')\nanswer = 41\n")
    assert custom_op.load("kernel", "answer = 42\n").answer == 42
    assert path.read_text() == "answer = 42\n"
    assert not harm.exists()


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_written_through(kernels: Path, tmp_path: Path) -> None:
    custom_op.load("kernel", "answer = 42\n")
    (path,) = kernels.iterdir()
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path.unlink()
    path.symlink_to(precious)
    assert custom_op.load("kernel", "answer = 42\n").answer == 42
    assert precious.read_text() == "mine"
    assert not path.is_symlink()


def test_a_new_folder_is_closed_to_others_whatever_the_umask(kernels: Path) -> None:
    before = os.umask(0)
    try:
        module = custom_op.load("kernel", "answer = 42\n")
    finally:
        os.umask(before)
    assert stat.S_IMODE(kernels.stat().st_mode) == 0o700
    (path,) = kernels.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert module.__file__ is None or Path(module.__file__) == path
