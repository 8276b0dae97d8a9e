"""Jobs: each is a part's `run` called with settings, in a process of its own; what it returns is kept as a JSON file.

A job that is there with the same settings, code and versions is not run again, so that a study that was interrupted
goes on where it stopped.
"""

import hashlib
import importlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from tqdm import tqdm

import collage_neuron

ROOT = Path(__file__).parents[2]
SHARED = (
    "collage_neuron/**/*.py",
    "passes/**/*.py",
    "examples/gpt.py",
    "examples/text_data.py",
    "examples/study/ensemble.py",
    "examples/study/language.py",
    "examples/study/reduced.py",
    "examples/study/sharpness.py",
    "examples/study/variants.py",
    "tests/support/oracles.py",
    "tests/support/released_adamw.py",
)
"""What any number may depend on, beside the part's own file."""

Record = dict[str, Any]
"""A job's settings, what they were run with, and its `result`."""

Results = dict[str, dict[str, Record]]
"""Records by part and job."""


@dataclass(frozen=True)
class Job:
    """`study.<part>.run(settings)`; settings and result are JSON. `name` is unique in its part."""

    part: str
    name: str
    settings: dict[str, Any] = field(hash=False)

    @property
    def path(self) -> Path:
        return Path(self.part) / f"{self.name.replace(' ', '_')}.json"


class MissingResult(LookupError):
    """A part needs the results of another that did not run."""


def needed(results: Mapping[str, Mapping[str, Record]], part: str, name: str) -> Record:
    """The record of a job that others are made from; MissingResult says what to run."""
    try:
        return results[part][name]
    except KeyError:
        raise MissingResult(
            f"this needs the results of {part}/{name}; run `python examples/study --only {part}` first"
        ) from None


def workers(processes: int) -> ProcessPoolExecutor:
    """So many processes, each of which computes on one thread: the tensors are small."""
    return ProcessPoolExecutor(processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))


@dataclass(frozen=True)
class Store:
    """The folder of the records; `any_code` takes records of the same job that other sources measured."""

    folder: Path
    any_code: bool = False

    def read(self, job: Job) -> Record | None:
        """The record of an earlier run, if it stands for this one."""
        return standing([in_file(self.folder / job.path)], identity(job), self.any_code)

    def write(self, job: Job, record: Record) -> None:
        write_whole(self.folder / job.path, json.dumps(record) + "\n")


def in_file(path: Path) -> Record | None:
    """The record in a file, if there is one."""
    record: Record | None = json.loads(path.read_text()) if path.exists() else None
    return record


def standing(found: Iterable[Record | None], wanted: Record, any_code: bool) -> Record | None:
    """The first record that has everything that is wanted; with `any_code`, whatever sources measured it."""
    needed = {key: value for key, value in wanted.items() if key != "code" or not any_code}
    there = (record for record in found if record is not None)
    return next((r for r in there if all(r.get(key) == value for key, value in needed.items())), None)


@cache
def published(path: Path | None) -> tuple[Record, ...]:
    """The records that a page was made of, which lie beside it."""
    return tuple(json.loads(path.read_text())) if path is not None and path.exists() else ()


def run_all(jobs: Iterable[Job], store: Store, pool: Executor, command: str) -> dict[str, Record]:
    """The record of each job, by name, in the order of the jobs; runs those that are not in the store."""
    jobs = list(jobs)
    found = {job.name: store.read(job) for job in jobs}
    missing = [job for job in jobs if found[job.name] is None]
    for job, record in _run_missing(missing, pool):
        record["command"] = f"{command} --only {job.path.with_suffix('')}"
        store.write(job, record)
        found[job.name] = record
    return {name: record for name, record in found.items() if record is not None}


def _run_missing(jobs: Sequence[Job], pool: Executor) -> Iterator[tuple[Job, Record]]:
    """Jobs and their records as they are done, with a bar; what fails ends the study, and the rest is not begun."""
    if not jobs:
        return
    waiting = {pool.submit(run, job): job for job in jobs}
    with tqdm(as_completed(waiting), total=len(jobs), desc=f"{jobs[0].part:>14}", unit="job") as bar:
        try:
            for done in bar:
                yield waiting[done], done.result()
        except BaseException:  # an interrupt too
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def already_run(jobs: Iterator[Job], store: Store) -> dict[str, Record]:
    """The records that are there, as far as the jobs can be told without running anything."""
    found = {}
    with suppress(MissingResult):
        for job in jobs:
            record = store.read(job)
            if record is not None:
                found[job.name] = record
    return found


def run(job: Job) -> Record:
    """Runs a job here; floats of its result keep seven digits."""
    began, cpu = perf_counter(), process_time()
    try:
        result = importlib.import_module(f"study.{job.part}").run(job.settings)
    except Exception as error:
        raise RuntimeError(f"the job {job.part}/{job.name} failed: {error}") from error
    times = {"seconds": perf_counter() - began, "cpu_seconds": process_time() - cpu}
    return {**identity(job), **rounded(times), "result": rounded(result)}


def identity(job: Job) -> Record:
    """What has to be equal for a result to be the same."""
    given: Record = json.loads(json.dumps(asdict(job)))  # as it will be read back: tuples are lists
    return {**given, "versions": versions(), "code": code(job.part)}


def versions() -> dict[str, str]:
    """What ran: other versions may round a matrix product, or choose a text, differently."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "collage_neuron": collage_neuron.__version__,
    }


@cache
def code(part: str) -> str:
    """A digest of the sources that a part's numbers depend on."""
    digest = hashlib.sha256()
    for pattern in (*SHARED, f"examples/study/{part}.py"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def rounded(value: Any) -> Any:
    """The value with every float cut to seven digits: more would only make the files longer."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        half.write_text(text)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
