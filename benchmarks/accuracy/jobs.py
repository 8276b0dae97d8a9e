"""Jobs: one contender on one condition, in a process of its own; the record of each is kept as a JSON file.

A job whose record has the same settings, code and versions is not run again, so an interrupted run can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from study.jobs import Record, Store, as_done, digest, rounded, versions
from torch import Tensor

from accuracy import contenders, language, peers
from accuracy.conditions import CONDITIONS, REPORTED, TUNING, Stream
from accuracy.contenders import Contender
from accuracy.exact import Exact, exact

HARNESS = (
    "benchmarks/accuracy/conditions.py",
    "benchmarks/accuracy/contenders.py",
    "benchmarks/accuracy/exact.py",
    "tests/support/oracles.py",
)
LANGUAGE = ("benchmarks/accuracy/language.py", "examples/gpt.py", "examples/text_data.py", "examples/study/ensemble.py")
PACKAGE = ("collage_neuron/**/*.py", "passes/**/*.py")
PEERS = ("benchmarks/accuracy/peers.py", "benchmarks/accuracy/flash_adamw.py")


@dataclass(frozen=True)
class Job:
    """One contender on one condition."""

    condition: str
    contender: str
    source: str
    steps: int
    seeds: tuple[int, ...]

    @property
    def path(self) -> Path:
        return Path(self.condition) / f"{self.contender.replace(' ', '_')}.json"


def there(jobs: Sequence[Job], store: Store) -> list[Record]:
    """The records of the jobs that need not be run."""
    return [record for job in jobs if (record := store.read(job.path, identity(job))) is not None]


def run_all(jobs: Sequence[Job], store: Store, pool: Executor) -> list[Record]:
    """The records of the jobs, in their order; runs those that are not in the store."""
    found = {job: store.read(job.path, identity(job)) for job in jobs}
    for job, done in as_done(run, [job for job, record in found.items() if record is None], pool, "accuracy"):
        found[job] = done
        store.write(job.path, done)
    return [record for record in found.values() if record is not None]


def run(job: Job) -> Record:
    """Runs a job here."""
    began = perf_counter()
    try:
        result = _losses(job) if job.condition == language.NAME else _errors(job)
    except Exception as error:
        raise RuntimeError(f"{job.contender} failed under {job.condition}: {type(error).__name__}: {error}") from error
    when = {"date": date.today().isoformat(), "version": versions()["collage_neuron"]}
    return {**identity(job), **when, **rounded({**result, "seconds": perf_counter() - began})}


def older(records: Sequence[Record]) -> list[Record]:
    """The records of jobs that ran with other sources than there are now."""
    return [r for r in records if r["code"] != code(r["source"], r["condition"])]


def _errors(job: Job) -> Record:
    outcome = contenders.run(named(job.contender), Stream(CONDITIONS[job.condition], job.seeds), job.steps)
    return {"errors": _reference(job, outcome.start).errors(outcome.theta), "bytes": outcome.bytes}


def _reference(job: Job, start: Tensor) -> Exact:
    """The float64 run from `start`: what a contender made of the weights before its first step is not its error."""
    stream = Stream(CONDITIONS[job.condition], job.seeds)
    if torch.equal(start.double(), stream.start.double()):
        return _exact(job.condition, job.seeds, job.steps)
    return exact(stream, job.steps, start)


def _losses(job: Job) -> Record:
    return {"losses": language.losses(named(job.contender), job.seeds, job.steps)}


@cache
def named(name: str) -> Contender:
    """The contender called `name`; imports other packages only if it is theirs."""
    own = {c.name: c for c in contenders.own()}
    return own[name] if name in own else {c.name: c for c in peers.found()[0]}[name]


@cache  # jobs are ordered by condition, so that each process computes the exact run of a condition once
def _exact(condition: str, seeds: tuple[int, ...], steps: int) -> Exact:
    return exact(Stream(CONDITIONS[condition], seeds), steps)


def identity(job: Job) -> Record:
    """What must be equal for a record to stand for a job."""
    settings: dict[str, Any] = {key: value for key, value in vars(job).items() if key != "seeds"}
    return {**settings, "seeds": list(job.seeds), "torch": versions()["torch"], "code": code(job.source, job.condition)}


@cache
def code(source: str, condition: str) -> str:
    """A digest of the files that the numbers of a contender from `source` depend on."""
    own = {"collage_neuron": PACKAGE, "torch": ()}
    text = LANGUAGE if condition == language.NAME else ()
    return digest((*HARNESS, *own.get(source, PEERS), *text))


def plan(quick: bool, tuning: bool, only: Sequence[str], what: Sequence[Contender]) -> Iterator[Job]:
    """The jobs of a run, by condition; the mixture is left out while formats are tuned."""
    seeds = TUNING if tuning else REPORTED
    for name, condition in CONDITIONS.items():
        if (only and name not in only) or (tuning and name == "mixture"):
            continue
        steps = max(condition.steps // 50, 20) if quick else condition.steps
        for contender in what:
            yield Job(name, contender.name, contender.source, steps, seeds)
    if not tuning and (not only or language.NAME in only):
        for contender in what:
            if contender.dtype in (None, torch.float32):  # the model has fp32 weights at the start
                steps = 10 if quick else language.STEPS
                yield Job(language.NAME, contender.name, contender.source, steps, language.SEEDS)
