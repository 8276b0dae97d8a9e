"""Writers, which receive the numbers of a monitor while training runs: a JSON log, trackers, a live line."""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from collage_neuron import errors
from collage_neuron.monitoring import run_log
from collage_neuron.monitoring.metrics import ADVICE, Measures, Record

UNREAD = 64
"""Default limit of measured steps that stay on the device until somebody asks for them."""

Logged = Mapping[str, Any]
"""The values passed to `Monitor.log` with a step: numbers, or mappings of numbers (`memory`), by name."""

OWN = ("step", "total", "groups", "modules")
"""Names that are reserved for the fields of a record."""


def check_names(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a reserved name."""
    if own := [name for name in values if name in OWN]:
        raise ValueError(f"{own[0]!r} is the monitor's own name for a part of its records; log under another")


class Writer:
    """Receives the measured steps of one monitor, in order, each after it was read. Subclass it for your own."""

    unread: int = UNREAD
    """Limit of measured steps that may stay on the device; 1 or more."""

    def begin(self, about: Mapping[str, Any]) -> None:
        """Called before the first record; `about` describes the run: strategy, bytes_per_parameter, versions, ..."""

    def write(self, record: Record, logged: Logged) -> None:
        """Called with each measured step and the values logged with it."""
        raise NotImplementedError

    def close(self) -> None:
        """Called after the last record."""


class JsonLog(Writer):
    """A file of JSON lines for `python -m collage_neuron report`: one about the run, then one per measured step.

    Each line is flushed when `write` returns, so a kill leaves at most one incomplete line. To resume, pass the same
    file: an incomplete last line is cut off and new records are appended; if steps are repeated, readers use the later
    ones. Numbers have 8 digits; NaN and Inf are null, since JSON has neither. A missing folder is created.

    Args:
        path: the file, `.jsonl` by custom.
        about: further entries for the first line, which describes the run (`seed=0`, `lr=3e-4`).

    Raises:
        OSError: the file cannot be written.
        ValueError: `about` has a name that is reserved for the fields of a record.
        collage_neuron.errors.LogError: the file is not a log, or another JsonLog writes to it; it is left unchanged.
    """

    def __init__(self, path: str | Path, **about: Any) -> None:
        check_names(about)
        self.path = Path(path)
        self.monitored = False  # until it is given to a monitor
        self._about = about
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer a line is one write, so that a kill cuts at most the last.
            self._file = self.path.open("ab", buffering=0)
            run_log.mend(self.path, self._file)
        except OSError as error:
            message = f"the log {self.path} cannot be written ({error.strerror}); name a file in a folder of yours"
            raise OSError(message) from error
        except errors.LogError as error:
            self._file.close()
            raise errors.LogError(f"{error}; a log would be written on here: name another file") from None

    def begin(self, about: Mapping[str, Any]) -> None:
        self._append({**about, **self._about})

    def write(self, record: Record, logged: Logged) -> None:
        self._append({"step": record.step, **logged, **record.as_dict()})

    def close(self) -> None:
        self.monitored = False
        # Else a process that was forked meanwhile, such as a worker of a DataLoader, would keep the lock.
        with suppress(OSError, ValueError):
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        rest = json.dumps(plain(line), default=str).encode() + b"\n"
        # A raw write may take a part.
        while rest:
            rest = rest[self._file.write(rest) :]

    def __repr__(self) -> str:
        return f"JsonLog({str(self.path)!r})"


def plain(value: Any) -> Any:
    """The value with numbers cut to 8 digits, enough for fp32, and None for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if isinstance(value, float):
        return float(f"{value:.8g}") if math.isfinite(value) else None
    return value


class _Tagged(Writer):
    """A writer of the numbers of a step by their tags."""

    def __init__(self, modules: bool) -> None:
        self._modules = modules

    def write(self, record: Record, logged: Logged) -> None:
        self._add(points(record, logged, self._modules), record.step)

    def _add(self, tagged: dict[str, float], step: int) -> None:
        raise NotImplementedError


class TensorBoard(_Tagged):
    """Scalars for TensorBoard: `collage/...` of the whole, `collage_modules/NAME/...` of each module.

    `edq` is the ratio EDQ / ||raw update||; names that end in `_hi` are for the high word alone. Logged values are
    `collage/NAME`. NaN is left out if it is a ratio with a zero denominator, not if the update is NaN or Inf.

    Args:
        writer: a SummaryWriter of torch.utils.tensorboard or tensorboardX, or any other object with
            `add_scalar(tag, scalar_value, global_step)`; you close it.
        modules: whether to write two curves for each module too.
    """

    def __init__(self, writer: Any, modules: bool = True) -> None:
        super().__init__(modules)
        self._writer = writer

    def _add(self, tagged: dict[str, float], step: int) -> None:
        for tag, value in tagged.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        getattr(self._writer, "flush", lambda: None)()


class WandB(_Tagged):
    """Numbers for Weights & Biases, under the tags that `TensorBoard` writes: `collage/edq`, `collage/lost`, ...

    They are drawn over `collage/step`, the optimizer's own count, and not over wandb's count of rows: a measured step
    is read later than your own `run.log`, and wandb drops rows whose step has passed. What describes the run is in
    `run.config["collage"]`.

    Args:
        run: what `wandb.init()` returned; you finish it, after the monitor was closed.
        modules: whether to write two curves for each module too.
    """

    def __init__(self, run: Any, modules: bool = True) -> None:
        super().__init__(modules)
        self._run = run
        for tags in ("collage/*", "collage_modules/*"):
            run.define_metric(tags, step_metric="collage/step")

    def begin(self, about: Mapping[str, Any]) -> None:
        self._run.config.update({"collage": dict(about)}, allow_val_change=True)  # a resumed run says it again

    def _add(self, tagged: dict[str, float], step: int) -> None:
        self._run.log({**tagged, "collage/step": step})


class MLflow(_Tagged):
    """Numbers for MLflow, under the tags that `TensorBoard` writes.

    What describes the run becomes tags, `collage.NAME`: tags and not parameters, since MLflow rejects a parameter that
    a resumed run has with another value. `collage/nonfinite` is how many numbers of a step were NaN or Inf, if any.

    Args:
        mlflow: the module `mlflow`: its active run is written to, and you end it, after the monitor was closed.
        modules: whether to write two curves for each module too.
    """

    def __init__(self, mlflow: Any, modules: bool = True) -> None:
        super().__init__(modules)
        self._mlflow = mlflow

    def begin(self, about: Mapping[str, Any]) -> None:
        named = {name.lstrip("/").replace("/", "."): str(value) for name, value in flat("", about)}
        self._mlflow.set_tags({f"collage.{name}": value for name, value in named.items()})

    def _add(self, tagged: dict[str, float], step: int) -> None:
        # Its stores keep numbers; a NaN that was logged would end the write of all others.
        finite = {tag: x for tag, x in tagged.items() if math.isfinite(x)}
        left_out = len(tagged) - len(finite)
        self._mlflow.log_metrics(finite | ({"collage/nonfinite": left_out} if left_out else {}), step=step)


def points(record: Record, logged: Logged, modules: bool) -> dict[str, float]:
    """The numbers of a step by their tag, without ratios with a zero denominator."""
    tagged = {**dict(flat("collage", logged)), **{f"collage/{k}": x for k, x in curves(record.total).items()}}
    for name, m in record.modules.items() if modules else ():
        # Two of each alone: a model has hundreds of modules.
        tagged |= {f"collage_modules/{name}/edq": m.pair.ratio, f"collage_modules/{name}/lost": m.pair.lost}
    # A NaN of the user is information, one of ours in a finite update says that there was nothing to divide by.
    finite = record.total.finite
    return {tag: x for tag, x in tagged.items() if not (finite and math.isnan(x)) or tag.split("/")[1] in logged}


def curves(m: Measures) -> dict[str, float]:
    """The numbers of a step that become curves, by the end of their tag."""
    return {
        "edq": m.pair.ratio, "edq_hi": m.high.ratio, "lost": m.pair.lost, "lost_hi": m.high.lost,
        "zero": m.zero, "raw_norm": m.raw_norm,
        **{f"stalled/{name}": x for name, x in m.stalled.items()},
        **{f"low_norm/{name}": x for name, x in m.low_norms.items()},
    }  # fmt: skip


def flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers in nested mappings, by their path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(f"{prefix}/{name}", value)
        else:
            yield f"{prefix}/{name}", value


class Live(Writer):
    """A line about the last measured step that was read: `step 90  EDQ 0.9998 (hi 0.412)  lost 0.00 % ...`.

    One measured step stays on the device, so the line is that of the last measured step but one (`Writer.unread`).

    Args:
        show: a function that shows the text: `bar.set_postfix_str` of a tqdm bar, `print`, `logging.info`; None means
            one line on stderr, which is overwritten each time if stderr is a terminal.
    """

    unread = 1

    def __init__(self, show: Callable[[str], object] | None = None) -> None:
        self._show = on_stderr if show is None else show
        self._ends = show is None and sys.stderr.isatty()
        self._broken = 0

    def write(self, record: Record, logged: Logged) -> None:
        self._broken = 0 if record.total.finite else self._broken or record.step
        self._show(line(record, logged, self._broken))

    def close(self) -> None:
        if self._ends:
            print(file=sys.stderr)


def on_stderr(text: str) -> None:
    """Prints a line; on a terminal it replaces the last one."""
    if sys.stderr.isatty():
        # Cut, since a line that wraps is not overwritten; the code at its end clears what a longer one left.
        print(f"\r{text[: shutil.get_terminal_size().columns - 1]}\033[K", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def line(record: Record, logged: Logged, broken: int = 0) -> str:
    """The step as text, in brackets what holds for the high word alone; `broken`: since when updates are NaN or Inf."""
    begin = [f"step {record.step}", *(f"{name} {x:.4g}" for name, x in logged.items() if isinstance(x, (int, float)))]
    if broken:
        return "  ".join([*begin, f"NaN or Inf in the update since step {broken}; if it stays so, {ADVICE}"])
    total, (pair, high) = record.total, (record.total.pair, record.total.high)
    apart = pair != high
    edq = _shown(pair.ratio, ".4f") + (f" (hi {_shown(high.ratio, '.3f')})" if apart else "")
    lost = _shown(pair.lost, ".2f", " %") + (f" (hi {_shown(high.lost, '.1f', ' %')})" if apart else "")
    one = len(total.stalled) == 1
    stalled = [f"stalled {'' if one else name + ' '}{_shown(x, '.0f', ' %')}" for name, x in total.stalled.items()]
    return "  ".join([*begin, f"EDQ {edq}", f"lost {lost}", *stalled])


def _shown(x: float, form: str, unit: str = "") -> str:
    return "-" if math.isnan(x) else f"{x:{form}}{unit}"
