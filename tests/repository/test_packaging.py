"""What is installed is what is in the three folders, under the names it is imported by."""

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "collage_neuron": "collage_neuron",
    "passes": "collage_neuron.passes",
    "kernels_nki": "collage_neuron.kernels_nki",
}
# A home, a work or a temporary folder of whoever built this. Where Neuron's own tools live is no secret.
MACHINE_PATH = re.compile(r"(?<![\w./~$}-])/(?:home|Users|root|work|workspace|mnt|tmp|opt)/(?!aws[/_])\w+")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git checkout: nothing says which files are tracked")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [file for file in files if file.is_file() and file.suffix not in {".png", ".svg"}]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel, built from a copy so that the checkout stays as it is."""
    pytest.importorskip("setuptools", minversion="77", reason="older setuptools cannot build this project")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                copy = source / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.read_bytes())
    command = f"-m pip wheel --no-deps --no-build-isolation --no-index --wheel-dir {out} {source}"
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built).namelist()


def test_the_version_is_said_once(wheel: list[str]) -> None:
    """In _version.py, from which the wheel's is read; the citation and the notes of the newest release follow."""
    code = (ROOT / "collage_neuron/_version.py").read_text()
    said = re.findall(r'^__version__ = "(.+)"', code, re.MULTILINE)
    cited = re.findall(r"^(?:version|date-released): (.+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    released = re.findall(r"^## \[(\d.*)\] - (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert said == cited[:1] == [released[0]]
    assert cited[1] == released[1]
    assert f"collage_neuron-{said[0]}.dist-info/METADATA" in wheel
    assert "version" not in project()["project"]


def test_wheel_holds_one_top_level_package(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"collage_neuron"}


def test_wheel_holds_every_module_and_the_typing_marker(wheel: list[str]) -> None:
    modules = {
        f"{FOLDERS[folder].replace('.', '/')}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
    }
    assert modules | {"collage_neuron/py.typed", "collage_neuron/kernels_nki/hashes.txt"} <= set(wheel)


def test_readme_names_make_targets_that_exist() -> None:
    named = set(re.findall(r"\bmake ([a-z]+)\b", (ROOT / "README.md").read_text()))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named & targets


def test_no_tracked_file_names_a_path_of_a_machine() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match.group()}"
        for file in tracked_files()
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        for match in MACHINE_PATH.finditer(line)
    ]
    assert not found, "\n".join(found)


def test_ci_runs_on_every_python_that_is_claimed() -> None:
    """The workflow is parsed here; it has not run on a runner."""
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["run"]
    named = [c.rpartition(" ")[2] for c in project()["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert job["strategy"]["matrix"]["python"] == named
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert "://" not in (ROOT / ".github/workflows/ci.yml").read_text()


def test_the_workflow_with_the_vendors_package_says_what_it_is() -> None:
    """It is parsed here; it has not run. The address of the index is the user's to set, and nowhere in the project."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github/workflows/nki_simulate.yml").read_text()
    (job,) = yaml.safe_load(text)["jobs"].values()
    run = "\n".join(step["run"] for step in job["steps"] if "run" in step)
    assert text.startswith("# Has not run")
    assert "://" not in text
    assert (job["env"]["NKI_BACKEND"], job["env"]["NEURON_INDEX"]) == ("real", "${{ vars.NEURON_INDEX }}")
    assert '--no-deps --index-url "$NEURON_INDEX"' in run  # with an extra index, pip may take the placeholder
    (tests,) = re.findall(r"pytest (\S+)", run)
    assert (ROOT / tests / "test_backend.py").is_file()
    (extras,) = re.findall(r"'\.\[(.*?)\]'", run)
    assert set(extras.split(",")) <= project()["project"]["optional-dependencies"].keys()
    (version,) = re.findall(r"default: nki>=([\d.]+)", text)
    assert f"package nki, {version} or newer" in (ROOT / "passes/backends/nki/target.py").read_text()


def test_the_extra_for_users_has_what_works_without_another_torch() -> None:
    extras = project()["project"]["optional-dependencies"]
    assert extras["all"] == ["collage_neuron[native,demo,report]"]
    assert not any("torch" in package for name in ("native", "demo", "report") for package in extras[name])


# --- without the extras ---------------------------------------------------------------------------------------------


def test_the_example_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "comparison", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r'pip install "\.\[demo\]"'):
        importlib.import_module("comparison")
