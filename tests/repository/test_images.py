"""Images and scripts for other machines, as far as this one can tell: linters, versions, what is said without them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from collage_neuron.passes.backends.nki import target

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def linter(name: str) -> str:
    """The linter beside this Python, or on the path; the `lint` extra installs both where they have wheels."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return found or pytest.skip(f"{name} is not installed")


LINTED = [("hadolint", f"docker/{p.name}") for p in sorted((ROOT / "docker").glob("Dockerfile*"))]
LINTED += [("shellcheck", s) for s in ("examples/trn1_pretrain.sh", ".ci/run") if (ROOT / s).exists()]


@pytest.mark.parametrize(("name", "path"), LINTED)
def test_linters(name: str, path: str) -> None:
    done = subprocess.run([linter(name), ROOT / path], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


def test_the_trn1_script_says_what_is_missing(tmp_path: Path) -> None:
    if list(Path("/dev").glob("neuron*")):
        pytest.skip("there is a Neuron device")
    env = {**os.environ, "OUT": str(tmp_path / "out")}
    done = subprocess.run([ROOT / "examples/trn1_pretrain.sh"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no /dev/neuron*: run it on a trn1 instance" in done.stderr
    assert not (tmp_path / "out").exists()


IMAGE = re.compile(r"(?P<torch>[\d.]+)-neuronx-py(?P<python>\d+)-sdk(?P<sdk>[\d.]+)-ubuntu[\d.]+")


def sdks() -> dict[str, dict[str, str]]:
    """The table of versions in docker/README.md, by SDK."""
    lines = (ROOT / "docker" / "README.md").read_text().splitlines()
    cells = [[c.strip(" `") for c in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head = next(i for i, row in enumerate(cells) if row[0] == "SDK")
    return {row[0]: dict(zip(cells[head], row, strict=True)) for row in cells[head + 2 :] if row[0][0].isdigit()}


def base() -> dict[str, str]:
    """What the tag of the base image says."""
    found = re.search(r"^ARG BASE=pytorch-training-neuronx:(\S+)$", _text("docker/Dockerfile.neuron"), re.MULTILINE)
    assert found
    tag = IMAGE.fullmatch(found[1])
    assert tag
    return {"tag": found[1], **tag.groupdict()}


def _text(path: str) -> str:
    return (ROOT / path).read_text()


def _project() -> dict[str, Any]:
    return tomllib.loads(_text("pyproject.toml"))["project"]  # type: ignore[no-any-return]


def test_rows_of_the_table_agree_with_their_images() -> None:
    """And one of them is the image."""
    found = base()
    assert sdks()[found["sdk"]]["training image"] == found["tag"]
    for sdk, row in sdks().items():
        if row["training image"] == "none":
            continue
        tag = IMAGE.fullmatch(row["training image"])
        assert tag
        assert (tag["sdk"], row["torch-neuronx"].startswith(f"{tag['torch']}.")) == (sdk, True)
        first, last = (int(version.split(".")[1]) for version in row["Python"].split(" to "))
        assert first <= int(tag["python"].removeprefix("3")) <= last


def test_the_extra_for_xla_is_the_torch_of_the_image_and_this_package_takes_its_python() -> None:
    torch, python = base()["torch"], base()["python"]
    assert _project()["optional-dependencies"]["xla"] == [f"torch=={torch}", f"torch_xla=={torch}"]
    version = f"{python[0]}.{python[1:]}"
    assert f"Programming Language :: Python :: {version}" in _project()["classifiers"]
    assert _project()["dependencies"] == ["torch>=2.9"]
    assert all(row["torch-neuronx"].startswith("2.9.") or row["torch-neuronx"] == "none" for row in sdks().values())


def _minor(sdk: str) -> str:
    return ".".join(sdk.split(".")[:2])


def test_who_has_which_dialect() -> None:
    older = [_minor(sdk) for sdk, row in sdks().items() if row["dialect"] == "beta1"]
    span = f"{older[0]} to {older[-1]}"
    assert f"neuronxcc.nki (SDK {span})" in _text("passes/backends/nki/target.py")
    for path in ("docs/kernels.md", "tests/support/nki_standin/dialect_beta1.py"):
        assert f"`neuronxcc.nki` (SDK {span}" in _text(path)
    first = next(row for row in sdks().values() if row["dialect"] == "nki")
    newer = f"package nki, {_minor(first['nki'])} or newer (Neuron SDK {_minor(first['SDK'])})"
    assert newer in _text("passes/backends/nki/target.py")
    assert f"`import nki` ({_minor(first['nki'])}, " in _text("docs/kernels.md")


def test_pages_name_the_sdk_of_the_image() -> None:
    found = base()
    assert f"pytorch-training-neuronx:{found['tag']}" in _text("docker/README.md")
    assert f"Neuron SDK {_minor(found['sdk'])} (torch {_minor(found['torch'])}" in _text("docs/trn1.md")
    assert f"Neuron SDK {_minor(found['sdk'])}," in _text("docker/Dockerfile.neuron")
    named = re.findall(r"supported up to SDK ([\d.]+\d)", _text("docs/trn1.md"))
    assert named == [_minor(next(sdk for sdk, row in reversed(sdks().items()) if row["dialect"] == "beta1"))]


@pytest.mark.parametrize("sdk", sdks())
def test_the_dialect_that_is_found_is_that_of_the_table(sdk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages with what the release notes say that they have: a simulator from 0.3 on, compiled loops from 0.6 on."""
    row = sdks()[sdk]
    has = tuple(int(n) for n in row["nki"].split("."))
    there = {"nki": ["jit", *["simulate"] * (has >= (0, 3))], "nki.language": ["fori_loop"] * (has >= (0, 6))}
    there |= {"neuronxcc.nki": ["jit"]}
    for name, members in there.items():
        module = ModuleType(name)
        vars(module).update(dict.fromkeys(members))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{row['nki']}+1.g0a" if name == "nki" else "")
    assert target.installed() == {"none": None}.get(row["dialect"], row["dialect"])
