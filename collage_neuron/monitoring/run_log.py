"""Reads the logs of training runs: JSON lines that describe the run, and one line per measured step."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from collage_neuron.errors import LogError

Line = dict[str, Any]


@dataclass(frozen=True)
class Log:
    """One run: its description, and its measured steps in order."""

    name: str
    path: Path
    about: Mapping[str, Any]
    """The description of the run, from the lines without a step: strategy, bytes per parameter, ..."""
    records: Sequence[Line] = field(repr=False)
    """The lines with a step, in order. If the step number goes back, the run was resumed from there: earlier records of
    that step and of later ones are dropped."""
    truncated: bool = False
    """True if the last line was incomplete, as after a killed run; it was dropped."""

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self.records]

    def series(self, value: Callable[[Line], Any]) -> tuple[list[int], list[float]]:
        """Steps and values of the records that have a value; `value` raises KeyError for the others."""
        steps, values = [], []
        for record in self.records:
            try:
                number = value(record)
            except KeyError:
                continue
            if isinstance(number, (int, float)) and math.isfinite(number):
                steps.append(record["step"])
                values.append(float(number))
        return steps, values

    @property
    def nonfinite(self) -> list[int]:
        """The steps whose loss or update was NaN or Inf."""
        return [record["step"] for record in self.records if not _is_finite(record)]

    @property
    def broken(self) -> bool:
        """Returns True if the last step is one of these; else such steps were skipped."""
        return self.nonfinite[-1:] == self.steps[-1:]


def _is_finite(record: Line) -> bool:
    total = record.get("total", {})
    # Null stands for NaN and Inf in a log. A ratio is null without an update, too.
    return None not in (record.get("loss", 0), total.get("raw_norm", 0), total.get("pair", {}).get("norm", 0))


class NoSteps(LogError):
    """A log without a measured step, as of a run that has just begun."""


def read_logs(paths: Sequence[Path], leave_out: Callable[[NoSteps], object] = lambda error: None) -> list[Log]:
    """The logs in files, and in the `*.jsonl` files of folders, with distinct names.

    Files of a folder that have no step yet are left out, and passed to `leave_out`.
    """
    files = [(file, path.is_dir()) for path in paths for file in _files(path)]
    logs = []
    for (file, of_folder), name in zip(files, _names([file for file, _ in files]), strict=True):
        try:
            logs.append(read_log(file, name))
        except NoSteps as error:  # noqa: PERF203  # reading a file costs more than the try
            if not of_folder:
                raise
            leave_out(error)
    if not logs:
        raise LogError(f"{', '.join(map(str, paths))} holds no log with a measured step; come back after the first")
    return logs


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if logs := sorted(path.rglob("*.jsonl")):
        return logs
    raise LogError(f"{path} holds no .jsonl file; name the log of a run, or a folder of them")


def _names(files: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that are all distinct."""
    # A folder a run, or a file a run: as many parts of the path as tell them apart.
    for length in range(1, max(len(file.parts) for file in files) + 1):
        names = ["/".join(file.with_suffix("").parts[-length:]) for file in files]
        if len(set(names)) == len(names):
            return names
    return [f"{i}: {file}" for i, file in enumerate(files, 1)]  # a file that is named twice


def read_log(path: Path, name: str) -> Log:
    """Reads one file. An incomplete last line, which a killed run leaves, is dropped; other bad lines are errors."""
    parsed, rest = _lines(path)
    records: list[Line] = []
    for line in parsed:
        if "step" in line:
            # The run was resumed from an earlier step: what it does again counts.
            while records and records[-1]["step"] >= line["step"]:
                records.pop()
            records.append(line)
    about = {key: value for line in parsed if "step" not in line for key, value in line.items()}
    if not records:
        raise NoSteps(
            f"{path} holds no measured step; the run was stopped before its first, or this is not the log of a run"
        )
    return Log(name, path, about, records, bool(rest) and not _is_json(rest))


def mend(path: Path, file: BinaryIO) -> None:
    """Locks a log that was opened for appending, and cuts off an incomplete last line. LogError if it is not a log."""
    if not path.is_file():
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = f"{path} is being written by another JsonLog, of this process or another one: close() its monitor"
        raise LogError(said) from None
    except OSError:
        pass  # some network file systems have no locks
    _, rest = _lines(path)
    if rest and not _is_json(rest):
        file.truncate(path.stat().st_size - len(rest.encode()))
    elif rest:
        file.write(b"\n")


def _lines(path: Path) -> tuple[list[Line], str]:
    """The lines of a log, and the text after its last newline: empty, an incomplete line, or a complete one."""
    try:
        lines = path.read_bytes().decode().split("\n")
    except FileNotFoundError:
        raise LogError(
            f"there is no file or folder {path}; a run writes its log with monitor(..., to=JsonLog('runs/name.jsonl'))"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"{path} cannot be read as text ({error}); give the .jsonl log of a run") from None
    rest = lines.pop()
    if _is_json(rest):  # the newline alone is missing
        lines.append(rest)
    return [_checked(path, number, text) for number, text in enumerate(lines, 1) if text.strip()], rest


def _is_json(text: str) -> bool:
    with suppress(ValueError):
        return json.loads(text) is not None
    return False


def _checked(path: Path, number: int, text: str) -> Line:
    """A line of a log; LogError if it is not what a monitor writes."""
    try:
        value = json.loads(text, parse_constant=lambda name: None)  # NaN, Infinity: as null
        why = _why_foreign(value)
    except json.JSONDecodeError as error:
        why = f"it is not JSON ({error.msg} at column {error.colno})"
    if why:
        said = f"{path}, line {number} is not of the log of a run: {why}; give .jsonl files that a run wrote"
        raise LogError(said) from None
    line: Line = value
    return line


def _why_foreign(value: Any) -> str:
    if not isinstance(value, dict):
        return "it is not a JSON object"
    if type(step := value.get("step", 0)) is not int:
        return f"its step is {step!r}, not a whole number"
    try:
        measured = [value.get("total", {}), *value.get("modules", {}).values()]
        parts = [part.get(key, {}) for part in measured for key in ("pair", "high", "stalled")]
    except AttributeError:
        parts = [None]
    return "" if all(isinstance(part, dict) for part in parts) else "its numbers are not what a monitor writes"
