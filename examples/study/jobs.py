"""Jobs: each is a part's `run` called with settings, in a process of its own; what it returns is kept as a JSON file.

A job that is there with the same settings, code and versions is not run again, so that a study that was interrupted
goes on where it stopped.
"""

import hashlib
import importlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TypeVar

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

J = TypeVar("J")


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
    page: Path | None = None
    """The records beside a page: they stand for those that the folder lacks, or that no longer stand there."""

    def read(self, path: Path, wanted: Record) -> Record | None:
        """The first record that has everything that is wanted: that of an earlier run at the path, or of the page."""
        file = self.folder / path
        found = [*([json.loads(file.read_text())] if file.exists() else []), *published(self.page)]
        needed = {key: value for key, value in wanted.items() if key != "code" or not self.any_code}
        return next((r for r in found if all(r.get(key) == value for key, value in needed.items())), None)

    def write(self, path: Path, record: Record) -> None:
        write_whole(self.folder / path, json.dumps(record) + "\n")


@cache
def published(path: Path | None) -> tuple[Record, ...]:
    """The records that a page was made of, which lie beside it."""
    return tuple(json.loads(path.read_text())) if path is not None and path.exists() else ()


def run_all(jobs: Iterable[Job], store: Store, pool: Executor, command: str) -> dict[str, Record]:
    """The record of each job, by name, in the order of the jobs; runs those that are not in the store."""
    jobs = list(jobs)
    found = {job.name: store.read(job.path, identity(job)) for job in jobs}
    missing = [job for job in jobs if found[job.name] is None]
    for job, record in as_done(run, missing, pool, f"{jobs[0].part:>14}" if jobs else ""):
        record["command"] = f"{command} --only {job.path.with_suffix('')}"
        store.write(job.path, record)
        found[job.name] = record
    return {name: record for name, record in found.items() if record is not None}


def as_done(run: Callable[[J], Record], jobs: Sequence[J], pool: Executor, title: str) -> Iterator[tuple[J, Record]]:
    """Jobs and their records as they are done, with a bar; what fails ends the study, and the rest is not begun."""
    if not jobs:
        return
    waiting = {pool.submit(run, job): job for job in jobs}
    with tqdm(as_completed(waiting), total=len(jobs), desc=title, unit="job", disable=None) as bar:
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
            record = store.read(job.path, identity(job))
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
    return digest((*SHARED, f"examples/study/{part}.py"))


def digest(patterns: Iterable[str], content: Callable[[Path], bytes] = Path.read_bytes) -> str:
    """A digest of files, or of what `content` takes from them."""
    made = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            made.update(path.name.encode() + b"\0" + content(path))
    return made.hexdigest()[:16]


def rounded(value: Any) -> Any:
    """The value with every float cut to seven digits: more would only make the files longer."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Writes a JSON list with one record per line."""
    write_whole(path, "[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        half.write_text(text)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
